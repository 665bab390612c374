"""Algorithms: generators of rounds, one family per file, without MPI."""

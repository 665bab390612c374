"""Algorithms of collectives: generators of each rank's sends, receives and reductions by round, without MPI."""

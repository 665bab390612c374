"""Fuzzer: random sequences of collective calls, run on mpi4py and on Chorus, whose results are compared."""

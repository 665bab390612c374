"""Fuzz our communicators: random sequences of calls, whose results must be those of the MPI's own, to the bit."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.fuzz", mpi=False)

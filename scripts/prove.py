"""Prove every algorithm in the catalogue for every number of ranks, and show what it costs against the bounds."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.prove", mpi=False)

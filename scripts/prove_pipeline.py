"""Prove every pipeline schedule for every number of stages and micro-batches, and hold it against its formulas."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.prove_pipeline", mpi=False)

"""Ranks learn to read handwritten digits together, then race our collectives against the MPI's own."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.demo")

"""Price every algorithm of a collective at any number of ranks, on paper: no MPI job, no cluster."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.simulate", mpi=False)

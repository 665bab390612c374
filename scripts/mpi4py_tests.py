"""Run mpi4py's own tests with `collectives.Communicator` in the place of COMM_WORLD and COMM_SELF."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.mpi4py_tests", mpi=False)

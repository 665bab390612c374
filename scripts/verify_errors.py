"""How wrong are sums of encoded vectors? Played by any number of ranks in this process, and held against the laws."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.verify_errors", mpi=False)

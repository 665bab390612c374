"""Draw who talks to whom in which round: as text, or as a picture with -o."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.draw", mpi=False)

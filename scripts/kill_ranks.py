"""Kill a server or a worker of a training, at a random moment, many times over, and see how the trainings end."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.kill_ranks", mpi=False)

"""Train a model on all ranks: digits, the text of Python's documentation, made-up tasks, or your own file."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.train", guarded=True)

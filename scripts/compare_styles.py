"""Train the same model in every style that needs no server, and by data parallelism beside them."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.compare_styles")

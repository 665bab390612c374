"""Measure which algorithm is the fastest here, for every collective and size, and keep it for `auto` to go by."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.tune")

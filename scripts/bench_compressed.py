"""Race sums of encoded vectors against plain ones, and say how wrong they are."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.bench_compressed")

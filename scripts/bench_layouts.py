"""Race the layouts of data parallelism against each other: one model, one communicator, all of them in turns."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.bench_layouts")

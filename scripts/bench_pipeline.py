"""Is a pipeline's bubble what the simulator says? Every schedule with stages that sleep for a known time."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.bench_pipeline")

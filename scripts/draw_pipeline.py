"""Draw what the stages of a pipeline do when: as text, as a picture, or as a trace for ui.perfetto.dev."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.draw_pipeline", mpi=False)

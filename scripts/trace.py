"""Record one call over all ranks as a trace that ui.perfetto.dev and chrome://tracing open."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.trace")

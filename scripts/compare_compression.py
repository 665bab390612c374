"""Train the same model with every way to compress gradients, and with none, from several seeds: where do they end?"""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.compare_compression")

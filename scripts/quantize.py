"""Write a trained model in few bits, and say what that costs: in accuracy, in bytes, layer by layer."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.quantize_model")

"""How fast arrays become few bits and numbers again, on one core, beside memcpy and gguf's quantiser in NumPy."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("quant.cli.bench", mpi=False)

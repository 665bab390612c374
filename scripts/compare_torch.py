"""Train one model twice, by Chorus and by PyTorch's DistributedDataParallel over gloo, and compare digits and speed."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.compare_torch")

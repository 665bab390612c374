from parallel.cli.main import run

if __name__ == "__main__":
    run("quant.cli.bench", mpi=False)

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.gpu_probe", mpi=False)

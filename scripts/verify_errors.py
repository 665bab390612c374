from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.verify_errors", mpi=False)

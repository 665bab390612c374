"""Do all layouts end in the same parameters, bit for bit?"""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.verify_layouts", mpi=False)

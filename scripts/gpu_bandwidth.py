"""How fast CuPy arrays travel: mpirun -n 2 python scripts/gpu_bandwidth.py [--sizes 64K:64M] [--direct]."""

from parallel.cli.main import run

if __name__ == "__main__":
    run("collectives.cli.gpu_bandwidth", mpi=False)

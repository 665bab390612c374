import sys
from pathlib import Path

from parallel.cli.main import run

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    run("fuzzing.fuzz", mpi=False)

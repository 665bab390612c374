import sys
from pathlib import Path

from parallel.cli.main import run

if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "studies")]
    run("fuzzing.fuzz", mpi=False)

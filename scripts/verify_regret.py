"""Is the regret of a stale synchronous training below its bound?"""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.verify_regret")

"""One worker of several is slow: how long do bsp, ssp and async take for the same samples?"""

from parallel.cli.main import run

if __name__ == "__main__":
    run("parallel.cli.race_servers")

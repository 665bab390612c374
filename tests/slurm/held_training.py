"""`chorus train` that is held after given steps: held_training.py 11,20 arguments of chorus train.

In the job's n-th start it is held after the n-th step of the list, until a signal or its time limit ends it. So it is
stopped where a test expects it, at any speed of the machine. Ranks learn of the end by a file, as the time limit is
seen by one of them only.
"""

import sys
import time
from os import environ
from pathlib import Path

from parallel.cli.main import main
from parallel.trainer.trainer import Training

run, start = Training.run, int(environ.get("SLURM_RESTART_COUNT", "0"))
after = [int(step) for step in sys.argv[1].split(",")][start : start + 1]
ended = Path(f"ended-{environ['SLURM_JOB_ID']}-{start}")


def held(self, stop):
    for record in run(self, stop):
        yield record
        if after == [self.done]:
            if environ["SLURM_PROCID"] == "0":
                print(f"held after step {self.done}", flush=True)
            while not (stop() or ended.exists()):
                time.sleep(0.1)
            ended.touch()


Training.run = held
sys.exit(main(["train", *sys.argv[2:]]))

"""`chorus train` with a pause after each step: slow_training.py SECONDS arguments of chorus train."""

import sys
import time

from parallel.cli.main import main
from parallel.trainer.trainer import Training

run, seconds = Training.run, float(sys.argv[1])


def slow(self, stop):
    for record in run(self, stop):
        yield record
        time.sleep(seconds)


Training.run = slow
sys.exit(main(["train", *sys.argv[2:]]))

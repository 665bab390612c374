"""Trainings started as a user starts them, under mpiexec, and the files that they leave."""

import json
import time

import numpy as np

from parallel.checkpoint.checkpoint_files import tensors_in
from support.launches import ended, start_ranks

TIMED = {"seconds", "communication", "samples_per_s", "tokens_per_s", "mfu", "hfu", "peak_flops", "communication_share"}
TIMED |= {"resident_bytes", "by_rank"}


def start(*arguments, ranks=2, program=("-m", "parallel.cli.main", "train"), **more):
    return start_ranks(ranks, (*program, *arguments), **more)


def run(*arguments, ranks=2, status=0, **more):
    process = start(*arguments, ranks=ranks, **more)
    output = ended(process)
    assert (process.returncode == 0) == (status == 0), output
    return output


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def course(path):
    """What must be the same in two runs: every line without its times."""
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines(path)]


def same(one, other):
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    return all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in pairs) and len(pairs) > 5


def until(condition, process, limit=60):
    deadline = time.monotonic() + limit
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines_so_far(path):
    return path.read_text().splitlines()


KILLER = """
import os, signal, sys
from mpi4py import MPI
from parallel.cli import train
from parallel.trainer.trainer import Training

run, victim, at = Training.run, int(sys.argv.pop(1)), int(sys.argv.pop(1))

def dying(self, stop):
    for record in run(self, stop):
        yield record
        if self.done == at and MPI.COMM_WORLD.Get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

Training.run = dying
from collectives.cli import launcher
launcher.run(train.main)
"""
"""Program whose arguments are a rank that is killed, after how many steps, and those of `chorus train`."""

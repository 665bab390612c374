"""Trainings started as a user starts them, under mpiexec, and the files that they leave."""

import json
import re
import signal
import time

import numpy as np
from mpi4py import MPI

from parallel.checkpoint.checkpoint_files import all_in, tensors_in
from support.launches import ended, start_command, start_ranks

TIMED = {"seconds", "communication", "samples_per_s", "tokens_per_s", "mfu", "hfu", "peak_flops", "communication_share"}
TIMED |= {"resident_bytes", "by_rank"}


TRAIN = ("-m", "parallel.cli.main", "train")


def start(*arguments, ranks=2, program=TRAIN, **more):
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


def until(condition, process):
    """Wait for the condition while the process runs, up to the test's limit of time."""
    try:
        while not condition():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
    except BaseException:
        process.terminate()  # a launcher that is killed may leave ranks
        raise


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

STOPS = {
    "chorus -n, SIGINT": (start_command, ("train",), signal.SIGINT),
    "chorus -n, SIGTERM": (start_command, ("train",), signal.SIGTERM),
    "mpiexec, SIGUSR1": (start_ranks, TRAIN, signal.SIGUSR1),
    "mpiexec, SIGINT": (start_ranks, TRAIN, signal.SIGINT),
}
"""Ways to stop a training: how it is started, the first words of the command, and the signal that its process gets."""


def stop_and_resume(way, ranks, task, further, folder):
    """Stop a training after some steps, and continue it for two; `further` options are not in checkpoints.

    All steps that were made are kept, unless Open MPI's mpiexec gets Ctrl-C: it kills all ranks 0.5 s later.
    """
    begin, words, number = STOPS[way]
    keep = ["--checkpoint", folder / "c", "--json", folder / "m.jsonl"]
    process = begin(ranks, [*words, *task, *further, "--steps", 100000, "--every", 100000, *keep])
    until(lambda: (folder / "m.jsonl").exists() and (folder / "m.jsonl").read_text().count("\n") >= 3, process)
    process.send_signal(number)
    output = ended(process)
    assert process.returncode == 128 + number or (process.returncode and begin is start_ranks), output
    assert len(re.findall(r"ended by SIG(?:INT|TERM|USR1) after step|the training was killed", output)) == 1, output
    assert "Traceback" not in output, output
    if way == "mpiexec, SIGINT" and "no checkpoint keeps it" in output:
        assert "Open MPI" in MPI.Get_library_version() and not all_in(folder / "c"), output
        return
    (path,) = all_in(folder / "c")
    done = int(path.name[5:])
    assert done == len(lines(folder / "m.jsonl")) >= 3, output
    output = run(*keep, "--resume", "--steps", done + 2, *further, ranks=ranks)
    assert f"{done} steps were made" in output and f"after {done + 2} steps" in output

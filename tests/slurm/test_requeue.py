"""Trainings that are stopped and put back into the queue end with the bits of an undisturbed one.

All run side by side: ten that are stopped, and an undisturbed one of each layout. In its first start a training is
held after a step without a checkpoint. With other numbers in the variable SEED, other layouts are held after other
steps. Seeds 0 to 3 try every layout with every way to stop it.
"""

import re
import signal
import sys
from contextlib import suppress
from itertools import chain, pairwise
from os import environ, kill
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from support.launched_training import same
from support.slurm_jobs import Job, call, wait_until

from parallel.checkpoint.checkpoint_files import all_in

pytestmark = pytest.mark.timeout(500)

STEPS, EVERY = 40, 8
HELD = Path(__file__).parent / "held_training.py"
LAYOUTS = {"dp": "--parallel dp", "zero3": "--parallel zero3", "pp": "--parallel pp:1f1b", "tp": "--mesh tp=2"}
SCRIPT = """#!/bin/bash
srun "{python}" "{held}" {at} --data digits --model mlp {layout} --steps {steps} --every {every} \
    --checkpoint checkpoints || {{ [ $? -eq 138 ] && scontrol requeue $SLURM_JOB_ID; }}
"""

OTHERS = "--exclude=node3,node4"
WAYS = {
    "own time limit": ("ended before the time limit", [OTHERS, "--time=2"]),
    "signal before the time limit": ("ended by SIGUSR1", [OTHERS, "--time=60", "--signal=USR1@120"]),
    "scancel": ("ended by SIGUSR1", [OTHERS]),
    "scontrol": ("ended by SIGTERM", [OTHERS]),
    "failed node": ("NODE FAILURE", ["--nodelist=node2,node3"]),
    "urgent job": ("DUE TO PREEMPTION", ["--nodelist=node1,node4"]),
}
"""Ways to stop a training: words in its output, and options of its submission: node3 fails, and node4 is urgent."""

CASES = [
    ("own time limit", 2), ("signal before the time limit", 3), ("scancel", 0), ("scancel", 1), ("scontrol", 1),
    ("scontrol", 3), ("urgent job", 0), ("urgent job", 2), ("failed node", 1), ("failed node", 3),
]  # fmt: skip
"""Ways with places of their layouts, to which the seed is added."""


def submit(folder, layout, at, *options):
    """Submit a training with one rank on each of two nodes, held after step `at`."""
    folder.mkdir(parents=True)
    script = SCRIPT.format(python=sys.executable, held=HELD, at=at, layout=LAYOUTS[layout], steps=STEPS, every=EVERY)
    return Job(folder, script, "-N2", "-n2", *options)


def last(job):
    return all_in(job.script.parent / "checkpoints")[-1]


def on_node(node, job):
    """Process numbers of the daemon and the ranks of a job's first step on a node."""
    host = call("pgrep", "--full", f"slurmd -D -N {node}").split()[-1]
    found = call("pgrep", "--full", rf"slurmstepd: \[{job.number}\.0\]", "--nslist", "uts", "--ns", host).split()
    ranks = [call("pgrep", "--parent", daemon, expect=None).split() for daemon in found]
    return [int(number) for number in (*found, *chain(*ranks))]


def fail_node(jobs):
    """Kill all that runs on a node, and let Slurm take the node for failed: nothing is saved in time.

    What PMIx of the killed daemons left there is removed, as if the host had started anew: the same job's next daemons
    need these names.
    """
    for job in jobs:
        for number in on_node("node3", job):
            with suppress(ProcessLookupError):
                kill(number, signal.SIGKILL)
    call("scontrol", "update", "nodename=node3", "state=down", "reason=test")
    for job in jobs:
        wait_until(lambda job=job: "Restarts=1" in job.shown(), lambda job=job: job.text())
    room = Path(environ["SLURM_CONF"]).parent.parent
    call(room / "on", "node3", f"rm -rf {room}/slurm/node3/*pmix.* /dev/shm/spmix_*")
    call("scontrol", "update", "nodename=node3", "state=resume")


def stop(jobs):
    """Stop all trainings by their ways. Slurm looks at times once in 30 s."""
    by = {way: [job for (other, _), job in jobs.items() if other == way] for way in WAYS}
    for job in jobs.values():
        wait_until(lambda job=job: "held after" in job.text(), lambda job=job: f"{job.shown()}\n{job.text()}")
    for job in by["signal before the time limit"]:
        minutes = int(re.search(r"RunTime=00:(\d\d):", job.shown())[1])
        call("scontrol", "update", f"jobid={job.number}", f"timelimit={minutes + 2}")
    for job in by["scancel"]:
        call("scancel", "--signal=USR1", job.number)
    for job in by["scontrol"]:
        call("scontrol", "requeue", job.number)
    fail_node(by["failed node"])
    call("srun", "--partition=urgent", "--nodelist=node4", "-N1", "-n2", "true")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Jobs by way and layout, the steps after which they were held, and last checkpoints of undisturbed ones."""
    folder, seed = tmp_path_factory.mktemp("trainings"), int(environ.get("SEED", "0"))
    draw, names, jobs, held = Random(seed), [*LAYOUTS], {}, {}
    for way, place in CASES:
        case = way, names[(place + seed) % len(names)]
        held[case] = draw.randrange(EVERY, STEPS - EVERY) // EVERY * EVERY + draw.randrange(1, EVERY - 1)
        jobs[case] = submit(folder / "-".join(case).replace(" ", "-"), case[1], held[case], *WAYS[way][1])
    stop(jobs)
    alone = {layout: submit(folder / layout, layout, 0, OTHERS) for layout in LAYOUTS}
    for job in alone.values():
        assert "resumed" not in job.end()
    return SimpleNamespace(seed=seed, names=names, jobs=jobs, held=held, alone=alone)


@pytest.mark.parametrize("way, place", CASES)
def test_stopped_training(trainings, way, place):
    """The training has the expected end, and lost no step, or if its node failed those since a checkpoint."""
    case = way, trainings.names[(place + trainings.seed) % len(LAYOUTS)]
    job, held, expected = trainings.jobs[case], trainings.held[case], last(trainings.alone[case[1]])
    text = job.end()
    assert WAYS[way][0] in text and f"held after step {held}" in text, text
    ends = re.findall(r"ended (.*?) after step (\d+)|resumed .*: (\d+) steps were made", text)
    first = int(next(resumed for _, _, resumed in ends if resumed))
    assert first == held // EVERY * EVERY if way == "failed node" else first >= held, text
    for (_, ended, _), (_, _, resumed) in pairwise(ends):
        assert not (ended and resumed) or ended == resumed, text
    assert last(job).name == expected.name
    assert same(last(job), expected), text


def test_array(tmp_path):
    """Every job of an array is a training of its own, with its number in the first line."""
    script = f"""#!/bin/bash
srun "{sys.executable}" "{HELD}" 0 --data digits --model mlp --steps 5 --checkpoint "$SLURM_ARRAY_TASK_ID"
"""
    job = Job(tmp_path, script, "--array=3-4", "-n1", "--output=%a.out")
    for task in (3, 4):
        output = tmp_path / f"{task}.out"
        wait_until(lambda output=output: output.exists() and "checkpoints are in" in output.read_text(), job.shown)
        assert f"1 rank on 1 node, Slurm job {job.number}_{task}" in output.read_text()
        assert all_in(tmp_path / str(task))

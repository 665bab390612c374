"""Trainings that are stopped and put back into the queue end with the bits of an undisturbed one."""

import re
import signal
import sys
from contextlib import suppress
from itertools import chain, pairwise
from os import environ, kill
from pathlib import Path

import pytest
from support.launched_training import lines, same
from support.slurm_jobs import Job, call, wait_until

from parallel.checkpoint.checkpoint_files import all_in

pytestmark = pytest.mark.timeout(500)

STEPS, EVERY = 60, 8
SLOW = Path(__file__).parent / "slow_training.py"
LAYOUTS = {"dp": "--parallel dp", "zero3": "--parallel zero3", "pp": "--parallel pp:1f1b", "tp": "--mesh tp=2"}
SCRIPT = """#!/bin/bash
srun "{python}" "{slow}" {pause} --data digits --model mlp {layout} --steps {steps} --every {every} \
    --json metrics.jsonl --checkpoint checkpoints || {{ [ $? -eq 138 ] && scontrol requeue $SLURM_JOB_ID; }}
"""


def submit(folder, layout, *options, pause=0.3):
    """Submit a training with one rank on each node; `pause` are seconds after a step."""
    folder.mkdir(parents=True)
    script = SCRIPT.format(
        python=sys.executable, slow=SLOW, pause=pause, layout=LAYOUTS[layout], steps=STEPS, every=EVERY
    )
    return Job(folder, script, "-N2", "-n2", *options)


def steps_of(job):
    path = job.script.parent / "metrics.jsonl"
    return len(lines(path)) if path.exists() else 0


def under_way(job):
    """Wait until a training has a checkpoint and further steps."""
    wait_until(lambda: steps_of(job) > EVERY + 2, lambda: job.text())


def last(job):
    return all_in(job.script.parent / "checkpoints")[-1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Last checkpoint by layout."""
    folder = tmp_path_factory.mktemp("undisturbed")
    jobs = {layout: submit(folder / layout, layout, pause=0) for layout in LAYOUTS}
    for job in jobs.values():
        assert "resumed" not in job.end()
    return {layout: last(job) for layout, job in jobs.items()}


def check(job, expected):
    """The training has the expected end, and lost no step, or after a sudden end those since a checkpoint at most."""
    text = job.end()
    ends = re.findall(r"ended (.*?) after step (\d+)|resumed .*: (\d+) steps were made", text)
    assert any(resumed for _, _, resumed in ends), text
    for (_, ended, _), (_, _, resumed) in pairwise(ends):
        assert not (ended and resumed) or ended == resumed, text
    assert last(job).name == expected.name
    assert same(last(job), expected), text
    return text


def scancel(job):
    under_way(job)
    call("scancel", "--signal=USR1", job.number)


def requeue(job):
    under_way(job)
    call("scontrol", "requeue", job.number)


SINGLE = {
    "signal": (scancel, "ended by SIGUSR1", 0.3, []),
    "requeue": (requeue, "ended by SIGTERM", 0.3, []),
    "time limit": (None, "ended before the time limit", 2, ["--time=2"]),
    "signal before the time limit": (None, "ended by SIGUSR1", 1.6, ["--time=3", "--signal=USR1@90"]),
}
"""Preemptions of one job: how, words in its output, seconds after a step, and options of its submission.

Slurm looks for times once in 30 s, and sends the signal up to 30 s early, here 60 to 90 s after the job's start: then
the training runs, and has not ended by itself. A signal that comes before the step of srun is lost.
"""

CASES = [
    ("dp", "signal"), ("zero3", "requeue"), ("pp", "time limit"), ("tp", "signal before the time limit"),
    ("zero3", "signal"), ("tp", "requeue"),
]  # fmt: skip


def test_single_jobs(undisturbed, tmp_path):
    """Six trainings at a time; those with a time limit need longer than it is."""
    jobs = []
    for number, (layout, way) in enumerate(CASES):
        _, _, pause, options = SINGLE[way]
        jobs.append(submit(tmp_path / str(number), layout, *options, pause=pause))
    for job, (_, way) in zip(jobs, CASES, strict=True):
        if act := SINGLE[way][0]:
            act(job)
    for job, (layout, way) in zip(jobs, CASES, strict=True):
        text = check(job, undisturbed[layout])
        assert SINGLE[way][1] in text, text


def test_urgent_job(undisturbed, tmp_path):
    """A job of a partition with a higher priority takes the nodes."""
    jobs = {layout: submit(tmp_path / layout, layout) for layout in ("dp", "pp")}
    for job in jobs.values():
        under_way(job)
    call("srun", "--partition=urgent", "--exclusive", "-N2", "true")
    for layout, job in jobs.items():
        assert "DUE TO PREEMPTION" in check(job, undisturbed[layout])


def on_node(node, job):
    """Process numbers of the daemon and the ranks of a job's first step on a node."""
    host = call("pgrep", "--full", f"slurmd -D -N {node}").split()[-1]
    found = call("pgrep", "--full", rf"slurmstepd: \[{job.number}\.0\]", "--nslist", "uts", "--ns", host).split()
    ranks = [call("pgrep", "--parent", daemon, expect=None).split() for daemon in found]
    return [int(number) for number in (*found, *chain(*ranks))]


def test_failed_node(undisturbed, tmp_path):
    """All that runs on a node is killed, and Slurm takes the node for failed: nothing is saved in time.

    Before it returns, what PMIx of the killed daemons left there is removed, as if the host had started anew: the same
    job's next daemons need these names.
    """
    jobs = {layout: submit(tmp_path / layout, layout) for layout in ("zero3", "tp")}
    for job in jobs.values():
        under_way(job)
    before = {layout: steps_of(job) for layout, job in jobs.items()}
    for job in jobs.values():
        for number in on_node("node2", job):
            with suppress(ProcessLookupError):
                kill(number, signal.SIGKILL)
    call("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    for job in jobs.values():
        wait_until(lambda job=job: "Restarts=1" in job.shown(), lambda job=job: job.text())
    room = Path(environ["SLURM_CONF"]).parent.parent
    call(room / "on", "node2", f"rm -rf {room}/slurm/node2/*pmix.* /dev/shm/spmix_*")
    call("scontrol", "update", "nodename=node2", "state=resume")
    for layout, job in jobs.items():
        text = check(job, undisturbed[layout])
        assert "NODE FAILURE" in text, text
        resumed = int(re.search(r"resumed .*: (\d+) steps were made", text)[1])
        assert resumed >= before[layout] // EVERY * EVERY, (before, text)


def test_array(tmp_path):
    """Every job of an array is a training of its own, with its number in the first line."""
    script = f"""#!/bin/bash
srun "{sys.executable}" "{SLOW}" 0 --data digits --model mlp --steps 5 --checkpoint "$SLURM_ARRAY_TASK_ID"
"""
    job = Job(tmp_path, script, "--array=3-4", "-n1", "--output=%a.out")
    for task in (3, 4):
        output = tmp_path / f"{task}.out"
        wait_until(lambda output=output: output.exists() and "checkpoints are in" in output.read_text(), job.shown)
        assert f"1 rank on 1 node, Slurm job {job.number}_{task}" in output.read_text()
        assert all_in(tmp_path / str(task))

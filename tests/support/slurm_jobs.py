"""Jobs on a running Slurm."""

import os
import re
import subprocess
import time

HELLO = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
os.write(1, f"rank {world.rank} of {world.allreduce(1)} at {MPI.Get_processor_name()} {node.size}\\n".encode())
"""
"""Program of all ranks, which writes a line at once: `print` may write its parts one by one."""

LIMIT = 300
"""Most seconds that a job may take, its time in the queue included."""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def call(*words, expect=0, **environment):
    """Output of a command, with its errors."""
    done = subprocess.run(
        [*map(str, words)], env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert expect is None or done.returncode == expect, done.stdout
    return done.stdout


def wait_until(condition, what):
    deadline = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT} s for {what()}\n{call('squeue', '--all')}"
        time.sleep(0.2)
    return found


class Job:
    """A job that was submitted, in its folder."""

    def __init__(self, folder, script, *options):
        self.output, self.script = folder / "output", folder / "job.sh"
        self.script.write_text(script)
        options = (f"--chdir={folder}", f"--output={self.output}", "--open-mode=append", "--requeue", *options)
        self.number = call("sbatch", "--parsable", *options, self.script).strip()

    def shown(self):
        return call("scontrol", "show", "job", self.number)

    def state(self):
        return re.search(r"JobState=(\w+)", self.shown())[1]

    def text(self):
        return self.output.read_text() if self.output.exists() else ""

    def end(self):
        """Output of the job after its end, which must be a success."""
        wait_until(lambda: self.state() in ENDED, lambda: f"{self.shown()}\n{self.text()}")
        assert self.state() == "COMPLETED", f"{self.shown()}\n{self.text()}"
        return self.text()

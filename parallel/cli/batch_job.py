"""Batch job of the ranks: its name, the end of its time limit, its restarts, and the launch command that MPI needs."""

import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

MARGIN = 30.0
"""Seconds that a loop leaves before the end of a job, besides two of its rounds."""

POD_FOLDER = Path("/var/run/secrets/kubernetes.io")
"""Folder of every pod. Variables of the container do not reach ranks that an ssh server has started."""

NO_LIMIT = 365 * 86400
"""Seconds after its start at which a Slurm job without a limit has its end."""

LAST_STEP = 0xFFFFFFF0
"""Slurm's least step number that is not of a step of ranks."""

SRUN = {"Open MPI": "srun --mpi=pmix", "Intel": "srun --mpi=pmix, or I_MPI_PMI_LIBRARY=libpmi2.so srun --mpi=pmi2"}
"""Launch command by a word of the MPI library's version. Others are MPICH or have its interface."""


class BatchJob(NamedTuple):
    """Job of a scheduler, as found in the environment of a rank."""

    name: str
    """Scheduler and identifier."""
    end: float | None = None
    """`time.time()` at which the scheduler ends the job. None if there is no limit, or it is unknown."""
    restarts: int = 0
    """Number of times that the scheduler has started the job again."""

    def title(self, ranks: int, nodes: int) -> str:
        """First line of a program.

        >>> BatchJob("PBS job 4711").title(8, 1)
        '8 ranks on 1 node, PBS job 4711'
        """
        text = f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}, {self.name}"
        if self.restarts:
            text += f", restart {self.restarts}"
        if self.end is not None:
            text += f", time left {timedelta(seconds=max(0, round(self.end - time.time())))}"
        return text


def find_job(environment: Mapping[str, str]) -> BatchJob | None:
    """Job that environment variables, or a pod's files, describe. None outside of one. May run Slurm's `squeue`."""
    if number := environment.get("SLURM_JOB_ID"):
        task = environment.get("SLURM_ARRAY_TASK_ID")
        shown = f"{environment.get('SLURM_ARRAY_JOB_ID')}_{task}" if task else number
        restarts = environment.get("SLURM_RESTART_COUNT", "")
        return BatchJob(f"Slurm job {shown}", _slurm_end(environment, number), _number(restarts))
    if number := environment.get("PBS_JOBID"):
        return BatchJob(f"PBS job {number}")
    if POD_FOLDER.is_dir():
        return BatchJob("Kubernetes")
    return None


def in_step(environment: Mapping[str, str]) -> bool:
    """True for a task of srun. False in a batch script and the shell of an allocation, whose step has a high number.

    >>> in_step({"SLURM_STEP_ID": "0"}), in_step({"SLURM_STEP_ID": "4294967290"}), in_step({"SLURM_JOB_ID": "7"})
    (True, False, False)
    """
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdecimal() and _number(step) < LAST_STEP


def cpus_of(environment: Mapping[str, str]) -> int | None:
    """CPUs of this node that Slurm has given to the job. None if there is no such number."""
    return _number(environment.get("SLURM_CPUS_ON_NODE", "")) or None


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


def _slurm_end(environment: Mapping[str, str], job: str) -> float | None:
    """End of a Slurm job. Older versions have no variable for it, but their `squeue` prints the time left."""
    start, end = (_number(environment.get(f"SLURM_JOB_{event}_TIME", "")) for event in ("START", "END"))
    if 0 < end < start + NO_LIMIT:
        return float(end)
    with suppress(OSError, subprocess.SubprocessError):
        command = ["squeue", "--noheader", "--job", job, "--format", "%L"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        if (left := seconds_of(found.stdout.strip())) is not None:
            return time.time() + left
    return None


def seconds_of(text: str) -> float | None:
    """Seconds of a time of Slurm, ``[days-][[hours:]minutes:]seconds``. None for a word, such as UNLIMITED.

    >>> seconds_of("1-02:00:30"), seconds_of("59:58"), seconds_of("UNLIMITED")
    (93630.0, 3598.0, None)
    """
    if not (found := re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text, re.ASCII)):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


def launch_error(size: int, environment: Mapping[str, str]) -> str | None:
    """Text if a launcher has started several processes, and MPI takes each for the only rank. Else None.

    >>> launch_error(1, {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"})
    'torchrun has started 4 processes, and each is the only rank of its MPI: start them with mpiexec -n 4'
    """
    if size > 1 or not {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE"}.isdisjoint(environment):  # of an mpiexec -n 1
        return None
    alone = "and each is the only rank of its MPI: start them with"
    if (tasks := _number(environment.get("SLURM_STEP_NUM_TASKS", ""))) > 1:
        from mpi4py import MPI

        library = MPI.Get_library_version()
        right = next((command for word, command in SRUN.items() if word in library), "srun --mpi=pmi2")
        return f"srun has started {tasks} tasks, {alone} {right}"
    if "TORCHELASTIC_RUN_ID" in environment and (tasks := _number(environment.get("WORLD_SIZE", ""))) > 1:
        return f"torchrun has started {tasks} processes, {alone} mpiexec -n {tasks}"
    return None


class TimeLimit:
    """Clock of a loop in a job that ends at `end` (`time.time()`, or None for never)."""

    def __init__(self, end: float | None):
        self._end, self._longest, self._last = end, 0.0, time.time()

    def is_near(self) -> bool:
        """True if two further rounds of the loop, each as long as the longest between two calls, may reach the end."""
        now = time.time()
        self._longest, self._last = max(self._longest, now - self._last), now
        return self._end is not None and self._end - now < MARGIN + 2 * self._longest

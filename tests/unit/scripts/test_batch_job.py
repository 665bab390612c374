"""What `chorus train` finds about its job in the environment, and the time that a job leaves it."""

import signal
import subprocess
import time

import pytest

from parallel.cli import batch_job, start_up
from parallel.cli.batch_job import BatchJob, TimeLimit, cpus_of, find_job, launch_error, seconds_of
from parallel.cli.main import rank_of_launcher
from parallel.runtime import signals
from parallel.runtime.signals import InterruptFlag

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.fixture(autouse=True)
def no_pod(monkeypatch, tmp_path):
    monkeypatch.setattr(batch_job, "POD_FOLDER", tmp_path / "none")


@pytest.fixture
def squeue(monkeypatch, tmp_path):
    """Function that puts a program squeue on PATH, with its output."""

    def put(text, status=0):
        program = tmp_path / "squeue"
        program.write_text(f"#!/bin/sh\n[ \"$3\" = 4711 ] && printf '%s\\n' '{text}'\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


@pytest.mark.parametrize(
    "text, seconds",
    [("7", 7), ("0:05", 5), ("59:58", 3598), ("1:00:00", 3600), ("2-03:04:05", 183845), ("UNLIMITED", None),
     ("NOT_SET", None), ("INVALID", None), ("", None), ("1:2:3:4", None), ("-1:00", None)],
)  # fmt: skip
def test_times_of_slurm(text, seconds):
    assert seconds_of(text) == seconds


def test_no_job():
    assert find_job({}) is None


def test_slurm_job(squeue):
    squeue("1:58:03")
    job = find_job(SLURM)
    assert job.name == "Slurm job 4711" and abs(job.end - time.time() - 7083) < 5 and job.restarts == 0
    assert job.title(8, 2).startswith("8 ranks on 2 nodes, Slurm job 4711, time left 1:5")


def test_end_in_the_environment():
    array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    job = find_job(SLURM | array | {"SLURM_JOB_END_TIME": "12"})
    assert job == BatchJob("Slurm job 4700_3", 12.0, 2)
    assert job.title(1, 1) == "1 rank on 1 node, Slurm job 4700_3, restart 2, time left 0:00:00"


def test_end_after_a_year_is_none(squeue):
    squeue("UNLIMITED")
    start = int(time.time()) - 100
    times = {"SLURM_JOB_START_TIME": str(start), "SLURM_JOB_END_TIME": str(start + batch_job.NO_LIMIT)}
    assert find_job(SLURM | times) == BatchJob("Slurm job 4711")
    assert find_job(SLURM | times | {"SLURM_JOB_END_TIME": str(start + 60)}).end == start + 60


@pytest.mark.parametrize("text, status", [("UNLIMITED", 0), ("1:00", 1)])
def test_no_limit(squeue, text, status):
    squeue(text, status)
    assert find_job(SLURM) == BatchJob("Slurm job 4711")


def test_squeue_that_waits_for_its_server(monkeypatch):
    def wait(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(batch_job.subprocess, "run", wait)
    assert find_job(SLURM) == BatchJob("Slurm job 4711")


def test_no_squeue(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_job(SLURM).end is None


def test_pbs_and_kubernetes(monkeypatch, tmp_path):
    assert find_job({"PBS_JOBID": "12.head"}).title(8, 2) == "8 ranks on 2 nodes, PBS job 12.head"
    monkeypatch.setattr(batch_job, "POD_FOLDER", tmp_path)
    assert find_job({}).title(8, 2) == "8 ranks on 2 nodes, Kubernetes"


@pytest.mark.parametrize("environment, cpus", [({}, None), ({"SLURM_CPUS_ON_NODE": "3"}, 3)])
def test_cpus(environment, cpus):
    assert cpus_of(environment) == cpus


def test_launch_error():
    assert "srun has started 4 tasks" in launch_error(1, SLURM)
    assert launch_error(4, SLURM) is None
    assert launch_error(1, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert launch_error(1, {**SLURM, "MPI_LOCALNRANKS": "1"}) is None
    assert launch_error(1, {"WORLD_SIZE": "4"}) is None


@pytest.mark.parametrize("step, rank", [("0", 3), ("4294967290", None), ("4294967291", None), ("", None)])
def test_rank_in_a_step(monkeypatch, step, rank):
    """The shell of an allocation, and a batch script, have Slurm's variables without being a rank."""
    task = {**SLURM, "SLURM_STEP_ID": step, "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    monkeypatch.setattr("os.environ", task)
    assert rank_of_launcher() == rank
    for launcher in ({"PMI_RANK": "2", "MPI_LOCALRANKID": "0"}, {"OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"}):
        monkeypatch.setattr("os.environ", {**task, **launcher})
        assert rank_of_launcher() == 2


def test_the_shell_of_an_allocation_has_a_pmi(monkeypatch):
    """Of the shell's own step, whose only process it is."""
    for variable in ("PMI_RANK", "PMIX_RANK"):
        monkeypatch.setattr("os.environ", {**SLURM, "SLURM_STEP_ID": "4294967290", variable: "0"})
        assert rank_of_launcher() is None


def test_rank_under_torchrun(monkeypatch):
    monkeypatch.setattr("os.environ", {"TORCHELASTIC_RUN_ID": "none", "RANK": "2"})
    assert rank_of_launcher() == 2


def test_time_limit(monkeypatch):
    clock = iter([1000.0, 1000.0, 1010.0, 1010.0, 1030.0, 1030.0, 1031.0, 1031.0, 1069.0, 1069.0])
    monkeypatch.setattr(batch_job.time, "time", lambda: next(clock))
    limit, never = TimeLimit(1100.0), TimeLimit(None)
    found = [(limit.is_near(), never.is_near()) for _ in range(4)]
    assert found == [(False, False), (False, False), (True, False), (True, False)]


ANNOUNCED = [[signal.SIGUSR1] * 3, [signal.SIGUSR1, signal.SIGTERM], [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]]
INSISTING = [
    [signal.SIGTERM] * 2,
    [signal.SIGINT] * 2,
    [signal.SIGUSR1, signal.SIGINT],
    [*ANNOUNCED[1], signal.SIGTERM],
]


@pytest.mark.parametrize("numbers", [*ANNOUNCED, *INSISTING])
def test_signals_of_batch_systems_are_no_insistence(monkeypatch, numbers):
    """A batch system sends SIGUSR1, then SIGTERM, while a checkpoint is written; a second SIGTERM ends the process."""
    monkeypatch.setattr(signals, "GRACE", -1.0)
    ended = []
    before = {number: signal.signal(number, lambda number, frame: ended.append(number)) for number in signals.NUMBERS}
    try:
        with InterruptFlag() as interrupt:
            for number in numbers:
                signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert interrupt.number == numbers[0]
    assert ended == ([numbers[-1]] if numbers in INSISTING else [])


def test_the_first_compilation_is_announced(tmp_path):
    folder = {"CUPY_CACHE_DIR": str(tmp_path)}
    assert "compiled at their first use, once" in start_up.compilation_notice(folder)
    assert "in each run" in start_up.compilation_notice({**folder, "CUPY_CACHE_IN_MEMORY": "1"})
    (tmp_path / "a.cubin").touch()
    assert start_up.compilation_notice(folder) == ""


def test_ranks_that_are_late_are_named_with_their_nodes(monkeypatch, capsys):
    """Ranks 1 and 3 arrive after the first notice, and rank 3 after the second one."""

    class Request:
        def __init__(self, arrival):
            self.arrival = arrival

        def Test(self):
            return clock[0] >= self.arrival

    class World:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 4

        def Irecv(self, buffer, rank, tag):
            return Request({1: 30, 2: 5, 3: 50}[rank])

    clock = [0.0]
    monkeypatch.setattr("mpi4py.MPI.COMM_WORLD", World())
    monkeypatch.setattr(start_up.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(start_up.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 1))
    start_up.wait_for_all(["a", "a", "b", "b"])
    assert capsys.readouterr().err == (
        "after 21 s rank 0 waits for rank 1 on a, rank 3 on b\nafter 43 s rank 0 waits for rank 3 on b\n"
    )

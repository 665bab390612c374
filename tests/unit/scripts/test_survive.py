"""`chorus train --survive`: a training goes on after the death of a rank, and ends after anything else."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("threadpoolctl")

import restart_ranks
from kill_ranks import ranks_of
from mpi4py import MPI
from mpi_launches import ROOT
from support.launched_training import course, lines, same, until
from support.launches import MPIEXEC, ended, launch_environment, needs_mpiexec, start_command
from support.program_runs import call
from support.tiers import default

from collectives.transport.node.peer_watch import has_ended
from parallel.checkpoint.checkpoint_files import all_in
from parallel.cli import restarts, train

TASK = ["--data", "teacher_classes", "--model", "mlp:tiny", "--batch", "48", "--dropout", "0.1", "--threads", "1"]
STEPS, AT = 12, 7

FAULTS = """
import os, signal, sys

words = sys.orig_argv
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank is not None and "--survive-in" in words:
    from parallel.checkpoint.state_segment import StateSegment
    from parallel.trainer.state_keeper import KeptState, StateKeeper
    from parallel.trainer.trainer import Training
    run, kind = Training.run, os.environ["FAULT"]
    attempt = int(words[-1])

    def dying(owner, name, when):
        method = getattr(owner, name)

        def made(self, *arguments):
            if when(self, *arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *arguments)

        setattr(owner, name, made)

    if kind == "resuming" and attempt in (1, 2):  # one rank, then the other
        dying(*[(KeptState, "restore"), (StateKeeper, "begin")][attempt - 1], lambda *_: rank == str(attempt % 2))
    if kind == "writing" and attempt == 0 and rank == "1":  # in the middle: the step is noted last
        dying(StateSegment, "_sum", lambda _, step: step == AT)

    def failing(self, stop):
        for record in run(self, stop):
            yield record
            if rank == "1" and self.done >= AT and (attempt == 0 or kind == "always"):
                if kind == "raise":
                    raise RuntimeError("broken on purpose")
                os.kill(os.getpid(), signal.SIGKILL)

    Training.run = failing
"""


@pytest.fixture
def begin(tmp_path):
    """Starts a training whose rank 1 fails after step `AT`: at the first start (kill, raise), or at every one."""
    (tmp_path / "sitecustomize.py").write_text(FAULTS.replace("AT", str(AT)))

    def made(fault, *words, ranks=2, steps=STEPS):
        environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "FAULT": fault} if fault else {}
        files = ["--checkpoint", tmp_path / "c", "--every", 5, "--json", tmp_path / "m.jsonl"]
        return start_command(ranks, ["train", *TASK, *files, "--steps", steps, *words], **environment)

    return made


def memory_of(process):
    """Folder of the states of a training that `begin` has started."""
    command = [MPIEXEC, *process.args[process.args.index("-n") :]]
    command[3:3] = [sys.executable, "-m", "parallel.cli.main"]
    with contextlib.chdir(ROOT):
        return restarts._folder_of(command)


LAYOUTS = {
    "dp": (2, []),
    "zero3": (2, ["--layout", "zero3", "--precision", "bf16"]),
    "zero3 of 3": (3, ["--layout", "zero3"]),
    "compressed": (2, ["--compress", "topk:0.1"]),
    "pp": (2, ["--layout", "pp", "--cuts", "0,1,2"]),
    "dp x tp": (4, ["--mesh", "dp=2,tp=2"]),
    "ps": (3, ["--layout", "ps", "--servers", "2", "--reproducible"]),
    "ps of replicas": (4, ["--layout", "ps", "--servers", "2", "--replicas", "2", "--reproducible"]),
}


@pytest.mark.parametrize("name", default(LAYOUTS, "zero3"))
@needs_mpiexec
@pytest.mark.timeout(240)
def test_a_killed_rank_changes_no_bit(begin, tmp_path, name):
    ranks, words = LAYOUTS[name]
    output = ended(begin(None, *words, ranks=ranks))
    (tmp_path / "c").rename(tmp_path / "usual")
    (tmp_path / "m.jsonl").rename(tmp_path / "usual.jsonl")
    process = begin("kill", *words, "--survive", "--survive-every", 1, ranks=ranks)
    output = ended(process)
    assert process.returncode == 0, output
    assert (
        f"resumed {memory_of(process)}: " in output
        and "restart 1 of at most 10" in output
        and "restart 2" not in output
    )
    assert f": {AT - 1} steps were made" in output or f": {AT} steps were made" in output
    assert same(all_in(tmp_path / "usual")[-1], all_in(tmp_path / "c")[-1])
    assert course(tmp_path / "usual.jsonl") == course(tmp_path / "m.jsonl")
    assert not memory_of(process).exists()


@pytest.mark.full
@pytest.mark.skipif("Open MPI" not in MPI.Get_library_version(), reason="needs ULFM")
@pytest.mark.timeout(240)
def test_the_others_go_on(monkeypatch):
    for name, value in launch_environment(MPIEXEC=MPIEXEC).items():
        monkeypatch.setenv(name, value)
    words = ["--ulfm", "--layouts", "dp", "--ranks", "4", "--times", "1", "--kills", "2", "--steps", "60"]
    assert restart_ranks.main(words) == 0


@pytest.mark.full
@needs_mpiexec
@pytest.mark.timeout(240)
def test_an_error_is_not_repeated(begin):
    process = begin("raise", "--survive")
    output = ended(process)
    assert process.returncode == 1 and "broken on purpose" in output and "restart" not in output
    assert not memory_of(process).exists()


@pytest.mark.full
@needs_mpiexec
@pytest.mark.timeout(240)
def test_a_rank_that_always_dies(begin):
    process = begin("always", "--survive", 2)
    output = ended(process)
    assert process.returncode not in (0, 1, 2)
    assert "restart 2 of at most 2" in output and "after 2 restarts: no further one" in output
    assert output.count("restart ") == 2 and not memory_of(process).exists()


@pytest.mark.full
@pytest.mark.parametrize(("fault", "restarts", "resumed"), [("resuming", 3, 3), ("writing", 1, 1)])
@needs_mpiexec
@pytest.mark.timeout(240)
def test_a_kill_while_states_are_written_or_read(begin, tmp_path, fault, restarts, resumed):
    """Ranks die one after the other while they resume, or one while it writes its state."""
    output = ended(begin(None, "--layout", "zero3"))
    (tmp_path / "c").rename(tmp_path / "usual")
    process = begin(fault, "--layout", "zero3", "--survive", "--survive-every", 1)
    output = ended(process)
    assert process.returncode == 0, output
    assert f"restart {restarts} of at most 10" in output and f"restart {restarts + 1}" not in output
    assert {int(found) for found in re.findall(r": (\d+) steps were made", output)} <= {AT - 1, AT}
    assert same(all_in(tmp_path / "usual")[-1], all_in(tmp_path / "c")[-1])
    assert not memory_of(process).exists()


@pytest.mark.full
@needs_mpiexec
@pytest.mark.timeout(240)
def test_the_end_of_the_launcher_ends_the_ranks(begin, tmp_path):
    process = begin(None, "--survive", steps=100000)
    until(lambda: (tmp_path / "m.jsonl").exists() and len(lines(tmp_path / "m.jsonl")) > 3, process)
    ranks = ranks_of(process.pid).values()
    process.kill()
    ended(process)
    deadline = time.monotonic() + 20
    while any(not has_ended(rank) for rank in ranks):
        assert time.monotonic() < deadline, "the ranks go on without a launcher"
        time.sleep(0.1)
    shutil.rmtree(memory_of(process))  # as the next start of the same command would


@pytest.mark.full
@needs_mpiexec
@pytest.mark.timeout(240)
def test_a_rank_that_does_not_answer(begin, tmp_path, monkeypatch):
    """After the time limit the job ends, and goes on as after a death."""
    monkeypatch.setenv("CHORUS_TIMEOUT", "3")
    process = begin(None, "--layout", "ps", "--servers", "1", "--survive", ranks=3, steps=200)
    until(lambda: (tmp_path / "m.jsonl").exists() and len(lines(tmp_path / "m.jsonl")) > 3, process)
    os.kill(ranks_of(process.pid)[0], signal.SIGSTOP)
    output = ended(process)
    assert process.returncode == 0, output
    assert "cause: rank 0 is stopped" in output and "restart 1 of at most 10" in output
    assert not memory_of(process).exists()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@needs_mpiexec
@pytest.mark.timeout(240)
def test_a_stop_is_no_death(begin, tmp_path, number):
    process = begin(None, "--survive", steps=100000)
    until(lambda: (tmp_path / "m.jsonl").exists() and len(lines(tmp_path / "m.jsonl")) > 3, process)
    process.send_signal(number)
    output = ended(process)
    assert process.returncode == 128 + number and "restart" not in output
    assert not memory_of(process).exists()


@pytest.mark.full
@needs_mpiexec
@pytest.mark.timeout(240)
def test_the_next_start_removes_what_was_left(begin, tmp_path):
    """Everything is killed at once. The same command then begins anew, and leaves nothing."""
    process = begin(None, "--survive", "--overwrite", steps=2000)
    until(lambda: (tmp_path / "m.jsonl").exists() and len(lines(tmp_path / "m.jsonl")) > 3, process)
    ranks = ranks_of(process.pid).values()
    for one in (process.pid, *ranks):
        subprocess.run(["kill", "-9", str(one)], check=False)
    ended(process)
    assert list(memory_of(process).glob("rank-*"))
    (tmp_path / "m.jsonl").unlink()
    process = begin(None, "--survive", "--overwrite", steps=2000)
    until(lambda: (tmp_path / "m.jsonl").exists() and len(lines(tmp_path / "m.jsonl")) > 3, process)
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 128 + signal.SIGTERM and "resumed" not in output
    assert not memory_of(process).exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--survive"], "--survive: expected chorus train -n N --survive, which starts the ranks"),
        (["--survive", "0"], "--survive: expected 1 or more, found 0"),
        (["--survive", "--survive-every", "0"], "--survive-every: expected 1 or more, found 0"),
        (["--survive-every", "3"], "--survive-every: expected --survive"),
        (["--survive", "--survive-in", "FOLDER", "0", "--plot", "a.png"], "--survive: with --plot expected --json"),
        (["--survive", "--survive-in", "FOLDER", "0", "--layout", "local"], "--survive: expected --layout dp"),
    ],
)
def test_refusals(tmp_path, words, text):
    done = call(train.main, *TASK, *(str(tmp_path / "job") if word == "FOLDER" else word for word in words))
    assert done.returncode == 2 and text in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], None), (["--survive"], 10), (["--survive", "3", "--seed", "1"], 3), (["--survive=4"], 4),
        (["--surv", "5"], None), (["--seed", "1", "--survive", "--json", "x"], 10),
        (["--survive", "x"], None), (["--survive", "0"], None),
    ],
)  # fmt: skip
def test_number_of_restarts(words, found):
    assert restarts.restarts_in(words) == found


DEATHS = [  # files of the folder, exit statuses of a death, and others
    (["lock"], [9, 137, 255, 11, 139], [0, 1, 2, 130, 143, 15, -15, -2]),
    (["lock", "rank-00000-0"], [9, 137, 255, 11, 139, 1], [0, 2, 130, 143]),
    (["lock", "rank-00000-0", "ended-00001"], [], [0, 1, 2, 9, 137, 143]),
]


@pytest.mark.parametrize(("names", "deaths", "others"), DEATHS)
def test_exit_statuses_of_a_death(tmp_path, names, deaths, others):
    for name in names:
        (tmp_path / name).touch()
    assert [status for status in (*deaths, *others) if restarts._is_death(status, tmp_path)] == deaths


def test_one_training_has_the_folder(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "rank-00000-0").touch()
    with restarts._claimed(folder):
        assert [path.name for path in folder.iterdir()] == ["lock"]
        with pytest.raises(ValueError, match="--survive: the same command already runs"), restarts._claimed(folder):
            pass
    assert not folder.exists()


def test_a_machine_without_memory_files(tmp_path):
    with pytest.raises(ValueError, match="--survive: expected a folder in memory"), restarts._claimed(Path("/no/job")):
        pass

"""The program that trains: what a user says, sees, breaks off, kills and takes up again; under mpiexec."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("safetensors")
pytest.importorskip("threadpoolctl")

from mpi_launches import ROOT
from support.launched_training import KILLER, STOPS, course, lines, run, same, start, stop_and_resume
from support.launches import ended, needs_mpiexec
from support.program_runs import call
from support.tiers import default

from parallel.checkpoint.checkpoint_files import all_in, name_of, tensors_in
from parallel.cli import train
from parallel.cli.reports.training_output import format_speed
from parallel.cli.train_run import CheckpointWriter
from parallel.runtime.throughput import Throughput

pytestmark = [needs_mpiexec, pytest.mark.timeout(240)]

TASK = ["--data", "teacher_classes", "--model", "mlp:tiny", "--batch", "48", "--steps", "60", "--dropout", "0.1"]
TASK += ["--test-every", "15", "--threads", "1"]


def here(*arguments, status=0):
    """Output of a training in this process, on one rank."""
    done = call(train.main, *arguments)
    assert done.returncode == status, done
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    output = run(*TASK, "--checkpoint", folder / "c", "--every", 20, "--json", folder / "m.jsonl")
    return folder, output


def test_what_a_training_leaves(whole):
    folder, output = whole
    assert [path.name for path in all_in(folder / "c")] == ["step-000000020", "step-000000040", "step-000000060"]
    *steps, final = lines(folder / "m.jsonl")
    assert [line["step"] for line in steps] == list(range(1, 61))
    assert [line["step"] for line in steps if "test_accuracy" in line] == [15, 30, 45]
    assert steps[-1]["loss"] < steps[0]["loss"]
    for name in ("test_accuracy", "loss", "samples_per_s", "communication_share", "peak_bytes"):
        assert final[name] > 0
    assert 0 < final["communication_share"] < 1 and final["settings"]["data"] == "teacher_classes"
    assert f"test accuracy {final['test_accuracy']:.2%} after 60 steps" in output


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_training_that_is_killed_goes_on_bit_for_bit(whole, tmp_path, victim):
    folder, _ = whole
    keep = ["--checkpoint", tmp_path / "c", "--every", 20, "--json", tmp_path / "m.jsonl"]
    process = start(victim, 47, *TASK, *keep, program=("-c", KILLER))
    ended(process)
    assert process.returncode != 0 and all_in(tmp_path / "c")[-1].name == "step-000000040"
    assert 40 <= len(lines(tmp_path / "m.jsonl")) <= 48
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"step": 48, "lo')  # as a kill may leave it
    output = run(*keep, "--resume", "--test-every", 15, "--threads", 1)  # the rest is in the checkpoint
    assert "step-000000040: 40 steps were made, on 2 ranks" in output
    assert course(tmp_path / "m.jsonl") == course(folder / "m.jsonl")
    assert same(all_in(tmp_path / "c")[-1], all_in(folder / "c")[-1])


@pytest.mark.parametrize("way", default(STOPS, "chorus -n, SIGINT"))
def test_a_signal_keeps_all_steps(tmp_path, way):
    stop_and_resume(way, 2, TASK, [], tmp_path)


@pytest.mark.full
def test_the_same_digits_on_other_ranks_and_layouts(tmp_path):
    """Reproducible, broken off and taken up on another number of ranks in another layout: as if nothing had been."""
    common = [*TASK, "--steps", 20, "--reproducible", "--micro-batch", 12]
    run(*common, "--checkpoint", tmp_path / "a", "--json", tmp_path / "a.jsonl", ranks=1)
    keep = ["--checkpoint", tmp_path / "b", "--json", tmp_path / "b.jsonl", "--every", 10]
    run(*common, *keep, "--parallel", "zero2", ranks=3)
    for path in all_in(tmp_path / "b")[1:]:
        shutil.rmtree(path)
    assert "10 steps were made, on 3 ranks" in run(*keep, "--resume", "--parallel", "zero3", ranks=2)
    assert same(all_in(tmp_path / "b")[-1], all_in(tmp_path / "a")[-1])
    losses = [[line["loss"] for line in lines(tmp_path / f"{name}.jsonl")] for name in "ab"]
    assert losses[0] == losses[1]


def test_a_wrong_argument_ends_all_ranks():
    """In a process of its own; tests/mpi/scripts/test_train_arguments.py has the other arguments."""
    output = run("--rate", "-1", status=2)
    assert output.count("rate: expected a number from 0 on, found -1") == 1 and "Traceback" not in output, output


@pytest.mark.full
def test_a_loss_that_is_no_number(tmp_path):
    keep = ["--checkpoint", tmp_path / "c", "--every", "1"]
    output = run(*TASK, "--optimizer", "sgd", "--momentum", "0", "--rate", "1e30", *keep, status=1)
    assert output.count("error: nothing was updated; rank 0: ") == 1 and "is not a finite number" in output, output
    assert "Traceback" not in output
    for path in all_in(tmp_path / "c"):
        assert all(np.isfinite(array).all() for _, array in tensors_in(path))


SLOW = """
import sys
from collectives.cli import launcher as launch
from parallel.cli import train
launch.PLAIN = 0.0
launch.run(train.main)
"""


def test_progress_a_trace_and_a_picture(tmp_path):
    """Progress without a terminal is lines, of steps and of the last test."""
    pytest.importorskip("matplotlib")
    keep = ["--trace", tmp_path / "t.json", "--plot", tmp_path / "p.png"]
    output = run(*TASK, "--steps", 8, *keep, program=("-c", SLOW))
    told = output.splitlines()
    for step in (1, 8):
        assert any(line.startswith(f"teacher_classes: step {step} of 8 ({step / 8:.0%})") for line in told), output
    assert any(line.startswith("test: sample ") and "(100%)" in line for line in told), output
    assert "\r" not in output
    entries = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert {entry["tid"] // 2 for entry in spans} == {0, 1}
    assert {"forward", "backward", "update"} <= {entry["name"] for entry in spans}
    assert len([entry for entry in spans if entry["name"] == "update"]) == 2 * 5
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_two_trainings_into_one_folder(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        output = run(*TASK, "--checkpoint", tmp_path, status=2)
    finally:
        os.close(descriptor)
    assert output.count("another training writes into") == 1 and not list(tmp_path.iterdir()), output


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.full
def test_metrics_of_a_training_without_a_test_set(tmp_path):
    """JSON has no NaN; and integers are as good as floats for a perceptron."""
    pytest.importorskip("matplotlib")
    np.savez(tmp_path / "few.npz", x=np.arange(32).reshape(8, 4), y=np.arange(8) % 2)
    keep = ["--json", tmp_path / "m.jsonl", "--plot", tmp_path / "p.png", "--checkpoint", tmp_path / "c"]
    output = run("--data", tmp_path / "few.npz", "--model", "mlp:tiny", "--steps", 3, "--test-every", 1, *keep, ranks=3)
    *steps, final = [strict(text) for text in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line.get("test_loss", "untested") for line in steps] == [None, None, "untested"]
    assert final["test_loss"] is None and final["test_accuracy"] is None and final["loss"] > 0
    assert "no samples to test after 3 steps" in output and (tmp_path / "p.png").stat().st_size > 1000


def test_metrics_of_a_training_that_is_resumed_have_one_end(tmp_path, monkeypatch):
    from parallel.cli.reports.metrics import Metrics

    end = {"final": True, "step": 2}
    for done, added in ((0, [{"step": 1}, {"step": 2}, end]), (2, [end]), (2, [{"step": 3}])):
        metrics = Metrics(tmp_path / "m.jsonl", done)
        for line in added:
            metrics.add(line)
        metrics.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_metrics_on_a_full_disk(tmp_path, monkeypatch):
    from parallel.cli.reports.metrics import Metrics

    metrics = Metrics(tmp_path / "m.jsonl", 0)
    metrics.add({"loss": float("inf")})
    metrics.complete()
    metrics._file.close()
    metrics._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    for loss in (1.0, 2.0):
        metrics.add({"loss": loss})
    metrics.close()
    assert [line["loss"] for line in metrics.lines] == [None, 1.0, 2.0]
    with pytest.raises(OSError, match="No space left"):
        metrics.complete()
    assert lines(tmp_path / "m.jsonl") == [{"loss": None}]


def test_the_newest_sound_checkpoint_is_told_where_the_newest_is_damaged(whole, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(whole[0] / "c", folder)
    for path in all_in(folder)[1:]:
        file = path / "model.safetensors.index.json"
        file.write_bytes(file.read_bytes()[:-1])
    output = here("--checkpoint", folder, "--resume", status=2)
    newest, *_, sound = all_in(folder)[::-1]
    assert output.count(f"error: {newest} cannot be used: model.safetensors.index.json has") == 1, output
    assert f"; the newest sound one is {sound}: with what is newer moved away" in output


def test_a_checkpoint_of_another_folder_is_not_named(tmp_path):
    """A resume from one folder that keeps its checkpoints in another: until it has one, none is there."""
    saved = []
    training = SimpleNamespace(done=4, save=lambda folder, **options: saved.append(folder))
    args = SimpleNamespace(checkpoint=tmp_path / "b", keep=3, keep_best=0, overwrite=False)
    writer = CheckpointWriter(MPI.COMM_SELF, args, training)
    assert (writer.step, writer.tried) == (0, 0)
    assert writer.killed_text().endswith("was: no checkpoint keeps it")
    writer.save()
    assert saved == [args.checkpoint] and f"b/{name_of(4)};" in writer.killed_text()
    (args.checkpoint / name_of(4)).mkdir(parents=True)
    assert CheckpointWriter(MPI.COMM_SELF, args, training).step == 4
    args.checkpoint = None
    assert CheckpointWriter(MPI.COMM_SELF, args, training).step == 0


def test_checkpoints_are_overwritten_if_that_is_asked_for(whole, tmp_path):
    """Those of another run go; later ones of the own run, after a return to an earlier step, are not the newest."""
    folder, other = tmp_path / "c", all_in(whole[0] / "c")[0]
    shutil.copytree(whole[0] / "c", folder)

    def trained(steps, *more, **options):
        output = run(*TASK, "--checkpoint", folder, "--steps", steps, *more, ranks=1, **options)
        return output, [path.name for path in all_in(folder)]

    first, last = "step-000000005", "step-000000008"
    assert trained(5, "--every", 5, "--overwrite")[1] == [first]
    assert trained(8, "--every", 8, "--resume")[1] == [first, last]
    output, names = trained(60, "--resume", other, status=2)
    assert f"error: {folder / last} is of another run than {other}: a training from there needs" in output
    assert names == [first, last] and "--overwrite" in output
    assert trained(7, "--every", 7, "--resume", folder / first, "--overwrite")[1] == [first, last, "step-000000007"]
    assert "step-000000007: 7 steps were made" in trained(9, "--every", 9, "--resume", "--keep", 1)[0]
    assert [path.name for path in folder.iterdir()] == ["step-000000009"]


def test_a_training_that_is_over_is_kept_in_another_folder(whole, tmp_path):
    newest = all_in(whole[0] / "c")[-1]
    output = here("--resume", newest, "--checkpoint", tmp_path / "b")
    assert f"checkpoints are in {tmp_path / 'b'}" in output
    assert same(tmp_path / "b" / newest.name, newest)


@pytest.mark.full
def test_a_batch_that_leaves_ranks_idle_is_told():
    task = ["--data", "teacher_classes", "--model", "mlp:tiny", "--steps", 1, "--batch"]
    output = run(*task, 2, ranks=3)
    told = "1 of 3 workers have nothing to do in a step: a batch of 2 is 2 micro-batches of up to 1"
    assert output.count(told) == 1, output
    assert "nothing to do" not in run(*task, 3, ranks=3)


@pytest.mark.parametrize("layout", ["dp", pytest.param("ps", marks=pytest.mark.full)])
def test_numbers_that_overflow_are_told_without_warnings_before(layout):
    output = run(*TASK[:8], "--rate", "1e30", "--optimizer", "sgd", "--parallel", layout, "--clip", 0, status=1)
    assert "RuntimeWarning" not in output and "not" in output and "finite" in output, output
    assert output.count("error: ") == 1 and "Traceback" not in output, output


def test_lines_of_progress_come_at_their_times(monkeypatch, capsys):
    from collectives.cli import launcher

    now = 0.0
    with launcher.ProgressLines(40, "race", "turn", clock=lambda: now) as bar:
        for step in range(40):
            now = 0.2 * step
            bar.set_postfix_str("loss 1")
            bar.update()
            if step in (3, 7, 8):
                bar.refresh()
    assert capsys.readouterr().err.splitlines() == [
        "race: turn 4 of 40 (10%), loss 1, 00:00",
        "race: turn 8 of 40 (20%), loss 1, 00:01",
        "race: turn 9 of 40 (22%), loss 1, 00:01",
        "race: turn 16 of 40 (40%), loss 1, 00:03",
        "race: turn 24 of 40 (60%), loss 1, 00:04",
        "race: turn 32 of 40 (80%), loss 1, 00:06",
        "race: turn 40 of 40 (100%), loss 1, 00:07",
    ]


def test_no_line_of_progress_is_inside_a_table(capsys, monkeypatch):
    from collectives.cli import launcher

    monkeypatch.setattr(launcher, "on_terminal", lambda descriptor=2: False)
    for prints, shown in ((True, ""), (False, "race: turn 1 of 1 (100%), 00:00\n")):
        monkeypatch.setattr(launcher, "PLAIN", 0.0)
        with launcher.progress(1, "race", "turn", prints=prints) as bar:
            bar.update()
        assert capsys.readouterr().err == shown


SHORT_OF_ROOM = """
import json, resource, signal, sys
from pathlib import Path
from parallel.cli.reports.metrics import Metrics

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
metrics = Metrics(path, 0)
for number in range(1, 5):  # the disk is full in the middle of the third line
    if number == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (90, resource.RLIM_INFINITY))
    if number == 4:
        before = path.read_bytes()
        problem = metrics.problem
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    metrics.add({"step": number, "text": "x" * 20})
metrics.close()
metrics.complete()
print(json.dumps([before.decode(), str(problem)]))
"""


def test_metrics_have_whole_lines_only_and_come_back(tmp_path):
    path = tmp_path / "m.jsonl"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_ROOM, path], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    before, problem = json.loads(done.stdout)
    assert [json.loads(text)["step"] for text in before.splitlines()] == [1, 2] and before.endswith("\n")
    assert "too large" in problem or "No space" in problem
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


FULL = """
import sys
from mpi4py import MPI
from parallel.cli import train
from parallel.checkpoint import safetensors_writer
from parallel.trainer.trainer import Training

write, save, full = safetensors_writer.SafetensorsWriter.add, Training.save, False
at = list(map(int, sys.argv.pop(1).split(",")))

def add(self, values):
    if full and MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1:
        raise OSError(28, "No space left on device")
    write(self, values)

def saving(self, *arguments, **options):
    global full
    full = self.done in at
    return save(self, *arguments, **options)

safetensors_writer.SafetensorsWriter.add, Training.save = add, saving
train.launcher.run(train.main)
"""


@pytest.mark.full
def test_a_checkpoint_that_fails_does_not_end_the_training(tmp_path):
    """The disk is full after 20 and 40 steps, and then it is not; or it stays full."""
    keep = ["--checkpoint", tmp_path / "c", "--every", 20, "--json", tmp_path / "m.jsonl"]
    output = run("20,40", *TASK, *keep, program=("-c", FULL))
    for step in ("step-000000020", "step-000000040"):
        assert output.count(f"warning: checkpoint {tmp_path / 'c' / step} was not written: [Errno 28]") == 1
    assert "tried again" in output and "after 60 steps" in output and "Traceback" not in output
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000000060"]
    assert len(lines(tmp_path / "m.jsonl")) == 61
    keep[1] = tmp_path / "d"
    output = run("40,60", *TASK, *keep, program=("-c", FULL), status=1)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["step-000000020"]
    told = f"no checkpoint has the end of the training; its last checkpoint is {tmp_path / 'd' / 'step-000000020'}"
    assert output.count(told) == 1 and "after 60 steps" in output and "Traceback" not in output, output
    assert lines(tmp_path / "m.jsonl")[-1]["final"]


@pytest.mark.parametrize(
    ("mfu", "hfu", "text"),
    [
        (0.5, 0.5, "MFU 50%, communication"),
        (0.5, 0.7, "MFU 50%, HFU 70%, communication"),
        (0.9, 1.2, "MFU 90%, communication"),
        (1.3, 1.3, "MFU unknown (peak measured on busy cores), communication"),
        (None, None, "samples/s, communication"),
    ],
)
def test_utilisation_above_the_peak_is_not_printed(mfu, hfu, text):
    training = SimpleNamespace(task=SimpleNamespace(is_text=False))
    assert text in format_speed(training, Throughput(100.0, 0.1, mfu, hfu))

"""Checkpoints are whole or not there, and what is damaged or foreign is told before anything is changed."""

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("safetensors")

from mpi4py import MPI
from safetensors.numpy import load_file, save_file

from parallel.checkpoint import safetensors_writer, step_folders
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError, Owner, all_in, latest, name_of, save
from parallel.checkpoint.tensor_slices import TensorSlice

SELF = MPI.COMM_SELF
SHAPES = {"model/0.weight": (3, 5), "model/10.bias": (7,), "model/9.gain": (), "optimizer/m/0.weight": (3, 5)}


def whole(offset=0.0, dtype=np.float32, shapes=SHAPES):
    """Each tensor in one slice; element i of tensor t is 100 t + i + offset."""
    values = {name: 100 * at + np.arange(np.prod(shape, dtype=int)) for at, (name, shape) in enumerate(shapes.items())}
    return [TensorSlice(name, shape, 0, (values[name] + offset).astype(dtype), True) for name, shape in shapes.items()]


def cut(slices, size=2):
    """The same elements in slices of at most `size`, last ones first."""
    return [
        TensorSlice(one.name, one.shape, start, one.array[start : start + size], True)
        for one in slices
        for start in reversed(range(0, len(one.array), size))
    ]


def restored(path, pieces=1000):
    target = whole(offset=-7)
    found = Checkpoint(SELF, path)
    found.restore(cut(target, pieces))
    return found, target


def equal(some, others):
    return all(np.array_equal(a.array, b.array) for a, b in zip(some, others, strict=True))


def everything(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("written, read", [(1000, 1000), (2, 1000), (1000, 3), (4, 1)])
def test_what_was_written_in_any_pieces_is_read_in_any_pieces(tmp_path, written, read):
    path = save(SELF, tmp_path, 12, cut(whole(), written), {"a": [1, 0.1, None]})
    found, target = restored(path, read)
    assert path.name == "step-000000012" and found.step == 12 and found.facts == {"a": [1, 0.1, None]}
    assert equal(target, whole())


def test_the_ordinary_library_opens_the_files(tmp_path):
    path = save(SELF, tmp_path, 1, cut(whole()), {})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (15 + 7 + 1)
    assert list(index["weight_map"]) == ["0.weight", "9.gain", "10.bias"]
    tensors = load_file(path / index["weight_map"]["0.weight"])
    assert tensors["0.weight"].shape == (3, 5) and tensors["9.gain"].shape == ()
    assert np.array_equal(tensors["10.bias"], whole()[1].array)
    assert list(load_file(path / "optimizer-00001-of-00001.safetensors")) == ["m/0.weight"]


def test_no_state_of_the_optimiser_is_no_file_of_it(tmp_path):
    slices = [one for one in whole() if one.name.startswith("model")]
    path = save(SELF, tmp_path, 1, slices, {})
    assert sorted(file.name for file in path.iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors.index.json",
        "state.json",
    ]
    Checkpoint(SELF, path).fit(slices)


def test_the_newest_are_kept(tmp_path):
    assert latest(SELF, tmp_path / "nothing") is None
    for step in (5, 30, 200, 1000000000):
        save(SELF, tmp_path, step, whole(), {}, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000000200", "step-1000000000"]
    assert latest(SELF, tmp_path) == tmp_path / "step-1000000000"


def test_the_new_one_stays_although_it_is_of_a_lower_step(tmp_path):
    for step in (10, 20, 30):
        save(SELF, tmp_path, step, whole(), {})
    assert equal(restored(save(SELF, tmp_path, 5, whole(1), {}, keep=2))[1], whole(1))
    assert all_in(tmp_path) == [tmp_path / name_of(step) for step in (30, 5)]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    for number in range(3):
        assert save(SELF, tmp_path, 5, whole(number), {}, keep=1) == tmp_path / name_of(5)
        assert equal(restored(tmp_path / name_of(5))[1], whole(number))
        assert [path.name for path in tmp_path.iterdir()] == [name_of(5)]


# ---------------------------------------------------------------------------------------------- runs and branches


def test_the_newest_after_a_rollback_is_of_the_new_branch(tmp_path):
    """The run goes on from step 2: its old steps 3 to 5 are older than the new ones, and go first."""
    for step in (1, 2, 3, 4, 5):
        save(SELF, tmp_path, step, whole(), {}, keep=5)
    for step, left in ((3, [1, 2, 4, 5, 3]), (4, [1, 2, 5, 3, 4]), (6, [2, 5, 3, 4, 6]), (7, [5, 3, 4, 6, 7])):
        save(SELF, tmp_path, step, whole(1), {}, keep=5)
        assert all_in(tmp_path) == [tmp_path / name_of(one) for one in left]
        assert equal(restored(latest(SELF, tmp_path))[1], whole(1))
    save(SELF, tmp_path, 6, whole(2), {}, keep=2)
    assert all_in(tmp_path) == [tmp_path / name_of(7), tmp_path / name_of(6)]


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_directory_of_another_run_is_refused_before_anything_is_written(tmp_path, step):
    for old in (2, 3):
        save(SELF, tmp_path, old, whole(), {}, owner=Owner("a"))
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match="has checkpoints of another run, step-000000003 and 1 more; expected"):
        save(SELF, tmp_path, step, whole(1), {}, owner=Owner("b"))
    assert everything(tmp_path) == before
    for expected in ([name_of(step)], sorted([name_of(step), name_of(6)])):
        save(SELF, tmp_path, step if len(expected) == 1 else 6, whole(1), {}, owner=Owner("b", overwrite=True))
        assert sorted(path.name for path in tmp_path.iterdir()) == expected
    assert Checkpoint(SELF, latest(SELF, tmp_path)).run == "b"


def test_checkpoints_without_a_run_are_gone_on_with(tmp_path):
    path = save(SELF, tmp_path, 4, whole(), {})
    state = json.loads((path / "state.json").read_text())
    del state["run"], state["branch"]
    (path / "state.json").write_text(json.dumps(state | {"sha256": step_folders.seal(state)}))
    found = Checkpoint(SELF, path)
    assert found.run == ""
    save(SELF, tmp_path, 3, whole(1), {}, owner=Owner(found.run))
    assert latest(SELF, tmp_path) == tmp_path / name_of(3)
    with pytest.raises(CheckpointError, match="of another run"):
        save(SELF, tmp_path, 5, whole(1), {}, owner=Owner("new"))


def test_a_run_that_began_meanwhile_is_noticed(tmp_path, monkeypatch):
    """Two trainings begin in an empty directory: the one that is later is refused, and leaves nothing."""
    close, steps = safetensors_writer.SafetensorsWriter.close, [3]

    def closing(writer, sync=True):
        while steps:
            save(SELF, tmp_path, steps.pop(), whole(3), {}, owner=Owner("b"))
        return close(writer, sync=sync)

    monkeypatch.setattr(safetensors_writer.SafetensorsWriter, "close", closing)
    with pytest.raises(CheckpointError, match="of another run"):
        save(SELF, tmp_path, 2, whole(2), {}, owner=Owner("a"))
    assert [path.name for path in tmp_path.iterdir()] == [name_of(3)]


def test_facts_that_are_too_deep_are_not_written(tmp_path):
    deep = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(CheckpointError, match="at most 100 nested"):
        save(SELF, tmp_path, 2, whole(2), {"deep": deep})
    assert list(tmp_path.iterdir()) == []


def test_a_replacement_that_was_not_finished_is(tmp_path):
    """A process ended after the new checkpoint of a step was complete, before or after the old one was moved away."""
    for has_old in (True, False):
        folder = tmp_path / str(has_old)
        new = save(SELF, folder / "other", 3, whole(1), {})
        save(SELF, folder, 2, whole(), {})
        if has_old:
            save(SELF, folder, 3, whole(), {})
        new.rename(folder / f"{name_of(3)}.new")
        reseal(folder / f"{name_of(3)}.new", branch=1)
        shutil.rmtree(folder / "other")
        assert equal(restored(latest(SELF, folder))[1], whole(1))
        save(SELF, folder, 4, whole(4), {})
        assert all_in(folder) == [folder / name_of(step) for step in (2, 3, 4)] and len(list(folder.iterdir())) == 3
        assert equal(restored(folder / name_of(3))[1], whole(1))


@pytest.mark.parametrize(
    "held, words",
    [
        (whole()[:1] + whole()[:1], "on no rank, or on two"),
        ([whole()[0]._replace(start=1)], "from 0 on are on no rank"),
        ([whole()[0]._replace(array=np.zeros(14, np.float32))], "from 14 on are on no rank"),
    ],
)
def test_elements_that_nobody_or_everybody_writes(tmp_path, held, words):
    with pytest.raises(CheckpointError, match=words):
        save(SELF, tmp_path, 5, held, {})
    assert all_in(tmp_path) == []


# ---------------------------------------------------------------------------------------------- what is not ours

UNFINISHED = ".step-000000007.0123456789abcdef.partial"
"""As a crash leaves it."""


def test_folders_of_others_are_left_alone(tmp_path):
    foreign = [".precious.partial/data", f"{UNFINISHED}/notes.txt", ".step-000000003.partial/state.json"]
    foreign += ["step-000000001/thesis.tex", "step-000000002/state.json"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    for step in (4, 5, 6):
        save(SELF, tmp_path, step, whole(), {}, keep=1)
    left = {path for path in everything(tmp_path) if path.parts[0] != name_of(6)}
    assert left == set(map(Path, foreign))
    assert equal(restored(tmp_path / name_of(6))[1], whole())


def test_what_a_crash_has_left_goes_but_for_what_is_being_written(tmp_path):
    mine, theirs = tmp_path / UNFINISHED, tmp_path / UNFINISHED.replace("7", "8")
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "model-00001-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / UNFINISHED.replace("7", "9")).symlink_to(theirs)
    other = subprocess.Popen(
        [sys.executable, "-c", LOCKS, theirs], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout.readline() == "locked\n"
        save(SELF, tmp_path, 9, whole(), {})
        assert not mine.exists() and (theirs / "model-00001-of-00001.safetensors").read_bytes() == b"half"
        other.communicate("end")
    save(SELF, tmp_path, 10, whole(), {})
    assert not theirs.exists() and (tmp_path / UNFINISHED.replace("7", "9")).is_symlink()


LOCKS = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_two_trainings_in_one_directory_leave_each_others_halves_alone(tmp_path, monkeypatch):
    """While one writes step 2, another one writes step 3 and clears up."""
    first = True

    def close(writer, sync=True):
        nonlocal first
        if first:
            first = False
            save(SELF, tmp_path, 3, whole(3), {})
        return closed(writer, sync=sync)

    closed = safetensors_writer.SafetensorsWriter.close
    monkeypatch.setattr(safetensors_writer.SafetensorsWriter, "close", close)
    save(SELF, tmp_path, 2, whole(2), {})
    assert [path.name for path in sorted(tmp_path.iterdir())] == [name_of(2), name_of(3)]
    for step in (2, 3):
        assert equal(restored(tmp_path / name_of(step))[1], whole(step))


def test_links_and_files_with_a_checkpoints_name_stop_nothing(tmp_path):
    elsewhere = save(SELF, tmp_path / "elsewhere", 1, whole(1), {})
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / name_of(1)).symlink_to(elsewhere)
    (folder / name_of(2)).symlink_to(tmp_path / "nowhere")
    (folder / name_of(3)).write_text("a file")
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=rf"step-00000000{step} was not written: .*exists"):
            save(SELF, folder, step, whole(), {})
    for step in (4, 5):
        save(SELF, folder, step, whole(step), {}, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == [name_of(step) for step in (1, 2, 3, 5)]
    assert all_in(folder) == [folder / name_of(1), folder / name_of(5)]
    assert equal(restored(folder / name_of(1))[1], whole(1))


# ---------------------------------------------------------------------------------------------- crashes


class Crash(BaseException):
    """The end of the process, as far as files can tell: nothing catches it, and nothing is tidied up."""


class Fuse:
    """Crashes before the n-th thing that its thread does to files."""

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

    def __init__(self):
        self.left, self.thread = None, threading.get_ident()
        sys.addaudithook(self.hear)

    def burn(self, *_):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Crash

    def hear(self, event, arguments):
        if self.left is not None and event in self.EVENTS and threading.get_ident() == self.thread:
            self.burn()


@pytest.fixture(scope="module")
def fuse():
    return Fuse()


class Crashed(NamedTuple):
    """Steps and run of the old checkpoints, step of the new one, and run of it, by whose owner it is written."""

    old: tuple
    run: str
    new: int
    owner: Owner = Owner("a")


CRASHES = {
    "next step": Crashed((1, 2), "a", 3),
    "same step": Crashed((1, 2), "a", 2),
    "only step": Crashed((2,), "a", 2),
    "rollback": Crashed((1, 2, 3), "a", 1),
    "overwrite": Crashed((2, 3), "b", 1, Owner("a", overwrite=True)),
    "overwrite the step": Crashed((2, 3), "b", 3, Owner("a", overwrite=True)),
}


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files stay open, as in a crash
def test_a_crash_at_any_moment_harms_nothing(tmp_path, monkeypatch, fuse, crash):
    """Whatever is done to files, the process may end before it: the old checkpoint is there, or the new one."""
    steps, run, new, owner = CRASHES[crash]
    written = safetensors_writer.SafetensorsWriter._write

    def write(writer, data):
        fuse.burn()
        written(writer, data[: len(data) // 2])
        fuse.burn()
        written(writer, data[len(data) // 2 :])

    monkeypatch.setattr(safetensors_writer.SafetensorsWriter, "_write", write)
    monkeypatch.setattr(step_folders.os, "fsync", fuse.burn)  # a disk's part is slow, and no matter to this process
    outcomes = []
    for moment in range(1000):
        folder = tmp_path / str(moment)
        for step in steps:
            save(SELF, folder, step, whole(step), {"new": False}, owner=Owner(run))
        fuse.left = moment
        with contextlib.suppress(Crash):
            save(SELF, folder, new, whole(-new), {"new": True}, keep=1, owner=owner)
        crashed, fuse.left = fuse.left is None, None
        found, target = restored(latest(SELF, folder))
        is_new = found.facts["new"]
        assert found.step == (new if is_new else steps[-1])
        assert equal(target, whole(-new if is_new else steps[-1])), moment
        for path in all_in(folder):  # whatever has a checkpoint's name is one
            restored(path)
        outcomes.append(is_new)
        save(SELF, folder, 4, whole(4), {}, keep=1, owner=owner)  # life goes on, and what was left is cleared away
        assert [path.name for path in folder.iterdir()] == [name_of(4)]
        shutil.rmtree(folder)
        if not crashed:
            break
    assert outcomes == sorted(outcomes) and not outcomes[0] and outcomes[-1]
    assert outcomes.count(False) > 25 and outcomes.count(True) > 5


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    save(SELF, tmp_path, 1, whole(), {})
    before = everything(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_writer.SafetensorsWriter, "add", full)
    with pytest.raises(CheckpointError, match=r"step-000000002 was not written: .*No space left"):
        save(SELF, tmp_path, 2, whole(1), {})
    monkeypatch.undo()
    assert all_in(tmp_path) == [tmp_path / name_of(1)]
    assert everything(tmp_path) == before and len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------------------------------------- damage


def truncate(path):
    file = path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = path / "optimizer-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def edit(path, old, new):
    text = (path / "state.json").read_text()
    assert old in text
    (path / "state.json").write_text(text.replace(old, new))


def reseal(path, **other):
    state = json.loads((path / "state.json").read_text()) | other
    (path / "state.json").write_text(json.dumps(state | {"sha256": step_folders.seal(state)}))


def deepen(path, levels):
    """Facts of nested lists, with a checksum that is right."""
    state = json.loads((path / "state.json").read_text()) | {"facts": {"deep": 0}, "sha256": ""}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        for _ in range(levels):
            state["facts"]["deep"] = [state["facts"]["deep"]]
        (path / "state.json").write_text(json.dumps(state | {"sha256": step_folders.seal(state)}))
    finally:
        sys.setrecursionlimit(limit)


def replace_by_a_foreign_file(path):
    file = path / "model-00001-of-00001.safetensors"
    size = file.stat().st_size
    file.write_bytes(b"x" * size)


DAMAGES = {
    "truncated": (truncate, "model-00001-of-00001.safetensors has 283 bytes instead of 284"),
    "a bit": (flip, "optimizer-00001-of-00001.safetensors is damaged"),
    "foreign file": (replace_by_a_foreign_file, "model-00001-of-00001.safetensors is damaged"),
    "a file is gone": (lambda path: (path / "model.safetensors.index.json").unlink(), "index.json is missing"),
    "no state": (lambda path: (path / "state.json").unlink(), "no state.json"),
    "half a state": (lambda path: edit(path, '"sha256"', ""), "state.json is damaged"),
    "an edited state": (lambda path: edit(path, '"step": 1', '"step": 2'), "state.json is damaged: its checksum"),
    "another format": (lambda path: edit(path, "checkpoint 1", "checkpoint 9"), "its format is 'chorus checkpoint 9'"),
    "foreign state": (lambda path: (path / "state.json").write_text("[1]"), "not a checkpoint's"),
    "a deep state": (lambda path: (path / "state.json").write_text("[" * 100000), "state.json is damaged"),
    "a sealed deep state": (lambda path: deepen(path, 500), "state.json is damaged|at most 100 nested"),
    "a state of no run": (lambda path: reseal(path, run=3), "not a checkpoint's: run and branch are 3, 0"),
    "a state of no branch": (lambda path: reseal(path, branch=-1), "not a checkpoint's: run and branch are '', -1"),
    "a state without facts": (lambda path: reseal(path, facts=None), "not a checkpoint's: facts is None"),
    "a state without a step": (lambda path: reseal(path, step="one"), "not a checkpoint's: step is 'one'"),
    "no folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told(tmp_path, damage):
    path = save(SELF, tmp_path, 1, whole(), {})
    do, words = DAMAGES[damage]
    do(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(SELF, path)
    assert str(caught.value).startswith(f"{path} cannot be used: ")


def test_a_folder_of_another_program(tmp_path):
    save_file({"x": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no state\.json"):
        Checkpoint(SELF, tmp_path)


OTHERS = {
    "shape": (whole(shapes=SHAPES | {"model/0.weight": (5, 3)}), r"shape \(3, 5\) in the checkpoint and .*\(5, 3\)"),
    "missing there": (whole(shapes=SHAPES | {"model/new": (1,)}), "model/new is missing in the checkpoint"),
    "missing here": (whole()[1:], r"model/0.weight is float32 of shape \(3, 5\) in the checkpoint and missing here"),
    "type": (whole(dtype=np.float64), "is float32 .* and float64 .* here; .*; and 1 more"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_told_before_anything_changes(tmp_path, other):
    path = save(SELF, tmp_path, 1, whole(1), {})
    target, words = OTHERS[other]
    before = [one.array.copy() for one in target]
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(SELF, path).restore(target)
    assert all(np.array_equal(one.array, old) for one, old in zip(target, before))


def test_a_name_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="is called step-000000000 or the like"):
        step_folders.step_of(Path("step-1"))

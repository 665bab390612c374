"""Sharded data sets: the same samples as whole arrays, few maps at a time, windows of the shuffle, and bad folders."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.format import open_memmap

from collectives import Communicator
from parallel.data import shards
from parallel.data.datasets import ArrayDataset, TokenWindows, load
from parallel.data.sampler import Sampler
from parallel.data.shards import MAPPED_BYTES, OPEN_SHARDS, ConcatDataset, ShardWriter


def images(folder, sizes=(3, 1, 0, 5), scale=None, kind="classes"):
    """A folder of images in shards of these sizes, and the arrays of all."""
    count = sum(sizes)
    x = np.random.default_rng(0).integers(0, 256, (count, 4, 2)).astype(np.uint8)
    y = np.arange(count) % 3 if kind == "classes" else np.random.default_rng(1).standard_normal((count, 2))
    with ShardWriter(folder, kind, scale=scale) as writer:
        for start, size in zip(np.cumsum([0, *sizes]), sizes):
            writer.add("train", x[start : start + size], y[start : start + size])
        writer.add("test", x[:2], y[:2])
    return x, y


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_samples_are_those_of_the_arrays(tmp_path, scale, kind):
    x, y = images(tmp_path, scale=scale, kind=kind)
    task = load(str(tmp_path))
    assert (task.kind, task.inputs, task.outputs) == (kind, (4, 2), 3 if kind == "classes" else 2)
    assert (len(task.train), len(task.test), task.window) == (9, 2, None)
    for indices in ([8, 0, 3, 3, 4], [], range(9)):
        indices = np.array(indices, np.int64)
        found = task.train.take(indices)
        expected = x[indices] if scale is None else x[indices].astype(np.float32) * np.float32(scale)
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_array_equal(found[1], y[indices].astype(found[1].dtype))
        assert found[0].dtype == (np.int64 if scale is None else np.float32)
        assert found[1].dtype == (np.int64 if kind == "classes" else np.float32)
    flat = task.train.map_inputs(lambda x: x.reshape(len(x), -1)).map_inputs(lambda x: x + 1)
    np.testing.assert_array_equal(flat.take(np.array([4]))[0], task.train.take(np.array([4]))[0].reshape(1, -1) + 1)
    for bad in ([9], [-1]):
        with pytest.raises(IndexError, match="of a data set that has 9"):
            task.train.take(np.array(bad))
    with pytest.raises(ValueError, match="indices: expected integers"):
        task.train.take(np.array([1.5]))


def test_windows_of_tokens_lie_in_one_shard(tmp_path):
    texts = [np.arange(start, start + count).astype(np.uint16) for start, count in ((0, 9), (1000, 4), (300, 13))]
    with ShardWriter(tmp_path, "tokens") as writer:
        for text in texts:
            writer.add("train", text)
        writer.add("test", texts[0])
    task = load(str(tmp_path), length=4)
    assert (task.kind, task.inputs, task.outputs, task.is_text) == ("tokens", (4,), 1004, True)
    expected = [TokenWindows(text, 4).take(np.arange(len(TokenWindows(text, 4)))) for text in texts]
    x, y = task.train.take(np.arange(len(task.train)))
    np.testing.assert_array_equal(x, np.concatenate([x for x, _ in expected]))
    np.testing.assert_array_equal(y, x + 1)
    assert x.dtype == y.dtype == np.int64 and len(x) == 2 + 0 + 3


def test_a_bounded_number_of_shards_is_open():
    opened = []

    def part(number):
        opened.append(number)
        return ArrayDataset(np.full((2, 1), number), np.full(2, number))

    data = ConcatDataset([2] * 20, part)
    assert data.take(np.arange(40))[1].tolist() == [number for number in range(20) for _ in range(2)]
    opened.clear()
    for _ in range(3):
        data.take(np.arange(40 - 2 * OPEN_SHARDS, 40))
    assert not opened
    data.take(np.array([0]))
    assert opened == [0]


def zeros(folder, shards, samples, shape):
    """Data set of shards of zeros, in sparse files: pages of them are read and mapped as those of any file."""
    names = [{"x": f"{number}.x.npy", "y": f"{number}.y.npy"} for number in range(shards)]
    for entry in names:
        open_memmap(folder / entry["x"], "w+", np.uint8, (samples, *shape))
        np.save(folder / entry["y"], np.arange(samples) % 10)
    facts = {"kind": "classes", "outputs": 10, "scale": 1 / 255, "train": names, "test": names[:1]}
    (folder / "index.json").write_text(json.dumps(facts))


PEAK = """
import re, sys
from pathlib import Path

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM: +([0-9]+) kB", status.replace("\\t", " "))[1])
"""
"""Function for the peak of a process: all resident pages, those of mapped files included."""

EPOCH = """
from parallel.data.datasets import load
from parallel.data.sampler import Sampler

task = load(sys.argv[1])
sampler, before, total = Sampler(len(task.train), 256, 64, window=task.window), peak(), 0
for step in sampler.steps(0):
    for batch in step.batches(task.train, range(len(step.parts))):
        total += batch.x.nbytes
print(total, peak() - before)
"""

TRAINING = """
import resource
from collectives.cli import launcher
from parallel.cli import train

resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
launcher.run(train.main, before_exit=lambda: print("peak", peak()))
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")


@needs_proc
@pytest.mark.parametrize(
    "shards, mebibytes", [(40, 4), pytest.param(2, 128, marks=pytest.mark.full)], ids=["small", "large"]
)
def test_resident_memory_of_an_epoch(tmp_path, shards, mebibytes):
    """Peak of the process: 8 small shards, or a part of each large one, and some batches."""
    samples, features = 64 * mebibytes, 1 << 14
    zeros(tmp_path, shards, samples, (features,))
    words = [sys.executable, "-c", PEAK + EPOCH, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    total, grown = map(int, done.stdout.split())
    assert total == shards * samples * features * 4
    mapped = min(shards, OPEN_SHARDS) * min(samples * features, MAPPED_BYTES)
    assert grown < mapped + 6 * 64 * features * 4


@needs_proc
@pytest.mark.full
@pytest.mark.timeout(300)
def test_four_gibibytes_train_in_one(tmp_path):
    """One epoch; the private memory has a hard limit of 1 GiB, and the peak counts all pages."""
    pytest.importorskip("threadpoolctl")
    zeros(tmp_path, 64, 21846, (3, 32, 32))
    words = ["--data", tmp_path, "--model", "mlp:tiny", "--batch", "4096", "--epochs", "1", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-c", PEAK + TRAINING, *map(str, words)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "342 steps" in done.stdout, done.stdout + done.stderr
    assert int(done.stdout.split("peak ")[1].split()[0]) < 1 << 30


@given(st.integers(0, 200), st.integers(1, 60), st.integers(1, 30), st.integers(0, 3))
@settings(deadline=None)
def test_windows_are_shuffled_in_themselves_and_among_themselves(count, window, batch, epoch):
    sampler = Sampler(count, batch, seed=7, window=window)
    order = sampler.order(epoch)
    assert sorted(order) == list(range(count))
    parts = [part for step in sampler.steps(epoch) for part in step.parts]
    assert np.concatenate([np.zeros(0, np.int64), *parts]).tolist() == order.tolist()
    for start in range(0, count, window):
        assert len(set((order[start : start + window] // window).tolist())) == 1
    whole = Sampler(count, batch, seed=7)
    assert (order.tolist() == whole.order(epoch).tolist()) or window < count


def test_a_position_is_of_a_window():
    sampler = Sampler(100, 10, window=20)
    saved = sampler.position()
    Sampler(100, 10, window=20).load(saved)
    with pytest.raises(ValueError, match="saved with window 20, this run has 0"):
        Sampler(100, 10).load(saved)
    saved.pop("window")  # of a version without windows
    Sampler(100, 10).load(saved)
    assert Sampler(100, 100, window=20).order(0).tolist() != Sampler(100, 100, window=20).order(1).tolist()


def test_many_shards_are_shuffled_some_at_a_time(tmp_path):
    images(tmp_path, sizes=[4] * 20)
    assert load(str(tmp_path)).window == 4 * OPEN_SHARDS // 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "pictures"}, "index.json: kind: expected one of classes, values, tokens, found 'pictures'"),
        ({"outputs": 0}, "outputs: expected an integer above 0, found 0"),
        ({"scale": "1"}, "scale: expected a number, found '1'"),
        ({"train": []}, r"train: expected a list of shards, found \[\]"),
        ({"train": ["a"]}, "shard 0 of train: expected the name of a file as x, found 'a'"),
        ({"train": [{"x": "no.npy", "y": "no.npy"}]}, "shard 0 of train: x cannot be mapped: .*No such file"),
        ({"train": [{"x": "test-00000.x.npy"}]}, "shard 0 of train: expected the name of a file as y"),
        ({"train": [{"x": "train-00000.x.npy", "y": "test-00000.y.npy"}]}, "x has 3 samples, y has 2"),
        ({"train": [{"x": "test-00000.x.npy", "y": "floats.npy"}]}, "y: expected classes, found float64"),
        ({"test": [{"x": "other.npy", "y": "test-00000.y.npy"}] * 1}, None),
        ({"kind": "tokens"}, "shard 0 of train: expected a vector of integers, found uint8 of shape"),
        ({"train": [{"x": "raw.bin", "dtype": "?!", "y": "raw.bin"}]}, "x cannot be mapped: data type"),
    ],
)
def test_what_is_wrong_with_a_folder(tmp_path, change, told):
    images(tmp_path)
    np.save(tmp_path / "floats.npy", np.zeros(2))
    np.save(tmp_path / "other.npy", np.zeros((2, 4, 2)))
    (tmp_path / "raw.bin").write_bytes(bytes(8))
    index = json.loads((tmp_path / shards.INDEX).read_text())
    (tmp_path / shards.INDEX).write_text(json.dumps(index | change))
    if told is None:
        assert len(load(str(tmp_path)).test) == 2  # floats beside integers, in another part
        return
    with pytest.raises(ValueError, match=told):
        load(str(tmp_path))


def test_a_folder_without_an_index(tmp_path):
    with pytest.raises(ValueError, match=r"expected index.json, of shards, or files \*.txt; found neither"):
        load(str(tmp_path))


def test_shards_that_differ(tmp_path):
    with ShardWriter(tmp_path, "classes") as writer:
        writer.add("train", np.zeros((2, 3)), np.zeros(2, int))
        writer.add("train", np.zeros((2, 4)), np.zeros(2, int))
        with pytest.raises(ValueError, match="x has 2 samples, y has 3"):
            writer.add("test", np.zeros((2, 3)), np.zeros(3, int))
        with pytest.raises(ValueError, match="expected targets with classes"):
            writer.add("test", np.zeros((2, 3)))
        writer.add("test", np.zeros((2, 3)), np.zeros(2, int))
    with pytest.raises(ValueError, match="shard 1 of train: expected samples as of shard 0"):
        load(str(tmp_path))


def test_training_on_shards_is_training_on_the_arrays(tmp_path):
    """The same losses where all samples are shuffled; convnet and mlp take integers too."""
    pytest.importorskip("safetensors")
    from mpi4py import MPI

    from parallel.trainer.recipes import complete
    from parallel.trainer.trainer import Training

    x, y = images(tmp_path / "folder", sizes=[8] * 4, scale=0.25)
    np.savez(tmp_path / "whole.npz", x=x * np.float32(0.25), y=y, x_test=x[:2] * np.float32(0.25), y_test=y[:2])
    losses = []
    for name in ("folder", "whole.npz"):
        said = {"data": str(tmp_path / name), "model": "mlp:tiny", "batch": 8, "steps": 6, "window": 32}
        with Communicator(MPI.COMM_SELF) as comm, Training(complete(said), comm) as training:
            losses.append([record.report.loss for record in training.run()])
            training.score()
    assert losses[0] == losses[1]

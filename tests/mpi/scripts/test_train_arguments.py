"""Arguments that `chorus train` refuses: one message by rank 0, status 2 on all ranks, and no file touched."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("threadpoolctl")

from parallel.checkpoint.checkpoint_files import all_in
from parallel.cli import train

TASK = ["--data", "teacher_classes", "--model", "mlp:tiny", "--batch", "48", "--steps", "60", "--threads", "1"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(world):
    """One folder for all ranks, removed at the end."""
    path = Path(world.bcast(tempfile.mkdtemp() if world.rank == 0 else None))
    yield path
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)


def refused(world, capsys, arguments):
    """What rank 0 prints for wrong arguments."""
    with pytest.raises(SystemExit) as caught:
        train.main([str(argument) for argument in arguments])
    assert caught.value.code == 2
    texts = world.allgather(capsys.readouterr().err)
    assert not any(texts[1:]), texts
    assert texts[0].count("error: ") == 1 and "Traceback" not in texts[0], texts[0]
    return texts[0]


def small(tmp_path):
    x, y = np.ones((1, 4)), np.zeros(1, int)
    np.savez(tmp_path / "small.npz", x=x, y=y, x_test=x, y_test=y)
    return tmp_path / "small.npz"


def folder_at(path):
    path.mkdir()
    return path


def file_at(path):
    path.write_text("")
    return path


def of_many_classes(tmp_path):
    np.savez(tmp_path / "many.npz", x=np.ones((9, 4)), y=np.full(9, 10**12))
    return tmp_path / "many.npz"


def long_text(tmp_path, megabytes=1):
    (tmp_path / "long.txt").write_bytes(bytes(megabytes << 20))
    return tmp_path / "long.txt"


WRONG = {
    "length beyond the data": (lambda tmp: ["--data", long_text(tmp), "--length", 10**6], "a shorter length may do"),
    "length beyond memory": (
        lambda tmp: ["--data", long_text(tmp, 4), "--length", 3 * 10**5],
        "not enough memory: ",
    ),
    "rank count": (lambda tmp: ["--data", small(tmp)], "more ranks ({size}) than samples (1)"),
    "model": (lambda tmp: ["--model", "mlq"], "model: expected one of mlp, convnet, gpt, gpt-moe, found 'mlq'"),
    "size": (lambda tmp: ["--model", "mlp:huge"], "expected a size of"),
    "model for bytes": (lambda tmp: ["--model", "gpt"], "model: expected one of mlp, convnet for digits, found gpt"),
    "no file": (lambda tmp: ["--data", tmp / "none.npz"], "neither a file nor one of digits"),
    "rate": (lambda tmp: ["--rate", "-1"], "rate: expected a number from 0 on, found -1"),
    "momentum": (lambda tmp: ["--momentum", "0.5"], "momentum: it belongs to sgd, and the optimizer is adamw"),
    "beta2": (lambda tmp: ["--optimizer", "sgd", "--beta2", "0.9"], "beta2: it belongs to adam, adamw, lamb, and the"),
    "length": (lambda tmp: ["--length", "64"], "length: it belongs to texts, of which it cuts sequences"),
    "loss": (lambda tmp: ["--loss", "l1"], "loss: expected cross_entropy for digits, found l1"),
    "number of a loss": (lambda tmp: ["--loss", "cross_entropy:x"], "loss: expected numbers, found 'x'"),
    "smoothing": (lambda tmp: ["--loss", "cross_entropy:1"], "smoothing: expected 0 to below 1, found 1.0"),
    "class weights": (lambda tmp: ["--class-weights", "1,2"], "class_weights: expected 10 weights of classes"),
    "dropout": (lambda tmp: ["--dropout", "1"], "dropout: expected a number from 0 to below 1"),
    "layout": (lambda tmp: ["--parallel", "zero4"], "found 'zero4'"),
    "tau of another": (lambda tmp: ["--tau", "3"], "tau: it belongs to local, group, sgp, and the layout is dp"),
    "tau": (lambda tmp: ["--parallel", "local", "--tau", "0"], "tau: expected 1 steps or more, found 0"),
    "group": (
        lambda tmp: ["--parallel", "group", "--group", "99"],
        "group: expected 2 to {size} of {size} ranks, found 99",
    ),
    "half shared": (lambda tmp: ["--parallel", "hogwild", "--precision", "bf16"], "hogwild has fp32 or fp64"),
    "not alike": (
        lambda tmp: ["--parallel", "sgp", "--reproducible"],
        "reproducible: with sgp the result depends on the number of ranks",
    ),
    "pool": (
        lambda tmp: ["--pool", "--parallel", "zero2"],
        "pool: it belongs to dp-naive, dp-bucket, dp, zero1, and the layout is zero2",
    ),
    "both": (lambda tmp: ["--epochs", "1", "--steps", "1"], "not allowed with argument --epochs"),
    "resume nowhere": (lambda tmp: ["--resume"], "expected --checkpoint DIR"),
    "resume nothing": (lambda tmp: ["--resume", "--checkpoint", tmp / "none"], "has no checkpoints to resume"),
    "resume foreign": (lambda tmp: ["--resume", tmp], "has no state.json, so it is no checkpoint"),
    "checkpoints in a file": (lambda tmp: ["--checkpoint", file_at(tmp / "f")], "error: --checkpoint: "),
    "checkpoints nowhere": (lambda tmp: ["--checkpoint", file_at(tmp / "f") / "c"], "error: --checkpoint: "),
    "plot in a folder": (lambda tmp: ["--plot", folder_at(tmp / "p.png")], "error: --plot: "),
    "plot of no kind": (lambda tmp: ["--plot", tmp / "p.foo"], "--plot: expected a name that ends in one of .png"),
    "trace in a folder": (lambda tmp: ["--trace", folder_at(tmp / "t")], "error: --trace: "),
    "no room": (lambda tmp: ["--data", of_many_classes(tmp)], "not enough memory: "),
    "threads": (lambda tmp: ["--threads", "0"], "--threads: expected 1 or more, found 0"),
}

SEVERAL_RANKS = ("rank count", "tau", "group", "half shared", "not alike")


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(world, capsys, folder, wrong):
    if world.size == 1 and wrong in SEVERAL_RANKS:
        pytest.skip("one rank allows it")
    make_arguments, expected = WRONG[wrong]
    metrics = folder / "m.jsonl"
    if world.rank == 0:
        metrics.write_text('{"precious": true}\n')
    arguments = world.bcast(make_arguments(folder) if world.rank == 0 else None)
    text = refused(world, capsys, [*arguments, "--json", metrics])
    assert text.count(expected.replace("{size}", str(world.size))) == 1, text
    assert metrics.read_text() == '{"precious": true}\n'


def test_checkpoints_are_not_overwritten_by_another_training(world, capsys, folder):
    keep = ["--checkpoint", folder / "c", "--json", folder / "m.jsonl"]
    assert train.main([str(argument) for argument in [*TASK, *keep, "--every", 20]]) == 0
    capsys.readouterr()
    world.Barrier()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    older = all_in(folder / "c")[0]
    for more, expected in (
        ([], "has checkpoints already"),
        (["--resume", older], "is newer than"),
        (["--resume", "--model", "mlp:small"], "is of another model or optimiser: model/0.1.bias is float32 of shape"),
        (
            ["--resume", "--optimizer", "sgd"],
            "was made by adamw, which keeps vectors m, v; this training has sgd, which keeps velocity",
        ),
        (["--resume", "--steps", "3"], "60 steps were made already, and this training is to have 3; expected 60"),
        (["--resume", "--precision", "fp64"], "and float64 of shape"),
        (["--resume", "--batch", "32"], "is of another training: sampler position: it was saved with global_batch 48"),
        (["--resume", "--seed", "5"], "it was saved with seed 0, this run has 5"),
    ):
        text = refused(world, capsys, [*keep, *more])
        assert world.rank or expected in text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

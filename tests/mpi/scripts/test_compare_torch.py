"""The race against PyTorch: its arguments, what it compares, and a short run of it where PyTorch is installed."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from parallel.cli import compare_torch

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # what PyTorch warns of is not ours


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "convnet"], "--model"),
        (["--steps", "0"], "below 1"),
        (["--turn", "many"], "is no int"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--layout", "none"], "--layout"),
    ],
)
def test_bad_arguments_end_all_ranks_with_one_message(world, capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        compare_torch.parse(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error if world.Get_rank() == 0 else not error


def test_without_torch_there_is_a_clear_error(world, capsys, monkeypatch):
    monkeypatch.setattr(compare_torch, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        compare_torch.parse([])
    assert caught.value.code == 2
    if world.Get_rank() == 0:
        assert "chorus-mpi[torch]" in capsys.readouterr().err


@needs_torch
def test_each_model_has_data_of_its_own():
    assert compare_torch.parse(["--model", "mlp:tiny"]).data == "digits"
    assert compare_torch.parse([]).data == "pydoc"
    assert compare_torch.parse(["--data", "copy"]).data == "copy"


def test_gradients_that_differ_are_found():
    ours = {"a": np.array([3.0, 4.0]), "b": np.zeros(2)}
    theirs = {"a": np.array([3.0, 4.0]), "b": np.array([0.0, 1e-4])}
    report = compare_torch.gradients_compared(ours, theirs)
    assert report["tensor"] == "b" and report["max_error"] == pytest.approx(1e-4) and not report["within"]
    assert report["ours_norm"] == 5
    assert compare_torch.gradients_compared(ours, ours)["within"]
    with pytest.raises(ValueError, match="one side only"):
        compare_torch.gradients_compared(ours, {"a": theirs["a"]})


def test_summary_is_of_ratios_turn_by_turn():
    summary = compare_torch.summary({"ours": [1.0, 2.0, 9.0], "torch": [1.0, 1.0, 3.0]})
    assert summary["ratio"]["median"] == 2 and summary["ours"]["median"] == 2 and summary["torch"]["q1"] == 1


@needs_torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["mlp:tiny", "gpt:tiny"])
def test_both_sides_learn_the_same(world, tmp_path, model):
    path, picture = tmp_path / "race.json", tmp_path / "race.png"
    argv = ["--model", model, "--data", "copy" if model.startswith("gpt") else "digits", "--length", "16"]
    argv += ["--micro-batch", "4", "--steps", "5", "--turn", "2", "--json", str(path), "--plot", str(picture)]
    assert compare_torch.main(argv) == 0
    if world.Get_rank() == 0:
        report = json.loads(path.read_text())
        assert report["gradients"]["within"]
        assert len(report["losses"]["ours"]) == 5 and len(report["rates"]["torch"]) == 3
        np.testing.assert_allclose(report["losses"]["ours"], report["losses"]["torch"], rtol=1e-5)
        assert picture.read_bytes().startswith(b"\x89PNG")

"""The race against PyTorch: its arguments, what it compares, and a short run of it where PyTorch is installed."""

import re
from importlib.util import find_spec

import compare_torch
import numpy as np
import pytest

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # what PyTorch warns of is not ours


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "convnet"], "--model"),
        (["--steps", "0"], "from 1 on"),
        (["--turn", "many"], "expected a whole number from "),
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
    within, text = compare_torch.gradients_compared(ours, theirs)
    assert not within and text.startswith("largest difference 0.0001 (in b), norms 5 and 5: NOT EQUAL")
    assert compare_torch.gradients_compared(ours, ours)[0]
    with pytest.raises(ValueError, match="one side only"):
        compare_torch.gradients_compared(ours, {"a": theirs["a"]})


@needs_torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("model", "options"), [("mlp:tiny", []), ("gpt:tiny", []), ("gpt:tiny", ["--tensor-parallel"])], ids=str
)
def test_both_sides_learn_the_same(world, capsys, model, options):
    if options and world.Get_size() not in (1, 2):
        pytest.skip("gpt:tiny has two heads")
    argv = ["--model", model, "--data", "copy" if model.startswith("gpt") else "digits", "--length", "16", *options]
    argv += ["--micro-batch", "4", "--steps", "5", "--turn", "2"]
    assert compare_torch.main(argv) == 0
    if world.Get_rank() == 0:
        *_, chorus, torch, ratio, losses = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in (chorus, torch, ratio)] == ["Chorus", "PyTorch", "ratio"]
        found = re.fullmatch("loss after 5 steps: (.*) and (.*); largest difference on the way (.*)", losses)
        ours, theirs, apart = map(float, found.groups())
        assert ours == pytest.approx(theirs, rel=2e-5) and apart <= 1e-5 * min(ours, theirs)

"""Ways to compress compared: where trainings end, over several seeds."""

import json

import numpy as np
import pytest

from parallel.cli import compare_compression


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ways", "none,zip"], "found 'zip'"),
        (["--ways", "topk:2"], "a share of the elements"),
        (["--seeds", "1"], "below 2"),
        (["--steps", "0"], "below 1"),
    ],
)
def test_bad_arguments_end_all_ranks_with_one_message(world, capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        compare_compression.arguments(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error if world.Get_rank() == 0 else not error


def test_differences_are_in_the_first_ones_spread():
    first = np.array([1.0, 2.0, 3.0])
    assert compare_compression.cells(first, first) == "2 ± 1 | +0.00"
    assert compare_compression.cells(first + 0.5, first) == "2.5 ± 1 | +0.50"
    assert compare_compression.cells(first[::-1], np.ones(3)) == "2 ± 1 | +inf"


def test_a_row_for_each_way(world, tmp_path, capsys):
    path = tmp_path / "endings.json"
    argv = ["--model", "mlp:tiny", "--steps", "4", "--seeds", "2", "--ways", "none,int8,auto", "--json", str(path)]
    assert compare_compression.main(argv) == 0
    shown = capsys.readouterr().out
    if world.Get_rank() == 0:
        endings = json.loads(path.read_text())["endings"]
        assert list(endings) == ["none", "int8", "auto"] and all(len(each) == 2 for each in endings.values())
        assert endings["none"][0] != endings["none"][1]
        for one, other in zip(endings["none"], endings["int8"]):
            assert other["test loss"] == pytest.approx(one["test loss"], rel=0.05)
            assert 0 <= other["right, %"] <= 100
        assert [line.split(" | ")[0] for line in shown.splitlines()[4:]] == ["| `none`", "| `int8`", "| `auto`"]

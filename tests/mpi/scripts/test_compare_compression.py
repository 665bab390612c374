"""Ways to compress compared: where trainings end, over several seeds."""

import compare_compression
import numpy as np
import pytest


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ways", "none,zip"], "found 'zip'"),
        (["--ways", "topk:2"], "a share of the elements"),
        (["--seeds", "1"], "from 2 on"),
        (["--steps", "0"], "from 1 on"),
    ],
)
def test_bad_arguments_end_all_ranks_with_one_message(world, capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        compare_compression.main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error if world.Get_rank() == 0 else not error


def test_differences_are_in_the_first_ones_spread():
    first = np.array([1.0, 2.0, 3.0])
    assert compare_compression.cells(first, first) == "2 ± 1 | +0.00"
    assert compare_compression.cells(first + 0.5, first) == "2.5 ± 1 | +0.50"
    assert compare_compression.cells(first[::-1], np.ones(3)) == "2 ± 1 | +inf"


def test_a_row_for_each_way(world, capsys):
    argv = ["--model", "mlp:tiny", "--steps", "4", "--seeds", "2", "--ways", "none,int8,auto"]
    assert compare_compression.main(argv) == 0
    shown = capsys.readouterr().out
    if world.Get_rank() == 0:
        rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in shown.splitlines()[4:]}
        assert list(rows) == ["| `none`", "| `int8`", "| `auto`"]
        losses, right = ([float(row[at].split()[0]) for row in rows.values()] for at in (0, 2))
        assert losses[1] == pytest.approx(losses[0], rel=0.05) and "± 0 " not in rows["| `none`"][0] + " "
        assert all(0 <= share <= 100 for share in right)

"""The race of layouts: its arguments, and a short run of it."""

import json

import pytest

from parallel.cli import bench_layouts
from parallel.engine.data_parallel_engine import LAYOUTS


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "convnet"], "--model"),
        (["--turns", "0"], "below 1"),
        (["--turn", "many"], "is no int"),
        (["--layouts", "dp,none"], "found none"),
    ],
)
def test_bad_arguments_end_all_ranks_with_one_message(world, capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        bench_layouts.parse(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error if world.Get_rank() == 0 else not error


def test_the_first_layout_always_takes_part():
    assert bench_layouts.parse(["--layouts", "zero2,dp"]).layouts == [bench_layouts.FIRST, "dp", "zero2"]


@pytest.mark.timeout(120)
def test_all_layouts_race(world, tmp_path, capsys):
    """A row for each layout and for what bounds them; a speed is that of the first layout over its own."""
    path = tmp_path / "race.json"
    argv = ["--model", "mlp:tiny", "--micro-batch", "2", "--turns", "3", "--turn", "2", "--json", str(path)]
    assert bench_layouts.main(argv) == 0
    shown = capsys.readouterr().out
    if world.Get_rank() == 0:
        report = json.loads(path.read_text())
        assert set(report["summary"]) == {*LAYOUTS, *bench_layouts.BOUND}
        assert all(name in shown for name in report["summary"])
        assert all(len(values) == 3 and min(values) > 0 for values in report["seconds"].values())
        assert report["summary"][bench_layouts.FIRST]["speedup"]["median"] == 1
        assert all(0 < row["communication"] <= 1 for name, row in report["summary"].items() if name in LAYOUTS)

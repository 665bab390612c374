"""The race of layouts: its arguments, and a short run of it."""

import pytest

from parallel.cli import bench_layouts
from parallel.engine.data_parallel.layouts import LAYOUTS


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "convnet"], "--model"),
        (["--turns", "0"], "from 1 on"),
        (["--turn", "many"], "expected a whole number from "),
        (["--layouts", "dp,none"], "unknown layout 'none'"),
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
def test_all_layouts_race(world, capsys):
    """A row for each layout and for what bounds them; a speed is that of the first layout over its own."""
    argv = ["--model", "mlp:tiny", "--micro-batch", "2", "--turns", "3", "--turn", "2"]
    assert bench_layouts.main(argv) == 0
    shown = capsys.readouterr().out
    if world.Get_rank() == 0:
        rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[2:]}
        assert list(rows) == [*LAYOUTS, *bench_layouts.BOUND]
        times = {name: float(row[0]) for name, row in rows.items()}
        alone = {"exchange"} if world.Get_size() == 1 else set()  # nothing is exchanged: 0.00 ms
        assert all(times[name] > 0 for name in times.keys() - alone)
        assert rows[bench_layouts.FIRST][4] == "1.000"
        assert all(0 <= int(rows[name][8].rstrip("%")) <= 100 for name in LAYOUTS)

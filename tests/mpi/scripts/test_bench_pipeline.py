"""The bench of pipelines: its table has every schedule, and what it tells is what it found."""

import pytest

from parallel.cli import bench_pipeline
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.schedules import SCHEDULES


def test_a_table_of_all_schedules(world, capsys):
    bench_pipeline.main(["--milliseconds", "0.2", "--microbatches", "4"])  # what it finds is noise
    lines = capsys.readouterr().out.splitlines()
    if world.Get_rank():
        assert not lines
        return
    rows = {line.split()[0]: line.split() for line in lines[2:-1]}
    assert list(rows) == list(SCHEDULES)
    for name, row in rows.items():
        assert int(row[4]) == lower(build(name, world.Get_size(), 4)).messages().total()


@pytest.mark.parametrize("found", [0.5, 0.61])
def test_what_is_out_of_bounds_is_told(world, capsys, monkeypatch, found):
    monkeypatch.setattr(bench_pipeline, "idle", lambda *_: found)
    monkeypatch.setattr(bench_pipeline, "overhead", lambda *_: 1e-6)
    size = world.Get_size()
    simulated = (size - 1) / (size - 1 + 4)
    good = abs(found - simulated) <= 0.1 * simulated
    assert bench_pipeline.main(["--schedules", "1f1b", "--microbatches", "4"]) == (not good)
    monkeypatch.setattr(bench_pipeline, "idle", lambda *_: simulated)
    assert bench_pipeline.main(["--schedules", "1f1b", "--microbatches", "4"]) == 0
    monkeypatch.setattr(bench_pipeline, "overhead", lambda *_: 31e-6)
    assert bench_pipeline.main(["--schedules", "1f1b", "--microbatches", "4"]) == 1
    assert ("not all within" in capsys.readouterr().out) == (world.Get_rank() == 0)


def test_schedules_that_there_are_not(world, capsys):
    with pytest.raises(SystemExit) as end:
        bench_pipeline.main(["--schedules", "1f1b,2f2b"])
    assert end.value.code == 2
    assert ("unknown schedule '2f2b'" in capsys.readouterr().err) == (world.Get_rank() == 0)

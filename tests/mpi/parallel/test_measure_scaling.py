"""Measured points of scaling: every table, and those of the ranks here."""

import pytest

pytest.importorskip("safetensors")

from parallel.cli import measure_scaling
from parallel.planning.analytic.scaling import BANDWIDTH, EXCHANGES, PIPELINES, REPLICAS, SERVERS, powers_of_two
from parallel.planning.measured import measured_messages


def test_points(comm, monkeypatch):
    tiny = {"data": "teacher_classes", "layout": "zero1"}
    monkeypatch.setattr(measure_scaling, "MLP", tiny)
    monkeypatch.setattr(measure_scaling, "GPT", tiny | {"batch": 8})
    for name, value in (("BATCH", 12), ("MICROBATCHES", (2,)), ("STEPS", 2), ("WARM_UP", 1)):
        monkeypatch.setattr(measure_scaling, name, value)
    monkeypatch.setattr(measured_messages, "TIMES", (1, 1))
    sizes = measure_scaling.ScaledSizes(1 << 12, 1 << 12, "mlp:tiny", "mlp:tiny")
    found = measure_scaling.measure(measure_scaling.RankPrefixes(comm), sizes, ["ring"])
    assert comm.allgather(found) == [found] * comm.size and tuple(found) == (REPLICAS, PIPELINES, BANDWIDTH, EXCHANGES)
    replicas, pipelines, bandwidths, exchanges = found.values()
    counts = powers_of_two(comm.size)
    assert all(list(line) == counts and line[1] == 1 for line in replicas.values())
    assert list(pipelines) == [f"{stages} stages" for stages in counts[1:]]
    assert list(bandwidths) == ["ring"] and list(exchanges) == list(SERVERS)
    points = [y for lines in found.values() for line in lines.values() for y in line.values()]
    assert all(0 < y < float("inf") for y in points)

"""Predicted scaling: closed forms, and the program."""

import json

import pytest

from collectives.algorithms import catalog
from collectives.schedule.steps import Send
from parallel.cli import plan_scaling
from parallel.planning.analytic.presets import load
from parallel.planning.analytic.scaling import (
    BANDWIDTH,
    REPLICAS,
    bus_bandwidth,
    exchange_seconds,
    pipeline_efficiency,
    replica_efficiency,
    sequences_per_second,
    sum_costs,
)
from parallel.planning.analytic.states import RECIPES
from parallel.planning.analytic.step_time import Setup

PRESETS = load()
CLUSTER = PRESETS.clusters["h100"]
SETUP = Setup(CLUSTER, PRESETS.device_of(CLUSTER), "bf16", RECIPES["bf16"])


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (4, 8), (7, 3)])
def test_1f1b_computes_its_share_of_a_step(stages, microbatches):
    assert pipeline_efficiency(stages, microbatches) == pytest.approx(microbatches / (microbatches + stages - 1))


def test_bandwidth_of_a_ring():
    """A ring comes to the link's rate as the bytes grow, a tree to that divided by its rounds."""
    nodes, nbytes = 8, 1 << 40
    assert bus_bandwidth(CLUSTER, nodes, nbytes, "ring") == pytest.approx(CLUSTER.between.rate, rel=1e-3)
    rounds = float(catalog.evaluate("2*q", nodes))
    share = 2 * (nodes - 1) / nodes / rounds
    assert bus_bandwidth(CLUSTER, nodes, nbytes, "mst") == pytest.approx(share * CLUSTER.between.rate, rel=1e-3)


def test_servers_against_allreduce():
    for workers in (2, 5, 16):
        found = exchange_seconds(CLUSTER, workers, 1 << 34)
        assert found["one server"] == pytest.approx(workers * found["allreduce"], rel=1e-3)
        assert found["as many servers as workers"] == pytest.approx(found["allreduce"], rel=1e-9)


@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_sums_move_as_much_together(nodes):
    """Every algorithm sends 2 (p - 1) vectors, as its schedule does; what they differ in is the busiest rank."""
    found = sum_costs(CLUSTER, nodes, 1 << 20)
    for name, cost in found.items():
        schedules, count = catalog.build_all("allreduce", name, nodes), catalog.blocks("allreduce", name, nodes)
        sends = (step for rounds in schedules for steps in rounds for step in steps if isinstance(step, Send))
        moved = sum(len(part) for step in sends for part in step.chunks)
        assert moved == count * cost.traffic == count * 2 * (nodes - 1)
        assert cost.bandwidth == bus_bandwidth(CLUSTER, nodes, 1 << 20, name)
    assert found["linear"].busiest == nodes - 1 and found["ring"].busiest == pytest.approx(2 * (nodes - 1) / nodes)
    assert found["binary_tree"].busiest <= 3


def test_replicas():
    model = PRESETS.models["gpt2-xl"]
    counts = [1, 2, 3, 8, 64]
    weak = replica_efficiency(model, SETUP, counts, 16, strong=False)
    strong = replica_efficiency(model, SETUP, counts, 16, strong=True)
    assert list(weak) == counts and list(strong) == [1, 2, 8], "16 sequences do not divide among 3 or 64"
    assert weak[1] == strong[1] == 1 and 0 < strong[8] < weak[8]
    assert weak[8] < 1.1, "above 1 only by the update, which ZeRO-1 divides"
    assert strong[8] * 8 * sequences_per_second(model, SETUP, 1, 16) == sequences_per_second(model, SETUP, 8, 16)


def test_program(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "scaling.svg"
    words = ["--scaling", "--cluster", "h100:4", "--model", "gpt2", "--batch", "4"]
    assert plan_scaling.main([*words, "--plot", str(path)]) == 0
    output = capsys.readouterr().out
    assert (
        "1F1B" in output
        and "one server" in output
        and "binary_tree (binary tree)" in output
        and path.stat().st_size > 1000
    )
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({BANDWIDTH: {"ring": {"2": 0.125, "4": 0.25}}, REPLICAS: {"weak": {"2": 0.75}}}))
    assert plan_scaling.main([*words, "--measured", str(measured), "--plot", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ring,", "measured", "0.125", "0.25"] in lines and ["weak,", "measured", "0.75"] in lines
    other = tmp_path / "other.json"
    other.write_text('{"speed": {}}')
    endless = tmp_path / "endless.json"
    endless.write_text(json.dumps({REPLICAS: {"weak": {"2": float("inf")}}}))
    for more, message in (
        (["--measured", str(other)], "expected tables out of share of ideal throughput"),
        (["--measured", str(tmp_path / "none")], "--measured: expected points of --measure-scaling, found "),
        (["--measured", str(endless)], "--measured: expected points of --measure-scaling, found "),
        (["--batch", "4M"], "--batch: expected a whole number from 1 on, found '4M'"),
        (["--nodes", "4"], "unrecognized arguments: --nodes 4"),
        (["--plot", "/dev/null/a.png"], "--plot: expected a file that can be written, found '/dev/null/a.png'"),
        (["--cluster", "h100:1"], "expected 2 devices or more"),
        (["--model", "gtp2"], "perhaps gpt2"),
    ):
        with pytest.raises(SystemExit, match="2"):
            plan_scaling.main([*words, *more])
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line

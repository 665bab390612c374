"""Placement of operators: collectives of one table, resharding costs, searches against trying all choices."""

import json
import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from parallel.cli import plan_graph
from parallel.cli.plan_graph import read_graph, transformer_block, two_layers
from parallel.nn.attention import CausalAttention
from parallel.nn.linear import Linear
from parallel.nn.operator import Parameter, constant
from parallel.nn.placement import Partial, Replicate, Shard
from parallel.planning.analytic import choice_search, stage_search
from parallel.planning.analytic.choice_search import ChoiceProblem, by_milp
from parallel.planning.analytic.graph_costs import GraphCosts
from parallel.planning.analytic.graph_stages import StagePlanner, mesh_of
from parallel.planning.analytic.machines import Link
from parallel.planning.analytic.operator_kinds import KINDS
from parallel.planning.analytic.presets import load
from parallel.planning.analytic.resharding import PlacementMesh, exchanges, resharding, value_placements
from parallel.planning.analytic.stage_search import best_stages
from parallel.planning.analytic.states import RECIPES
from parallel.planning.analytic.step_time import Setup
from parallel.sharding.tensor import redistribute
from parallel.sharding.tensor.cut_model import STYLES, Cutter

PRESETS = load()
CLUSTER = PRESETS.clusters["a100"]
SETUP = Setup(CLUSTER, PRESETS.device_of(CLUSTER), "bf16", RECIPES["bf16"])
AXIS = SimpleNamespace(name="tp", rank=0, size=2, comm=None)
LINK = Link(1e-6, 1e9)


@pytest.mark.parametrize(
    "operator",
    [
        redistribute.CopyToShards,
        redistribute.SumShards,
        redistribute.GatherSequence,
        redistribute.ScatterSequence,
    ],
)
def test_operators_make_the_exchanges_of_the_table(operator, monkeypatch):
    calls = []

    def recorded(name, result):
        monkeypatch.setattr(redistribute, name, lambda axis, x, *rest: (calls.append(name), result(x))[1])

    for name in ("allreduce", "allgather", "reduce_scatter"):
        recorded(name, lambda x: x)
    recorded("start_allreduce", lambda x: lambda: x)
    one, x, found = operator(AXIS, Parameter((1,), constant(0.0))), np.ones((2, 4, 3), np.float32), []
    y, saved = one.forward(x, None)
    found.append([name.removeprefix("start_") for name in calls])
    calls.clear()
    one.backward(y, saved, None)
    found.append([name.removeprefix("start_") for name in calls])
    expected = [[name] if name else [] for name in exchanges(operator.takes, operator.gives)]
    assert found == expected


def test_rules_are_those_of_the_cut_styles():
    for style, operator, rule in (
        ("column", Linear(8, 4), KINDS["linear"].rules["column"]),
        ("row", Linear(8, 4), KINDS["linear"].rules["row"]),
        ("heads", CausalAttention(4), KINDS["attention"].rules["heads"]),
    ):
        first = STYLES[style, type(operator)](operator, Cutter(AXIS, 2, "auto"))[0]
        shards = getattr(first, "inner", first)
        for placement, expected in ((shards.takes, rule.takes), (shards.gives, rule.gives)):
            assert type(placement) is type(expected) and getattr(placement, "dim", 0) == getattr(expected, "dim", 0)
            assert getattr(placement, "partial", False) == getattr(expected, "partial", False)


def test_reshardings_of_one_axis():
    mesh, n = PlacementMesh((4,), (LINK,)), 1 << 20
    expected = {
        (Partial(), Replicate()): ("allreduce(0)", 1.5 * n),
        (Partial(), Shard(0)): ("reduce_scatter(0)", 0.75 * n),
        (Shard(1), Replicate()): ("allgather(0)", 0.75 * n),
        (Shard(1), Shard(-1)): ("alltoall(0)", 0.75 * n / 4),
        (Replicate(), Shard(1)): ("-", 0),
        (Replicate(partial=True), Partial()): ("-", 0),
        (Shard(0), Partial()): ("-", 0),
    }
    for (source, target), (name, nbytes) in expected.items():
        found = resharding((source,), (target,), n, mesh)
        assert (str(found), found.nbytes) == (name, nbytes)


def part(placement, place, sizes, shape):
    """Elements, numbered, of a value that the device at `place` has."""
    value = np.arange(np.prod(shape)).reshape(shape)
    for along, at, size in zip(placement, place, sizes):
        if isinstance(along, Shard):
            value = np.array_split(value, size, along.dim)[at]
    return set(value.reshape(-1).tolist())


def test_reshardings_of_two_axes():
    """No cheaper than what devices lack, no dearer than with a detour, for all pairs on a 2 x 4 mesh."""
    shape, sizes = (8, 8), (2, 4)
    mesh, all_placements = PlacementMesh(sizes, (LINK, LINK)), value_placements((0, -1), 2)
    costs = {pair: resharding(*pair, 64, mesh, (0, -1)) for pair in product(all_placements, repeat=2)}
    for source, target in costs:
        assert all(
            costs[source, target].seconds <= costs[source, via].seconds + costs[via, target].seconds + 1e-12
            for via in all_placements
            if Partial() not in via or Partial() in target
        )
        if Partial() in (*source, *target):
            continue
        lacking = max(
            len(part(target, place, sizes, shape) - part(source, place, sizes, shape))
            for place in product(*map(range, sizes))
        )
        assert costs[source, target].nbytes >= lacking
        assert (costs[source, target].nbytes == 0) == (lacking == 0)


def random_problem(seed):
    chance = random.Random(seed)
    nodes = chance.randrange(1, 9)
    counts = [chance.randrange(1, 4 if nodes > 6 else 5) for _ in range(nodes)]

    def costs(*shape):
        values = np.array([float(chance.randrange(100)) for _ in range(int(np.prod(shape)))])
        values[[chance.random() < 0.1 for _ in values]] = np.inf
        return values.reshape(shape)

    pairs = [(a, b) for b in range(nodes) for a in range(b) if chance.random() < 0.4] + [(nodes - 1, 0)]
    memory = [np.array([float(chance.randrange(10)) for _ in range(count)]) for count in counts]
    limit = np.inf if chance.random() < 0.3 else float(chance.randrange(2, 6) * nodes)
    edges = [(a, b, costs(counts[a], counts[b])) for a, b in pairs]
    return ChoiceProblem([costs(count) for count in counts], edges, memory, limit)


def test_integer_programming_finds_the_cheapest_choice():
    impossible = 0
    for seed in range(50):
        problem = random_problem(seed)
        expected, found = choice_search.exhaustive(problem), by_milp(problem)
        if expected is None:
            impossible += 1
            assert found is None
        else:
            assert found is not None and problem.cost(found) == problem.cost(expected)
    assert 0 < impossible < 25


def test_dynamic_programming_finds_the_fastest_stages():
    for seed in range(50):
        chance = random.Random(seed)
        operators, devices, microbatches = chance.randrange(1, 7), chance.randrange(1, 7), chance.randrange(1, 9)
        sizes, count = chance.choice([(1,), (1, 2), (1, 2, 4), (2, 4)]), chance.choice([0, 0, 2])
        times: dict = {}

        def seconds(stage, left, times=times, chance=chance):
            value = chance.randrange(1, 50) if chance.random() < 0.9 else np.inf
            return times.setdefault((stage, left), float(value))

        found = best_stages(operators, devices, sizes, seconds, microbatches, count)
        expected = stage_search.exhaustive(operators, devices, sizes, seconds, microbatches, count)
        assert (found and found.seconds) == (expected and expected.seconds)


@pytest.mark.parametrize(
    ("model", "sizes"), [("gpt-3", (2,)), ("gpt-3", (8,)), ("megatron-22b", (4,)), ("opt-13b", (5,))]
)
def test_the_placement_of_megatron_is_found(model, sizes):
    plan = GraphCosts(transformer_block(PRESETS.models[model], 1), mesh_of(sizes, CLUSTER), SETUP).best()
    names = ("queries, keys, values", "attention", "projection", "FFN in", "activation", "FFN out")
    found = [plan.options[name].rules[0] for name in names]
    assert found == ["column", "heads", "row", "column", "features", "row"]


def test_tensor_parallelism_within_replicas():
    plan = GraphCosts(transformer_block(PRESETS.models["gpt-3"], 8), mesh_of((2, 4), CLUSTER), SETUP).best()
    assert plan.options["attention"].rules == ("batch", "heads")
    assert plan.options["FFN in"].rules == ("batch", "column")


def test_two_devices():
    """Column then row exchanges n, the result's bytes, each way; the others the hidden layer's."""
    rows, width, hidden = 64, 256, 1024
    graph, mesh, n = two_layers(rows, width, hidden), mesh_of((2,), CLUSTER), 2 * 64 * 256
    whole = {"x": ("replicated",), "y": ("replicated",)}
    for first, second, nbytes in (("column", "row", n), ("row", "column", 2 * n * hidden // width // 2 + n // 2)):
        plan = GraphCosts(graph, mesh, SETUP, fixed={**whole, "A": (first,), "B": (second,)}).best()
        forward, backward = zip(*((there.nbytes, back.nbytes) for there, back in plan.edges.values()))
        assert sum(forward) == nbytes
        assert sum(backward) == nbytes
    staged = StagePlanner(graph, SETUP, 4).best(2, 2)
    assert [set(stage.names) & {"A", "B"} for stage in staged.stages] == [{"A"}, {"B"}]
    assert staged.stages[0].sending == 2 * float(CLUSTER.inside.cost(2 * rows * hidden))
    assert staged.stages[1].sending == 0


def test_files(tmp_path):
    path = tmp_path / "graph.toml"
    text = 'shape = [4, 1, 8]\n[operators.x]\nkind = "input"\n'
    text += '[operators.A]\nkind = "linear"\ninputs = ["x"]\nfeatures = 16\n'
    path.write_text(text)
    graph = read_graph(path)
    assert graph.shapes == {"x": (4, 1, 8), "A": (4, 1, 16)} and graph.weights("A") == 128
    for old, new, message in (
        ("features", "feature", "unknown key 'feature' .perhaps features."),
        ('["x"]', '["z"]', "A: expected earlier operators as inputs .x., found 'z'"),
        ('["x"]', '"x"', "inputs: expected a list, found 'x'"),
        ('"linear"', '"lineal"', "perhaps linear"),
        ("[4, 1, 8]", "[4, 8]", r"shape: expected .batch, length, width., found \[4, 8\]"),
        ("[4, 1, 8]", "[4, 1, 8", "graph.toml"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            read_graph(path)


def test_program(capsys, tmp_path):
    words = ["--graph", "two-layers", "--cluster", "a100:2", "--batch", "64"]
    assert plan_graph.main([*words, "--fix", "A=column,B=row", "--stages", "2", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"]["best"]["rules"]["B"] == ["row"] and len(found["stages"]["stages"]) == 2
    assert plan_graph.main([*words, "--resharding", "1M"]) == 0
    assert "P         R              1 MiB" in capsys.readouterr().out
    for more, message in (
        (["--graph", "gpt-33"], "perhaps gpt-3"),
        (["--graph", ""], "--graph: expected one of "),
        (["--graph", "none.toml"], "--graph: none.toml: expected a TOML file, found: No such file or directory"),
        (["--graph", "llama-3-8b"], "--graph: model: expected a plain transformer"),
        (["--fix", "Z=row"], "--fix: operator: expected one of x, A, "),
        (["--fix", "A=row,A=column"], "--fix: expected every operator once, found 'A=row,A=column'"),
        (["--mesh", "²"], "--mesh: expected a mesh of one or two axes, as 8 or 2x4; found '²'"),
        (["--mesh", "9" * 5000], "--mesh: expected a mesh of one or two axes"),
        (["--memory", "nan"], "--memory: expected a number and perhaps K, M or G, as in 64K; found 'nan'"),
        (["--resharding", "0"], "--resharding: expected a number of bytes above 0, found 0"),
        (["--batch", "0"], "--batch: expected a whole number from 1 on, found '0'"),
        (["--json", "/dev/null/a"], "--json: expected a file that can be written, found '/dev/null/a'"),
        (["--fix", "A=rows"], "A: expected one of replicated, batch, column, row; found rows"),
        (["--mesh", "3x1"], "expected axes of 2 devices"),
        (["--memory", "1M"], "--memory: expected placements within 0.00104858 GB"),
        (["--stages", "3"], "expected 3 stages on 2 devices"),
    ):
        with pytest.raises(SystemExit, match="2"):
            plan_graph.main([*words, *more])
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_without_scipy(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    with pytest.raises(SystemExit, match="2"):
        plan_graph.main(["--graph", "two-layers", "--cluster", "a100:2"])
    assert "pip install 'chorus-mpi[plan]'" in capsys.readouterr().err


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    words = ["--graph", "two-layers", "--cluster", "a100:2", "--batch", "64", "--fix", "A=row,B=column"]
    assert plan_graph.main([*words, "--plot", str(path)]) == 0
    text = path.read_text()
    assert "A=row" in text

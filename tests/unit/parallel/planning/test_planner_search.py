"""Search of layouts: complete, each rejection with its reason; times of simple cases by hand; the program."""

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from parallel.cli import plan_cluster
from parallel.cli.main import find
from parallel.cli.reports.plan_report import PlanQuestion
from parallel.cli.reports.plan_timeline import predicted_timeline
from parallel.planning.analytic.flops import CONVENTIONS
from parallel.planning.analytic.layout import ClusterLayout, layer_ranges, misfits
from parallel.planning.analytic.machines import Stack
from parallel.planning.analytic.memory import stage_memory
from parallel.planning.analytic.presets import load, parse
from parallel.planning.analytic.search import PlanChoice, Rejection, candidates, heaviest, judge, search
from parallel.planning.analytic.states import RECIPES, WeightCount, state_bytes
from parallel.planning.analytic.step_time import (
    Setup,
    StepTime,
    balanced_layers,
    batch_time,
    forward_seconds,
    message_seconds,
    ring_seconds,
    stage_times,
    step_time,
)

ROOT = Path(__file__).resolve().parents[4]
PRESETS = load()
H100 = PRESETS.clusters["h100"]
SETUP = Setup(H100, PRESETS.device_of(H100), "bf16", RECIPES["bf16"])
SMALL = replace(PRESETS.models["llama-3-8b"], layers=4)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_search_is_complete(devices):
    """Every candidate is a choice or a rejection, once; choices are in order of time, and fit."""
    every = list(candidates(SMALL, SETUP, devices, {}))
    found = search(SMALL, SETUP, devices, 24)
    layouts = [each.layout for each in (*found.choices, *found.rejected)]
    assert len(set(every)) == len(every) == len(layouts) and set(layouts) == set(every)
    assert all(layout.ranks == devices for layout in every)
    times = [choice.time.total for choice in found.choices]
    assert times == sorted(times)
    for choice in found.choices[:20]:
        assert not list(misfits(SMALL, choice.layout, 24)) and choice.nbytes <= SETUP.device.memory


CASES = [
    (layers, devices, sequences, limit)
    for layers, devices, sequences in ((2, 1, 4), (4, 2, 6), (3, 3, 3), (4, 4, 8), (6, 2, 5))
    for limit in (24e9, 40e9, 80e9, 200e9)
]


@pytest.mark.parametrize(("layers", "devices", "sequences", "limit"), CASES)
def test_the_best_is_that_of_enumeration(layers, devices, sequences, limit):
    """All candidates, priced one by one, without the order of the checks; in devices of several memories."""
    model, setup, best = replace(SMALL, layers=layers), SETUP._replace(device=replace(SETUP.device, memory=limit)), None
    for layout in candidates(model, setup, devices, {}, ("int8", "int4")):
        if list(misfits(model, layout, sequences)):
            continue
        rounds = sequences // (layout.dp * layout.micro_batch)
        nbytes = max(memory.total() for memory in stage_memory(model, layout, setup.recipe, rounds))
        seconds = step_time(model, layout, setup, sequences, heaviest(model, layout)).total
        if nbytes <= limit and (best is None or (seconds, nbytes) < best[:2]):
            best = seconds, nbytes, layout
    choices = search(model, setup, devices, sequences, None, ("int8", "int4")).choices
    assert best == ((choices[0].time.total, choices[0].nbytes, choices[0].layout) if choices else None)


def test_reasons():
    model = PRESETS.models["llama-3-70b"]
    expected = {
        ClusterLayout(dp=64): ("weights, gradients and optimizer exceed the memory", "1190.0 GB over 80 GB; optimizer"),
        ClusterLayout(dp=64, zero=3): ("activations exceed the memory", "814.8 GB over 80 GB; activations 871.5 GB"),
        ClusterLayout(dp=3): ("does not divide", "dp x micro-batch = 3 does not divide 512 sequences"),
    }
    for layout, (kind, reason) in expected.items():
        found = judge(model, layout, SETUP, 512)
        assert isinstance(found, Rejection) and found.kind == kind and found.reason.startswith(reason)


def test_fixed_values():
    found = search(SMALL, SETUP, 8, 8, {"tp": 2, "recompute": "full"})
    assert found.choices and all(c.layout.tp == 2 and c.layout.recompute == "full" for c in found.choices)
    assert not search(SMALL, SETUP, 8, 8, {"tp": 5}).choices
    with pytest.raises(ValueError, match=r"layout: expected fields out of dp, tp.*; found 'zp'"):
        search(SMALL, SETUP, 8, 8, {"zp": 2})


@pytest.mark.parametrize(("devices", "sequences"), [(0, 1), (-1, 1), (1, 0)])
def test_nothing_to_plan(devices, sequences):
    with pytest.raises(ValueError, match="expected at least 1 device and 1 sequence, found"):
        search(SMALL, SETUP, devices, sequences)


def test_compressed_gradients():
    """Candidates without ZeRO only; residuals of 8 bytes a parameter; it pays where gradients are exchanged slowly."""
    every = list(candidates(SMALL, SETUP, 4, {}, ["int8"]))
    plain = [layout for layout in every if layout.compress == "none"]
    assert plain == list(candidates(SMALL, SETUP, 4, {})) and len(set(every)) == len(every) > len(plain)
    assert {(layout.zero, layout.replicas > 1) for layout in every if layout.compress != "none"} == {(0, True)}
    fixed = {each.compress for each in candidates(SMALL, SETUP, 4, {"compress": "int4"})}
    assert fixed == {"int4"}
    alone, packed = ClusterLayout(dp=16), ClusterLayout(dp=16, compress="int4")
    states = [state_bytes(heaviest(SMALL, layout), SETUP.recipe, layout) for layout in (alone, packed)]
    assert states[1]["residual"] == 8 * sum(heaviest(SMALL, packed)) == states[1].total() - states[0].total()
    slow = SETUP._replace(cluster=replace(H100, between=replace(H100.between, rate=1e9)))
    for setup, pays in ((SETUP, False), (slow, True)):
        times = [step_time(SMALL, layout, setup, 16, heaviest(SMALL, layout)).total for layout in (alone, packed)]
        assert (times[1] < times[0]) == pays
    assert "compress int4" in str(packed)


def test_names_of_layouts_differ():
    layouts = [*candidates(SMALL, SETUP, 4, {}, ["int8"])]
    assert len({*map(str, layouts)}) == len(layouts)


def test_messages_are_priced_by_the_catalogue():
    """A ring allgather of n bytes: (p - 1) alpha + (p - 1)/p n beta."""
    link = H100.inside
    assert message_seconds("allgather", "ring", 4, 1 << 20, link) == pytest.approx(
        3 * link.alpha + 3 / 4 * (1 << 20) / link.rate
    )
    assert message_seconds("allgather", "ring", 1, 1 << 20, link) == 0.0


def test_rings_over_nodes_have_two_levels():
    """Each of the eight devices of a node sends its eighth between nodes; of an axis with stride 8 each sends all."""
    inside = replace(H100.inside, rate=0.65 * H100.inside.rate)
    between = replace(H100.between, rate=0.9 * H100.between.rate)
    nbytes = 1 << 30
    together = message_seconds("allgather", "ring", 8, nbytes, inside)
    assert ring_seconds("allgather", 32, 1, nbytes, SETUP) == pytest.approx(
        together + message_seconds("allgather", "ring", 4, nbytes / 8, between)
    )
    alone = message_seconds("allgather", "ring", 4, nbytes, between)
    assert ring_seconds("allgather", 4, 8, nbytes, SETUP) == pytest.approx(alone)


def test_links_without_a_switch():
    cube = PRESETS.clusters["v100-16g"]
    assert [cube.link(ranks).rate for ranks in (2, 4, 8)] == pytest.approx([37.5e9, 112.5e9, 150e9])
    assert cube.link(16) == cube.between


def time_of(sequences=64, **layout):
    layout = ClusterLayout(**layout)
    return step_time(SMALL, layout, SETUP, sequences, heaviest(SMALL, layout))


def test_parts_of_a_step():
    alone = time_of()
    assert [name for name in StepTime._fields if getattr(alone, name)] == ["compute", "memory", "update"]
    ideal = CONVENTIONS["exact"](SMALL, SMALL.context) * 64 * SMALL.context / SETUP.device.peak["bf16"]
    assert ideal < alone.compute < 2 * ideal
    layers, scores, head = forward_seconds(SMALL, SETUP, 1, 1, 1, 1)
    logits = 6 * 4 * SMALL.context * SMALL.vocabulary / SETUP.device.bandwidth
    assert alone.compute == pytest.approx(64 * (3 * (layers + scores + head) + logits))
    again = {level: time_of(recompute=level).recompute for level in ("none", "selective", "full")}
    assert again == pytest.approx({"none": 0, "selective": 64 * scores, "full": 64 * (layers + scores)})
    assert time_of(dp=4).compute == alone.compute / 4
    tp, sp = time_of(tp=4), time_of(tp=4, sequence=True)
    assert sp.tensor == pytest.approx(tp.tensor * 10 / 8) and sp.memory < tp.memory
    # Two passes of two allreduces for each of four layers, each an allgather and a reduce-scatter.
    vector, reached = 2 * SMALL.context * SMALL.width, replace(H100.inside, rate=0.65 * H100.inside.rate)
    assert tp.tensor == pytest.approx(64 * 4 * 8 * message_seconds("allgather", "ring", 4, vector, reached))
    hidden = SETUP._replace(stack=Stack(hidden_tensor=0.75))
    assert batch_time(SMALL, ClusterLayout(tp=4), hidden).tensor == pytest.approx(tp.tensor / 64 / 4)
    pp = time_of(pp=4)
    stages = stage_times(SMALL, ClusterLayout(pp=4), SETUP)
    assert pp.bubble == pytest.approx(3 * stages[0].busy) and stages[0].busy + stages[3].head == stages[3].busy
    assert time_of(pp=2, schedule="interleaved", virtual=2).bubble < time_of(pp=2).bubble


@pytest.mark.parametrize(
    ("layout", "copies", "stride"),
    [
        ({"dp": 16, "ep": 16}, 1, 16),  # an expert exists once
        ({"dp": 16, "ep": 4}, 4, 4),  # two copies on each node
        ({"dp": 16, "ep": 8, "zero": 1}, 2, 8),  # one on each node
        ({"dp": 8, "cp": 2, "tp": 2, "ep": 4}, 4, 8),
    ],
)
def test_gradients_of_experts_are_summed_over_their_copies(layout, copies, stride):
    """Beside those of the other weights over all 16 replicas; of one rank with a million of each."""
    layout, weights = ClusterLayout(**layout), WeightCount(10**6, 10**6)
    setup = SETUP._replace(stack=replace(SETUP.stack, hides_replicas=False))
    recipe = setup.recipe
    rings = [("reduce_scatter", recipe.gradients), ("allgather", recipe.weights if layout.zero else recipe.gradients)]
    expected = sum(
        ring_seconds(name, ranks, apart, 10**6 * nbytes, setup)
        for name, nbytes in rings
        for ranks, apart in ((16, layout.tp), (copies, stride))
    )
    found = step_time(PRESETS.models["mixtral-8x7b"], layout, setup, 16, weights)
    assert found.replicas == pytest.approx(expected)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"schedule": "gpipe"},
        {"schedule": "interleaved", "virtual": 2},
        {"recompute": "full"},
        {"schedule": "zb-h1"},
    ],
)
def test_the_bubble_is_that_of_the_simulator(form):
    """The timeline of a step, simulated with the head on the last stage, ends when the predicted step does."""
    model, setup = PRESETS.models["llama-3-8b"], SETUP._replace(device=replace(SETUP.device, memory=1e15))
    layout = ClusterLayout(dp=2, pp=4, zero=1, **form)
    step = predicted_timeline(PlanQuestion("", model, "", setup, 8, 24), judge(model, layout, setup, 24))
    assert max(span.end for span in step.spans) == pytest.approx(step.seconds)
    busy = sum(span.end - span.start for span in step.spans if span.lane == "stage 3")
    assert busy == pytest.approx(step.seconds - step.parts["bubble"])


@pytest.mark.parametrize(("layers", "expected"), [(126, (7, *14 * [8], 7)), (128, ()), (16, ())])
def test_the_stage_with_the_head_has_fewer_layers(layers, expected):
    """126 layers, as Llama 3 405B has for this reason: one fewer on the first and on the last of 16 stages."""
    model, layout = replace(PRESETS.models["llama-3-405b"], layers=layers), ClusterLayout(tp=8, pp=16, sequence=True)
    assert balanced_layers(model, layout, SETUP) == expected


@pytest.mark.parametrize(("layers", "pp"), [(7, 2), (9, 3), (10, 3), (13, 4)])
def test_the_balanced_division_is_the_best_one(layers, pp):
    """No division of the layers, all tried, has a faster slowest stage."""
    model, layout = replace(SMALL, layers=layers), ClusterLayout(pp=pp)

    def slowest(*numbers):
        return max(stage.busy for stage in stage_times(model, replace(layout, layers=numbers), SETUP))

    divisions = [each for each in product(range(1, layers), repeat=pp) if sum(each) == layers]
    found = balanced_layers(model, layout, SETUP) or tuple(map(len, layer_ranges(model, layout)))
    assert slowest(*found) == pytest.approx(min(slowest(*each) for each in divisions))


def test_stages_of_unequal_numbers_of_layers():
    """The stage with most layers counts: 10 layers on 8 stages take as long as 16."""
    few, many = (
        step_time(replace(SMALL, layers=layers), ClusterLayout(pp=8), SETUP, 64, WeightCount(0, 0))
        for layers in (10, 16)
    )
    assert few.compute == pytest.approx(many.compute) and few.bubble < many.bubble


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["chorus plan --cluster", *words])
    status = plan_cluster.main()
    return status, capsys.readouterr().out


def test_the_program(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = ("--cluster", "h100:16", "--model", "llama-3-8b", "--batch", "1M-tokens", "--fix", "micro_batch=1,tp=2")
    status, text = run(monkeypatch, capsys, *words, "--json", str(path), "--tokens", "15T", "--price", "2")
    plan = json.loads(path.read_text())
    assert status == 0 and (plan["sequences"], plan["tokens"], plan["parameters"]) == (128, 1 << 20, 8_030_261_248)
    best = plan["choices"][0]
    assert best["layout"]["tp"] == 2 and best["peak_bytes"] == max(sum(stage.values()) for stage in best["stages"])
    assert best["seconds"] == pytest.approx(sum(best["parts"].values()))
    assert len(plan["choices"]) + len(plan["slower"]) == plan["fitting"]
    assert all(each["slower"] >= 0 for each in plan["slower"])
    assert plan["fitting"] + len(plan["rejected"]) == int(text.split(" layouts of 16 devices")[0].rpartition("\n")[2])
    dp, rounds = best["layout"]["dp"], best["accumulation"]
    assert f"128 sequences = dp {dp} x {rounds} micro-batches x 1 sequences" in text and dp * rounds == 128
    assert "15T tokens (75TB of text)" in text
    status, text = run(monkeypatch, capsys, *words, "--json", "-", "--top", "2")
    assert len(json.loads(text)["choices"]) == 2
    shares = [each["flops"] for each in plan["operators"]]
    assert sum(shares) * 3 * 128 == plan["step_flops"]
    status, text = run(monkeypatch, capsys, *words, "--operators")
    assert "below 295 FLOPs a byte memory limits h100" in text and "scores: weighted values" in text


def test_nothing_fits(monkeypatch, capsys):
    status, text = run(
        monkeypatch, capsys, "--cluster", "v100:1", "--model", "gpt-3", "--batch", "1", "--precision", "fp16"
    )
    assert status == 1 and "of which 0 fit" in text and "rejected: weights, gradients and optimizer exceed" in text


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "llama-3-7b", "--model: expected one of .*; found 'llama-3-7b' (perhaps llama-3-70b)"),
        ("--cluster", "h100", "expected a cluster and a number of devices, as h100:64; found 'h100'"),
        ("--cluster", "h100:0", "expected a cluster and a number of devices, as h100:64; found 'h100:0'"),
        ("--cluster", "h100:9999999", "expected at most 1048576 devices, found 9999999"),
        ("--cluster", "h100:-4", "expected a cluster and a number of devices, as h100:64; found 'h100:-4'"),
        ("--cluster", "h10:4", "--cluster: expected one of "),
        ("--cluster", "h100:1e9", "expected a cluster and a number of devices, as h100:64; found 'h100:1e9'"),
        ("--cluster", "h100:" + "9" * 5000, "expected a cluster and a number of devices, as h100:64; found 'h100:99"),
        ("--cluster", ":8", "expected a cluster and a number of devices, as h100:64; found ':8'"),
        ("--model", "", "--model: expected one of .*; found ''"),
        ("--stack", "", "--stack: expected one of .*; found ''"),
        ("--batch", "4M", "--batch: expected a unit, as 4M-tokens or 4M-sequences; found '4M'"),
        ("--batch", "4M-", "expected a batch such as 512, 512-sequences or 4M-tokens; found '4M-'"),
        ("--batch", "nan", "expected a batch such as 512, 512-sequences or 4M-tokens; found 'nan'"),
        ("--batch", "9" * 5000, "--batch: expected a batch such as 512"),
        ("--top", "0", "--top: expected a whole number from 1 on, found '0'"),
        ("--price", "nan", "--price: expected a number from 0 on, found 'nan'"),
        ("--price", "inf", "--price: expected a number from 0 on, found 'inf'"),
        ("--batch", "4M-token", "expected a batch such as 512, 512-sequences or 4M-tokens; found '4M-token'"),
        ("--batch", "9" * 30, "--batch: expected at most 1073741824 sequences of 1024 tokens, found 999"),
        ("--batch", "0", "expected a batch such as 512, 512-sequences or 4M-tokens; found '0'"),
        ("--precision", "fp4", "--precision: expected one of bf16, "),
        ("--fix", "tp", "tp: expected a whole number of at most 9 digits, found ''"),
        ("--fix", "layers=8+x", "layers: expected even, or layers of every part as 3x8+6, found '8+x'"),
        ("--fix", "layers=12+0", "layers: expected 1 or more in every part, found 12+0"),
        ("--fix", "tpp=2", "expected NAME=VALUE with names out of dp, tp, "),
        ("--fix", "tp=3,recompute=full", "--fix: tp: expected 1, 2, 4, 8 for layouts of 8 devices, found 3"),
        ("--fix", "micro_batch=3", "--fix: micro_batch: expected 1, 2, 4, 8, 16 for layouts of 8 devices, found 3"),
        (
            "--fix",
            "dp=2,cp=1,pp=1,tp=2",
            "expected fields that a layout of 8 devices has together, found dp=2, cp=1, pp=1, tp=2",
        ),
        ("--fix", "tp=8,tp=4", "tp: expected one value, found 'tp=8,tp=4'"),
        ("--fix", "layers=9999999x1", "--fix: layers: expected 12 layers together, found 1048576"),
        ("--fix", "", "expected NAME=VALUE with names out of dp, tp, "),
        ("--fix", "zero=4", "zero: expected a stage from 0 to 3, found 4"),
        ("--fix", "sequence=7", "sequence: expected 0 or 1, found '7'"),
        ("--fix", "compress=int8,zero=1", "compress: expected zero=0, where ranks have whole sums; found zero=1"),
        ("--compress", "int3", "invalid choice: 'int3'"),
        ("--json", "", "expected a file's name, or - for the standard output; found ''"),
        ("--tokens", "-1", "expected a number of tokens such as 15T or 300B; found '-1'"),
        (
            "--presets",
            "none.toml",
            "--presets: expected a TOML file, found 'none.toml', which cannot be read: No such file",
        ),
        ("--json", "/dev/null/a.json", "--json: expected a file that can be written, found '/dev/null/a.json'"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, option, value, message):
    words = {"--cluster": "h100:8", "--model": "gpt2", "--batch": "8"} | {option: value}
    monkeypatch.setattr(sys, "argv", ["chorus"])
    with pytest.raises(SystemExit) as exit_:
        plan_cluster.main([f"{name}={text}" for name, text in words.items()])
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert not printed.out
    before, _, after = message.partition(".*")
    assert before in line and after in line


def test_wrong_pictures(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["chorus"])
    path = str(tmp_path / "a.png")
    for words, message in (
        (["--plot", path, "--plot-step", path], "--plot-step: expected another file than that of --plot, found "),
        (["--plot", "/dev/null/a.png"], "--plot: expected a file that can be written, found '/dev/null/a.png': "),
        (["--plot-nodes", "a.txt"], "--plot-nodes: expected a name that ends in one of "),
        (["--plot-step", ""], "--plot-step: expected a name that ends in one of "),
    ):
        with pytest.raises(SystemExit, match="2"):
            plan_cluster.main(["--cluster", "h100:8", "--model", "gpt2", "--batch", "8", *words])
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_page(monkeypatch, capsys):
    """The example of the page, word for word, and its presets."""
    page = (ROOT / "docs/how-to/plan.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("$ chorus plan --cluster"))
    status, text = run(monkeypatch, capsys, *command.split()[3:])
    assert status == 0 and text.startswith(page.split("```text\n")[1].split("```")[0])
    mine = parse(page.split("```toml\n")[1].split("```")[0], "page")
    assert mine.device_of(mine.clusters["lab"]).peak["bf16"] == 90e12 and mine.models["mine"].parameters > 1e9


def test_the_option_selects_the_program():
    assert find(["plan", "--model", "gpt2", "--cluster=h100:8"])[0] == "plan --cluster"
    assert find(["plan", "--cluster", "h100:8"]) == ("plan --cluster", ["--cluster", "h100:8"])
    assert find(["plan", "--model", "mlp"])[0] == "plan"


def test_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    words = ("--cluster", "h100:4", "--model", "gpt2-xl", "--batch", "16", "--fix", "pp=4,micro_batch=1")
    step = tmp_path / "step.png"
    assert run(monkeypatch, capsys, *words, "--plot", str(path), "--plot-step", str(step))[0] == 0
    assert path.stat().st_size > 10_000 and step.stat().st_size > 10_000
    nodes = tmp_path / "nodes.png"
    words = ("--cluster", "h100:16", "--model", "gpt2-xl", "--batch", "64", "--fix", "micro_batch=4,cp=1,zero=1")
    assert run(monkeypatch, capsys, *words, "--plot-nodes", str(nodes))[0] == 0 and nodes.stat().st_size > 10_000


def test_a_choice_of_one_device():
    found = judge(SMALL, ClusterLayout(recompute="full"), SETUP, 1)
    assert isinstance(found, PlanChoice) and found.time.bubble == found.time.stages == found.time.replicas == 0

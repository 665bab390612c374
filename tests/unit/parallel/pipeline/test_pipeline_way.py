"""A pipeline by its settings, the pieces of a plan, and how the vector is divided among stages."""

import re

import numpy as np
import pytest
from support import tiny_models

from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.depths import MixtureOfDepths
from parallel.nn.dropout import Dropout
from parallel.nn.flat_params import FlatParams
from parallel.nn.linear import Linear
from parallel.nn.transforms.fake_quantized_input import FakeQuantizedInput
from parallel.optim.precision import PRECISIONS
from parallel.pipeline.config import check, check_batch, measure, mesh_of, microbatches, schedule_of, workers
from parallel.pipeline.param_division import cuts_for, divide
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import build, forward_only, truncate
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import simulate
from parallel.trainer.recipes import complete
from quant import INT8


def said(layout="pp:1f1b", **settings):
    return complete({"layout": layout, "batch": 48, **settings})


@pytest.mark.parametrize(
    ("settings", "ranks", "mesh", "each"),
    [
        ({}, 4, "pp=4,dp=1", 8),
        ({"stages": 2}, 4, "pp=2,dp=2", 8),
        ({"stages": 2, "microbatches": 4}, 4, "pp=2,dp=2", 4),
        ({"mesh": "zero1=2,pp=3", "microbatches": 12}, 6, "zero1=2,pp=3", 12),
        ({"micro_batch": 6}, 3, "pp=3,dp=1", 8),
        ({"stage_ranks": "2,1"}, 6, "pp=3,dp=2", 8),
        ({"accumulate": 3, "stages": 1}, 2, "pp=1,dp=2", 3),
        ({"reproducible": True, "stages": 2}, 4, "pp=2,dp=2", 4),
    ],
)
def test_ranks_and_micro_batches(settings, ranks, mesh, each):
    these = said(**settings)
    check(these, ranks)
    check_batch(these, ranks)
    assert str(mesh_of(these, ranks)) == mesh
    assert microbatches(these, ranks) == each
    assert workers(these, ranks) * each * these.micro(workers(these, ranks)) == 48


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"layout": "pp:zb"}, "layout: expected pp: and one of naive"),
        ({"stages": 3}, "stages: 4 ranks do not divide into pipelines of 3"),
        ({"mesh": "dp=2,pp=3"}, "is for 6 ranks, found 4"),
        ({"mesh": "pp=4", "stages": 2}, "stages: 2 are not those of the mesh pp=4"),
        ({"microbatches": 7}, "a batch of 48 samples does not divide into 7 micro-batches"),
        ({"microbatches": 5, "stages": 2}, "does not divide into 2 x 5"),
        ({"micro_batch": 16, "stages": 2}, "3 of a step do not divide among 2 pipelines"),
        ({"cuts": "0,two"}, "cuts: expected numbers as in 0,2,5"),
        ({"layout": "pp:auto", "cuts": "0,1"}, "auto finds them"),
        ({"memory": 1e9}, "memory: a limit is for pp:auto"),
        ({"stage_ranks": "2,1"}, "stages: 4 ranks do not divide into pipelines of 3 stages"),
        ({"stage_ranks": "2,1", "stages": 4}, "ranks: expected numbers from 1 on that add up to 4, found (2, 1)"),
        ({"stage_ranks": "2;2"}, "stage_ranks: expected numbers as in 2,1,1, found '2;2'"),
        ({"layout": "pp:gpipe", "stage_ranks": "auto"}, "stages have replicas in 1f1b, pipedream, pipedream-2bw"),
        ({"stage_ranks": "auto", "cuts": "0,1,2"}, "cuts: stage_ranks auto finds them"),
        (
            {"mesh": "sp=2,pp=2"},
            "mesh: expected axes of pp, dp-naive, dp, zero1, zero2, zero3, cp, tp, ep, etp, found sp in sp=2,pp=2",
        ),
        ({"mesh": "zero2=2,pp=2", "compress": "int8"}, "every rank has the whole sum"),
    ],
)
def test_what_does_not_fit(settings, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check(said(**settings), 4)
        check_batch(said(**settings), 4)


def test_a_file_joins_the_table(tmp_path, monkeypatch):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0BW0\n1F0,1BW0\n")
    monkeypatch.setattr("parallel.pipeline.config.SCHEDULES", table := dict(SCHEDULES))
    assert schedule_of(said(f"pp:{path}")) == str(path) and str(path) in table
    with pytest.raises(OSError, match="nothing"):
        schedule_of(said("pp:nothing.csv"))


def test_another_layout_wants_nothing_of_pipelines():
    before = {"layout": "pp:zb-h1", "mesh": "dp=2,pp=2", "microbatches": 4, "seed": 7}
    assert complete({}, before).mesh == "dp=2,pp=2"
    after = complete({"layout": "dp"}, before)
    assert after == Settings(**{**vars(after), "mesh": None, "microbatches": None, "seed": 7})
    assert complete({"stages": 2}, before).mesh is None


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pieces_of_a_plan_work_out(name, stages):
    plan = build(name, stages, 6)
    whole = lower(plan)
    assert truncate(whole, 6) is whole
    for count in range(6):
        some = truncate(whole, count)
        if plan.placement.routes and count:
            simulate(some)
        assert all(action.microbatch < count for line in some.actions for action in line)
    alone = lower(forward_only(plan, 5))
    seen = [action for line in alone.actions for action in line if action.kind == "F"]
    assert len(seen) == len(set(seen)) == 5 * plan.placement.parts
    with pytest.raises(ValueError, match="is planned for up to 6, found 7"):
        truncate(whole, 7)


def test_forwards_of_all_stages_have_one_order():
    """Whoever goes through all stages' lines by micro-batches in groups meets every F after the one that it needs."""
    plan = forward_only(build("interleaved", 3, 6, virtual=2), 7)
    done, lines = set(), [list(line) for line in plan.actions]
    while any(lines):
        before = len(done)
        for line in lines:
            while line:
                action = line[0]
                route = plan.placement.route(action.microbatch)
                part = plan.placement.part[action.stage, action.chunk]
                if part and (route[part - 1], action.microbatch) not in done:
                    break
                done.add(((action.stage, action.chunk), action.microbatch))
                line.pop(0)
        assert len(done) > before


def test_groups_of_a_tied_model():
    model = tiny_models.model(depth=2)
    flat = FlatParams(model)
    groups = divide(flat, model.items, (0, 2, 4), reproducible=True)
    assert [group.parts for group in groups] == [(0, 1), (0,), (1,)]
    assert [tensor for group in groups for tensor in group.tensors] == list(flat.places)
    tied = groups[0]
    assert tied.tensors[0].parameter.uses == 1  # of two: one in each part
    assert [tied.leaf(number, part) for number in range(3) for part in (1, 0)] == list(range(6))
    plan = build("zb-v", 1, 3)
    assert tied.leaves(plan.placement, 0, (4, 5, 6)) == (8, 9, 10, 11, 12, 13)
    plan = build("dualpipe", 2, 4)
    assert tied.leaves(plan.placement, 0, (0, 1)) == (1, 2) and tied.leaves(plan.placement, 1, (0, 1)) == (0, 3)


def test_terms_of_the_parts_of_a_sequence():
    """Each part of a rank's sequence has leaves as a micro-batch of its own; only where two stages have a tensor."""
    model = tiny_models.model(depth=2)
    groups = divide(FlatParams(model), model.items, (0, 2, 4), reproducible=True, terms=2)
    assert [group.terms for group in groups] == [2, 1, 1]
    tied, number = groups[0], 3
    assert [tied.leaf(number, part, term) for term in (0, 1) for part in (1, 0)] == [12, 13, 14, 15]
    assert tied.leaves(build("zb-v", 1, 2).placement, 0, (3,)) == (12, 13, 14, 15)
    assert [
        group.terms for group in divide(FlatParams(model), model.items, (0, 2, 4), reproducible=False, terms=2)
    ] == [*(1, 1, 1)]


def test_a_tensor_with_three_uses_in_two_parts():
    first = tiny_models.Dense(7, 7)
    model = Sequential([first, tiny_models.Dense(7, 7, first.weight), tiny_models.Dense(7, 7, first.weight)])
    flat = FlatParams(model)
    with pytest.raises(ValueError, match=r"0.weight is used 3 times, in parts \[0, 1\]"):
        divide(flat, model.items, (0, 1, 3), reproducible=True)
    assert divide(flat, model.items, (0, 1, 3), reproducible=False)[0].parts == (0, 1)
    assert divide(flat, model.items, (0, 3), reproducible=True)[0].tensors[0].parameter.uses == 3


@pytest.mark.parametrize("units", range(1, 9))
def test_even_cuts(units):
    for parts in range(1, units + 1):
        sizes = np.diff(cuts_for(None, units, parts))
        assert sizes.sum() == units and sizes.max() - sizes.min() <= 1
    with pytest.raises(ValueError, match="cannot be cut"):
        cuts_for(None, units, units + 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_units_are_measured_and_forgotten(precision):
    model, recipe = tiny_models.model(width=16, depth=2), PRECISIONS[precision]
    flat = FlatParams(model)
    x, y = np.zeros((5, 7), recipe.storage), np.zeros((5, 7), recipe.wide)
    layers = measure(model.items, tiny_models.Squares(), x, y, recipe, states=2)
    assert len(layers) == 4 and all(min(layer) >= 0 and layer.seconds > 0 for layer in layers)
    assert layers[0].parameters == (7 * 16 + 16) * sum(recipe.bytes_per_parameter(2).values())
    assert all(place.parameter._data is None for place in flat.places)


def test_units_are_measured_in_training():
    """With masks of dropout and the choice of tokens; ranges of inputs do not move."""
    rounded = FakeQuantizedInput(Linear(7, 7), INT8)
    model = Sequential([rounded, Dropout(0.5), MixtureOfDepths(Linear(7, 7), 7, 0.5)])
    FlatParams(model)
    x = np.ones((5, 4, 7), np.float32)
    layers = measure(model.items, tiny_models.Squares(), x, x, PRECISIONS["fp32"], states=2)
    assert rounded.range.state() == [] and layers[1].activations >= x.size

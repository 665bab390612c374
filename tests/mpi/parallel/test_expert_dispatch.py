"""Trainings whose tokens take other routes to their experts, on emulated nodes: near the direct one; refusals."""

import numpy as np
import pytest

from collectives import Communicator
from parallel import AdamW, Engine, nn
from parallel.nn.models import build

LENGTH, TOKENS, STEPS = 16, 64, 3


def reports(comm, **options):
    """Reports of the steps of a training."""
    model = build("gpt-moe:tiny", (LENGTH,), TOKENS, experts="8,k=4,shared")
    options = {"batch": 8, **options}
    with Engine(model, nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.001), **options) as engine:
        tokens = np.random.default_rng(0).integers(0, TOKENS, (STEPS, options["batch"], LENGTH + 1))
        return [engine.step(one[:, :-1], one[:, 1:]) for one in tokens]


@pytest.fixture
def nodes(world):
    """Communicator of emulated nodes of two ranks."""
    with Communicator(world, nodes=[rank // 2 for rank in range(world.Get_size())]) as comm:
        yield comm


@pytest.mark.parametrize("dispatch, error", [("hierarchical", 1e-5), ("direct:int8", 1e-2), ("hierarchical:fp8", 3e-2)])
def test_losses(nodes, dispatch, error):
    ranks = nodes.Get_size()
    if ranks == 1:
        pytest.skip("one rank has all experts")
    mesh = f"dp={ranks},ep={ranks}"
    direct, found = (reports(nodes, mesh=mesh, dispatch=how) for how in ("direct", dispatch))
    for one, other in zip(direct, found):
        assert other.loss == pytest.approx(one.loss, rel=error) and other.norm == pytest.approx(
            one.norm, rel=10 * error
        )
    copies = [one.traffic["1.1.inner.1.experts between nodes"] for one in (direct[0], found[0])]
    if ranks > 2:
        assert 0 < copies[1] < copies[0] if "hier" in dispatch else 0 < copies[1] == copies[0]
    else:
        assert copies == [0, 0]


@pytest.mark.parametrize(
    "dispatch, layout",
    [("direct", "dp"), ("hierarchical:int8", "zero1"), ("direct", "pp:dualpipe"), ("direct:fp8", "pp:dualpipe-v")],
)
def test_two_micro_batches_in_flight(nodes, dispatch, layout):
    """Three micro-batches on each rank, the last without samples on some: bits of one after the other.

    Pipelines have two stages if four ranks or more are even, else one, and no micro-batch without samples.
    """
    ranks = nodes.Get_size()
    if ranks == 1:
        pytest.skip("one rank has all experts")
    in_stages = layout.startswith("pp")
    stages = 2 if in_stages and ranks % 2 == 0 and ranks > 2 else 1
    mesh = f"dp={ranks // stages},ep={ranks // stages}" + f",pp={stages}" * in_stages
    options = {"mesh": mesh, "dispatch": dispatch, "layout": layout, "batch": 3 * ranks - (not in_stages)}
    one_by_one, found = (
        [
            (one.loss, one.norm, {name: value for name, value in one.traffic.items() if "seconds" not in name})
            for one in reports(nodes, **options, micro_batch=1, overlap_expert_comm=overlap)
        ]
        for overlap in (False, True)
    )
    assert found == one_by_one


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dispatch": "fast"}, "dispatch: expected direct or hierarchical, perhaps with :int8 or :fp8; found"),
        ({"dispatch": "hierarchical"}, "dispatch: hierarchical is for replicas that share experts, by ep; found dp="),
        ({"dispatch": "direct:int8", "reproducible": True, "ep": True}, "reproducible training needs direct"),
        ({"dispatch": "hierarchical", "layout": "ps"}, "dispatch"),
    ],
)
def test_refusals(comm, options, message):
    ranks = comm.Get_size()
    if ranks == 1:
        pytest.skip("one rank has all experts")
    if options.get("layout") != "ps":
        options = {"mesh": f"dp={ranks}" + f",ep={ranks}" * options.get("ep", False), **options}
    with pytest.raises(ValueError, match=message):
        reports(comm, **{name: value for name, value in options.items() if name != "ep"})

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
    with Engine(model, nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.001), batch=8, **options) as engine:
        tokens = np.random.default_rng(0).integers(0, TOKENS, (STEPS, 8, LENGTH + 1))
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

"""Routes of tokens on device arrays, by the code that runs on the host: on the stand-in for CuPy, ranks are threads."""

import sys

import numpy as np
import pytest
from support import thread_ranks

from parallel.nn.expert_group import Assignments
from parallel.sharding.expert.dispatch import Dispatch

TOKENS = (0, 5, 9, 20)
NODES = (0, 0, 1, 1)


def passed(axis, dispatch, width, xp):
    """Weighted sums of tokens whose experts return them, and both gradients."""
    axis.comm.nodes = NODES
    rng, shape = np.random.default_rng(axis.rank), (TOKENS[axis.rank], 2 * len(TOKENS))
    weights = np.where(rng.random(shape) < 0.4, rng.random(shape), 0).astype(np.float32)
    x = xp.asarray(rng.standard_normal((len(weights), width), dtype=np.float32))
    route = Dispatch.parse(dispatch).plan(axis, [2] * axis.size, Assignments.from_weights(xp.asarray(weights)))
    y, dx = xp.zeros_like(x), xp.zeros_like(x)
    route.send(x)
    results = route.combine(route.receive(), y)
    route.send_gradients(x + 1, results, x.dtype)
    found = y, dx, route.combine_gradients(route.receive(), dx)
    return found if xp is np else [array.get() for array in found]


@pytest.mark.parametrize("width", [5, 128, 260])
@pytest.mark.parametrize("code", ["", ":int8", ":fp8"])
@pytest.mark.parametrize("route", ["direct", "hierarchical"])
def test_like_the_host(gpu, route, code, width):
    on_host, on_device = (
        thread_ranks.run(len(TOKENS), lambda axis, xp=xp: passed(axis, route + code, width, xp), "ep")
        for xp in (np, sys.modules["cupy"])
    )
    for ours, theirs in zip(on_device, on_host):
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)

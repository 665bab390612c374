"""Experts on several ranks against all on one: results, gradients, bits, counted bytes; ranks are threads."""

import ml_dtypes
import numpy as np
import pytest
from support import thread_ranks
from support.mixture_cases import EXPERTS, WIDTH, mixture

from parallel.expert.expert_ranks import ExpertRanks
from parallel.nn.operator import PassMode, name_all
from parallel.nn.router import RouterSettings

CASES = {
    "two experts": RouterSettings(),
    "one expert": RouterSettings(choices=1),
    "all experts": RouterSettings(choices=EXPERTS),
    "capacity": RouterSettings(choices=4, capacity=0.5),
}
RANKS = (1, 2, 3, 4, 8, 10)


def tokens(rank, dtype=np.float64):
    """Another number of sequences on every rank, on rank 1 none."""
    return np.random.default_rng(rank).standard_normal(((rank + 2) % 3, 7, WIDTH)).astype(dtype)


def divided(axis, settings, by_source):
    operator = mixture(settings)
    operator.experts = ExpertRanks(axis, operator.experts.experts, by_source)
    return operator


def played(operator, x, dtype, rank):
    for parameter in name_all(operator):
        parameter.data = parameter.first(3).astype(dtype)
    y, saved = operator.forward(x, PassMode(samples=np.arange(len(x))))
    dy = np.random.default_rng(9 + rank).standard_normal(y.shape).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    gradients = {parameter.name: np.zeros(parameter.shape, wide) for parameter in operator.parameters()}

    def sink(parameter, compute):
        part = np.empty(parameter.shape, wide)
        compute(part)
        gradients[parameter.name] += part

    return y, operator.backward(dy, saved, sink), gradients


@pytest.mark.parametrize("by_source", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_rank(name, ranks, by_source):
    found = thread_ranks.run(
        ranks,
        lambda axis: played(divided(axis, CASES[name], by_source), tokens(axis.rank), np.float64, axis.rank),
        "ep",
    )
    alone = [played(mixture(CASES[name]), tokens(rank), np.float64, rank) for rank in range(ranks)]
    gradients = {}
    for (y, dx, mine), (other_y, other_dx, _) in zip(found, alone):
        np.testing.assert_allclose(y, other_y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(dx, other_dx, rtol=0, atol=1e-12)
        for key in mine:
            gradients[key] = gradients.get(key, 0) + mine[key]
    assert gradients.keys() == alone[0][2].keys()
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient, sum(one[2][key] for one in alone), rtol=0, atol=1e-11, err_msg=key)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bits_by_source(ranks, dtype):
    """Results and input gradients of every rank are, bit for bit, those of all experts on one."""
    settings = RouterSettings(capacity=1.0)
    found = thread_ranks.run(
        ranks, lambda axis: played(divided(axis, settings, True), tokens(axis.rank, dtype), dtype, axis.rank), "ep"
    )
    for rank, (y, dx, _) in enumerate(found):
        other_y, other_dx, _ = played(mixture(settings), tokens(rank, dtype), dtype, rank)
        assert y.tobytes() == other_y.tobytes() and dx.tobytes() == other_dx.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bytes_are_those_of_the_formula(ranks, dtype):
    """Balanced by choosing all experts: 4 k T h (e-1)/e elements there and back, forward and backward."""
    settings = RouterSettings(choices=EXPERTS)

    def sent(axis):
        played(divided(axis, settings, False), np.ones((2, 5, WIDTH), dtype), dtype, axis.rank)
        return [nbytes for kind, nbytes in axis.comm.calls if kind == "alltoallv"]

    each = EXPERTS * 10 * WIDTH * np.dtype(dtype).itemsize * (ranks - 1) // ranks
    assert thread_ranks.run(ranks, sent, "ep") == [[each] * 4 * (ranks > 1)] * ranks


def test_all_tokens_to_one_expert():
    """The rank of the last expert gets all rows; experts without rows have gradients of 0."""

    def one(axis):
        operator = divided(axis, RouterSettings(choices=1, normalize=False), False)
        for parameter in name_all(operator):
            parameter.data = parameter.first(0)
        operator.router.weight.data = np.zeros((WIDTH, EXPERTS))
        operator.router.weight.data[:, -1] = 1
        y, saved = operator.forward(np.ones((2, 3, WIDTH)), PassMode(samples=np.arange(2)))
        gradients = {}
        operator.backward(
            np.ones_like(y), saved, lambda parameter, compute: gradients.update({parameter.name: compute})
        )
        out = {}
        for parameter in operator.experts.parameters():
            out[parameter.name] = np.empty(parameter.shape)
            gradients[parameter.name](out[parameter.name])
        return {name: bool(gradient.any()) for name, gradient in out.items()}

    for found in thread_ranks.run(3, one, "ep"):
        for name, nonzero in found.items():
            assert nonzero == name.startswith("experts.7."), name

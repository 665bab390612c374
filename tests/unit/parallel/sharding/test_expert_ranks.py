"""Experts on several ranks against all on one: results, gradients, bits, counted bytes; ranks are threads."""

from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support import thread_ranks
from support.expert_cases import CASES, divided, expect_as_alone, played, tokens
from support.mixture_cases import EXPERTS, WIDTH, mixture

from parallel.nn.operator import PassMode, name_all
from parallel.nn.router import RouterSettings
from parallel.sharding.expert.dispatch import Dispatch
from parallel.sharding.expert.row_codec import SPECS, predicted_error

RANKS = (1, 2, 3, 4, 8, 10)


@pytest.mark.parametrize("by_source", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_rank(name, ranks, by_source):
    found = thread_ranks.run(
        ranks,
        lambda axis: played(divided(axis, CASES[name], by_source), tokens(axis.rank), np.float64, axis.rank),
        "ep",
    )
    expect_as_alone(found, CASES[name])


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


NODES = [None, (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2), (0, 0, 1, 1, 2)]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", CASES)
def test_hierarchical_as_on_one_rank(name, nodes):
    """Tokens over relays, with a shared expert, on nodes of equal and unequal numbers of ranks."""

    def one(axis):
        operator = divided(axis, CASES[name], False, "hierarchical", nodes, shared=True)
        return played(operator, tokens(axis.rank), np.float64, axis.rank)

    ranks = len(nodes or (0, 0, 0))
    expect_as_alone(thread_ranks.run(ranks, one, "ep"), CASES[name], shared=True)


def sent_by(nodes, settings, dispatch, dtype=np.float32):
    """Per rank: calls of one pass forward and backward; every token is given to the same experts on all ranks."""

    def sent(axis):
        played(divided(axis, settings, False, dispatch, nodes), np.ones((2, 5, WIDTH), dtype), dtype, axis.rank)
        return [nbytes for kind, nbytes in axis.comm.calls if kind == "alltoallv"]

    return thread_ranks.run(len(nodes), sent, "ep")


def test_bytes_of_the_hierarchical_route():
    """All experts chosen: a copy of a token for each other node, then one for each expert of the other ranks there.

    Forward also 4 bytes of position and 4 of weight for each expert there; backward 4 bytes of the weight's gradient.
    """
    nodes, row, tokens, other = (0, 0, 1, 1), 4 * WIDTH, 10, EXPERTS // 2
    network = tokens * (row + 8 * other), tokens * row, tokens * row, tokens * (row + 4 * other)
    within = 2 * tokens * (EXPERTS // 4) * row  # rows that the relay has of both nodes
    forward, results, gradients, backward = network
    expected = [forward, within, within, results, gradients, within, within, backward]
    assert sent_by(nodes, RouterSettings(choices=EXPERTS), "hierarchical") == [expected] * 4


@pytest.mark.parametrize("dispatch, between, within", [("direct", 40, 20), ("hierarchical", 10, 40)])
def test_traffic(dispatch, between, within):
    """Ten tokens of each of four ranks on two nodes, each to all experts, of which the neighbour has two.

    Within its node a rank sends its own tokens; hierarchical: also those that it relays.
    """

    def one(axis):
        operator = divided(axis, RouterSettings(choices=EXPERTS), False, dispatch, (0, 0, 1, 1))
        for parameter in name_all(operator):
            parameter.data = parameter.first(0)
        x, run = np.ones((2, 5, WIDTH)), PassMode(samples=np.arange(2))
        y, saved = operator.forward(x, run)
        forward = run.seconds["experts"]
        operator.backward(y, saved, lambda parameter, compute: None)
        assert 0 < forward < run.seconds["experts"]
        return run.traffic["experts", "copies"], run.traffic["experts", "between nodes"]

    assert thread_ranks.run(4, one, "ep") == [(between + within, between)] * 4


@pytest.mark.parametrize("code", SPECS)
def test_bytes_of_encoded_rows(code):
    """A byte an element, up to a multiple of four, and a scale of 4 bytes for every 128 elements of a row."""
    each = 10 * EXPERTS // 2 * (4 * -(-WIDTH // 4) + 4 * -(-WIDTH // 128))
    assert sent_by((0, 0), RouterSettings(choices=EXPERTS), f"direct:{code}") == [[each] * 4] * 2


@pytest.mark.parametrize("nodes, dispatch", [((0, 0), "direct"), ((0, 1, 0, 1), "hierarchical")])
@pytest.mark.parametrize("code", SPECS)
def test_error_of_encoded_rows(nodes, dispatch, code):
    """Results differ from exact ones by about the predicted error: that of tokens, and that of results."""
    settings = RouterSettings()
    x = [np.random.default_rng(rank).standard_normal((4, 60, WIDTH)) for rank in range(len(nodes))]

    def one(axis, how):
        return played(divided(axis, settings, False, how, nodes), x[axis.rank], np.float64, axis.rank)[:2]

    exact, coded = (
        np.concatenate([np.stack(one) for one in thread_ranks.run(len(nodes), partial(one, how=how), "ep")], axis=1)
        for how in (dispatch, f"{dispatch}:{code}")
    )
    for found, expected in zip(coded, exact):
        error = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()) / predicted_error(code)
        assert 0.4 < error < 2.5


def test_exact_bits_need_the_direct_route():
    for dispatch in ("hierarchical", "direct:int8"):
        with pytest.raises(ValueError, match="dispatch: expected direct, for the bits of one rank"):
            thread_ranks.run(1, lambda axis: divided(axis, RouterSettings(), True, dispatch))  # noqa: B023


@pytest.mark.parametrize("text", ["", "fast", "direct:", "direct:int4", "int8", "hierarchical:int8:fp8"])
def test_unknown_dispatch(text):
    with pytest.raises(ValueError, match=r"dispatch: expected direct or hierarchical, perhaps with :int8 or :fp8; "):
        Dispatch.parse(text)


def test_shared_expert_while_tokens_travel():
    """Both passes of the shared expert lie between the start and the end of an exchange."""

    def one(axis):
        order, operator = [], divided(axis, RouterSettings(), False, shared=True)
        operator.shared.forward = noting(order, "shared", operator.shared.forward)
        operator.shared.backward = noting(order, "shared", operator.shared.backward)
        started = axis.comm.Ialltoallv

        def start(send, recv):
            request = started(send, recv)
            order.append("start")
            return SimpleNamespace(Wait=noting(order, "end", request.Wait))

        axis.comm.Ialltoallv = start
        played(operator, tokens(0), np.float64, axis.rank)
        return order

    assert thread_ranks.run(2, one, "ep") == [["start", "shared", "end", "start", "end"] * 2] * 2


def test_rows_that_stay_are_not_in_the_message():
    """A rank chooses all experts: seven of eight rows in a message of eight ranks, and none for itself."""

    def one(axis):
        messages, started = [], axis.comm.Ialltoallv

        def start(send, recv):
            messages.append((send[0].size, send[1][axis.rank], recv[0].size, recv[1][axis.rank]))
            return started(send, recv)

        axis.comm.Ialltoallv = start
        played(divided(axis, RouterSettings(choices=EXPERTS), False), np.ones((2, 5, WIDTH)), np.float64, axis.rank)
        return messages

    each = 8 * 10 * WIDTH * (EXPERTS - 1)
    assert thread_ranks.run(EXPERTS, one, "ep") == [[(each, 0, each, 0)] * 4] * EXPERTS


def noting(order, name, function):
    def call(*arguments):
        order.append(name)
        return function(*arguments)

    return call


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

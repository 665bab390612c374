"""Operators between placements: values, mirrored gradients, bytes, placements and outlines."""

import numpy as np
import pytest
from support.thread_ranks import run

from parallel.nn.operator import ArraySpec, Parameter, PassMode, constant
from parallel.nn.placement import Partial, PlacementError, Replicate, Shard
from parallel.sharding.tensor.exchange import allreduce_among, tree_sum
from parallel.sharding.tensor.redistribute import CopyToShards, GatherSequence, ScatterSequence, SumShards

BATCH, LENGTH, WIDTH = 2, 12, 5
RANKS = [1, 2, 3, 4]
LIKE = Parameter((1,), constant(0.0))


def arrays(count, length=LENGTH):
    """One array for each rank, of integers, so that sums are exact."""
    return np.random.default_rng(0).integers(-9, 9, (count, BATCH, length, WIDTH)).astype("f4")


def sliced(x, axis):
    each = LENGTH // axis.size
    return np.ascontiguousarray(x[:, axis.rank * each : (axis.rank + 1) * each])


EXPECTED = {
    CopyToShards: (lambda v, axis: v[0], lambda v, axis: v[0], lambda v, axis: v[axis.rank], lambda v, axis: v.sum(0)),
    SumShards: (lambda v, axis: v[axis.rank], lambda v, axis: v.sum(0), lambda v, axis: v[0], lambda v, axis: v[0]),
    GatherSequence: (
        lambda v, axis: sliced(v[0], axis),
        lambda v, axis: v[0],
        lambda v, axis: v[axis.rank],
        lambda v, axis: sliced(v.sum(0), axis),
    ),
    ScatterSequence: (
        lambda v, axis: v[axis.rank],
        lambda v, axis: sliced(v.sum(0), axis),
        lambda v, axis: sliced(v[0], axis),
        lambda v, axis: v[0],
    ),
}
"""By operator: x, y, dy and dx of a rank, from one array for each rank."""

CALLS = {
    CopyToShards: ["allreduce"],
    SumShards: ["allreduce"],
    GatherSequence: ["allgather", "reduce_scatter"],
    ScatterSequence: ["reduce_scatter", "allgather"],
}


@pytest.mark.parametrize(
    ("ranks", "holders"),
    [
        (1, [range(1)]),
        (2, [range(2), range(1)]),
        (3, [range(2), range(1, 3)]),
        (4, [range(4), range(1), range(1, 3)]),
        (6, [range(3, 6)]),
    ],
)
@pytest.mark.parametrize("length", [0, 1, 10])
def test_sums_among_some_ranks(ranks, holders, length):
    """Each of r holders sends 2(r-1)/r of the array, and adds by the tree over all ranks."""
    terms = np.random.default_rng(0).normal(size=(len(holders), ranks, length)).astype("f4")

    def rank_main(axis):
        here = [at for at, some in enumerate(holders) if axis.rank in some]
        mine = [terms[at, axis.rank] for at in here]
        found = allreduce_among(axis, mine, [holders[at] for at in here])
        for at, total in zip(here, found):
            of_all = [terms[at, rank] if rank in holders[at] else None for rank in range(ranks)]
            assert total.tobytes() == tree_sum(of_all).tobytes()
        sent = sum(nbytes for _, nbytes in axis.comm.calls)
        expected = sum(2 * 4 * length * (len(holders[at]) - 1) / len(holders[at]) for at in here)
        assert abs(sent - expected) <= 8 * ranks * len(here)

    run(ranks, rank_main)


def test_the_tree_leaves_out_what_is_missing():
    a, b, c = (np.float32(x)[None] for x in (1e8, 1.0, -1e8))
    assert tree_sum([None, a, b, c])[0] == np.float32(1e8) + (np.float32(1.0) - np.float32(1e8))
    assert tree_sum([a, b, None, c, None])[0] == (np.float32(1e8) + np.float32(1.0)) - np.float32(1e8)


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", ["auto", "tree"])
def test_values_and_gradients(kind, ranks, algorithm):
    values = arrays(ranks)

    def rank_main(axis):
        operator, (x, y, dy, dx) = kind(axis, LIKE, algorithm), (of(values, axis) for of in EXPECTED[kind])
        found, saved = operator.forward(x, PassMode())
        np.testing.assert_array_equal(found, y)
        assert tuple(operator.outline(ArraySpec(x.shape, x.dtype)).y) == (found.shape, found.dtype)
        np.testing.assert_array_equal(operator.backward(dy, saved, None), dx)
        return axis.comm.calls

    nbytes = {"allreduce": values[0].nbytes, "allgather": values[0].nbytes // ranks, "reduce_scatter": values[0].nbytes}
    expected = [(name, nbytes[name]) for name in CALLS[kind]] if ranks > 1 else []
    assert run(ranks, rank_main) == [expected] * ranks


@pytest.mark.parametrize("kind", EXPECTED)
def test_placements(kind):
    def rank_main(axis):
        operator = kind(axis, LIKE)
        assert operator.place("tp", operator.takes, set()) == operator.gives
        assert operator.place("dp", Shard(0), set()) == Shard(0)
        others = [one for one in (Replicate(), Replicate(partial=True), Partial(), Shard(1)) if one != operator.takes]
        for other in others:
            with pytest.raises(PlacementError, match=f"{kind.__name__} .* along tp"):
                operator.place("tp", other, set())
        with pytest.raises(PlacementError, match="along dp, found a partial sum"):
            operator.place("dp", Partial(), set())

    run(2, rank_main)


def test_a_sequence_that_ranks_do_not_divide():
    def rank_main(axis):
        ScatterSequence(axis, LIKE).forward(arrays(1, length=7)[0], PassMode())

    with pytest.raises(ValueError, match="sequence_parallel: expected a multiple of 2 tokens, in tp=2"):
        run(2, rank_main)

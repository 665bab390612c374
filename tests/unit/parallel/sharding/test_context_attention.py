"""Attention over a divided sequence: exact numbers, counted bytes, the same bits, refusals; ranks are threads."""

import ml_dtypes
import numpy as np
import pytest
from support import thread_ranks
from support.context_cases import ALGORITHMS, BATCH, CASES, WIDTH, ContextCase, check, played, reference

from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.operator import PassMode
from parallel.sharding.context.cost_formulas import AttentionWork, sent_bytes
from parallel.sharding.context.sequence_division import DIVISIONS, SequenceDivision

RANKS = (1, 2, 3, 4)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whole_sequence(algorithm, case, ranks):
    kinds = [*((name, np.float64) for name in DIVISIONS), ("zigzag", np.float32)]
    for name, dtype in kinds:
        thread_ranks.run(ranks, lambda axis, n=name, t=dtype: check(axis, algorithm, n, CASES[case], t), "cp")


def test_sequences_beyond_the_rotated_positions():
    """Refused on all ranks, before any exchange."""

    def make(axis):
        with pytest.raises(ValueError, match="expected at most 60 positions, found 61"):
            ALGORITHMS["ring"](axis, SequenceDivision("zigzag", 61, axis.size), 2, rotary=CASES["rotary"].rotary)

    thread_ranks.run(3, make, "cp")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", ["causal", "one kv head", "grouped"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_are_those_of_the_formulas(algorithm, case, dtype):
    """Counted at the communicator, forward and backward apart."""
    case, dtype = CASES[case], np.dtype(dtype)
    whole = reference(case)
    x, dy = whole.x.astype(dtype), whole.dy.astype(dtype)
    for ranks in RANKS:

        def sent(axis):
            played(axis, algorithm, "zigzag", case, x, dy)
            factor = {"allgather": axis.size - 1}
            calls = [(kind, nbytes * factor.get(kind, 1)) for kind, nbytes in axis.comm.calls]
            split = FORWARD[algorithm](axis.size)
            return sum(n for _, n in calls[:split]), sum(n for _, n in calls[split:])

        division = SequenceDivision("zigzag", case.length, ranks)
        work = AttentionWork(division, BATCH, case.heads, case.kv_heads, WIDTH, case.mask, dtype.itemsize)
        assert set(thread_ranks.run(ranks, sent, "cp")) == {sent_bytes(algorithm, work)}
        b, s, h, c, e = BATCH, case.length, case.heads * WIDTH, ranks, dtype.itemsize
        if algorithm == "ulysses" and case.kv_heads == case.heads:
            assert sum(sent_bytes(algorithm, work)) == 8 * (c - 1) * b * s * h * e // c**2
        elif algorithm != "ulysses":
            assert sent_bytes(algorithm, work)[0] == 2 * (c - 1) * b * s * case.kv_heads * WIDTH * e // c


FORWARD = {
    "ring": lambda ranks: ranks - 1,
    "allgather": lambda ranks: int(ranks > 1),
    "ulysses": lambda ranks: 3 * int(ranks > 1),
}
"""Exchanges of a forward pass."""


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize("algorithm", ["allgather", "ulysses"])
def test_same_bits_for_any_number_of_ranks(algorithm, name, dtype):
    """Eight parts, on 1, 2, 4 and 8 ranks: results and all gradients, bit for bit."""
    case = ContextCase(heads=8, kv_heads=8, length=160)
    whole, found = reference(case), []
    x, dy = whole.x.astype(dtype), whole.dy.astype(dtype)
    for ranks in (1, 2, 4, 8):
        parts = thread_ranks.run(ranks, lambda axis: played(axis, algorithm, name, case, x, dy, parts=8), "cp")
        y, dx = np.zeros_like(dy), np.zeros_like(x)
        for rank, (operator, own_y, _, own_dx) in enumerate(parts):
            positions = operator.division.positions(rank)
            y[:, positions], dx[:, positions] = own_y, own_dx
        found.append((y.tobytes(), dx.tobytes()))
    assert len(set(found)) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_out_of_range_are_not_read(algorithm):
    """NaN in keys and values from some position on reaches no query before, nor the gradients of such queries."""
    case, bad = ContextCase(heads=12, kv_heads=12, length=48), 36
    whole = reference(case)
    x = whole.x.reshape(BATCH, case.length, -1, WIDTH).copy()
    x[:, bad:, case.heads :] = np.nan
    x = x.reshape(BATCH, case.length, -1)
    for ranks in (1, 2, 3):
        for name in ("contiguous", "zigzag"):
            for rank, (operator, y, _, dx) in enumerate(
                thread_ranks.run(ranks, lambda axis, n=name: played(axis, algorithm, n, case, x, whole.dy, 12), "cp")
            ):
                positions = operator.division.positions(rank)
                early, queries = positions < bad, slice(0, case.heads * WIDTH)
                np.testing.assert_allclose(y[:, early], whole.y[:, positions[early]], rtol=0, atol=1e-12)
                expected = whole.dx[:, positions[early], queries]
                np.testing.assert_allclose(dx[:, early, queries], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "heads, kv_heads, ranks, message",
    [
        (6, 6, 4, r"ulysses: expected a number of ranks that divides the 6 heads \(1, 2, 3, 6\), found 4"),
        (6, 3, 2, "ulysses: expected 3 kv heads that are divided by the ranks, or divide them; found 2 ranks"),
    ],
)
def test_heads_that_the_ranks_do_not_divide(heads, kv_heads, ranks, message):
    """Refused by ulysses with the reason; the others take any."""
    case = ContextCase(heads, kv_heads)
    with pytest.raises(ValueError, match=message):
        thread_ranks.run(ranks, lambda axis: check(axis, "ulysses", "zigzag", case, np.float64), "cp")
    for algorithm in ("ring", "allgather"):
        thread_ranks.run(ranks, lambda axis, a=algorithm: check(axis, a, "zigzag", case, np.float64), "cp")


def test_other_lengths_are_refused():
    axis = thread_ranks.ThreadAxis("cp", 0, 1, None)
    operator = ALGORITHMS["ring"](axis, SequenceDivision("zigzag", 8, 1), 2)
    with pytest.raises(ValueError, match="expected 8 of 8 positions on rank 0 of 1, found shape"):
        operator.forward(np.zeros((1, 7, 6)), PassMode())
    with pytest.raises(ValueError, match="expected one over 1 ranks"):
        ALGORITHMS["ring"](axis, SequenceDivision("zigzag", 8, 2), 2)
    with pytest.raises(ValueError, match="expected heads that the kv heads divide, found 4 and 3"):
        BlockwiseAttention(4, 3)

"""Attention over a divided sequence against float64 on the whole sequence: for ranks as threads, and under MPI."""

from functools import cache
from typing import NamedTuple

import numpy as np

from parallel.nn.attention_mask import CAUSAL, FULL, AttentionMask
from parallel.nn.operator import ArraySpec, PassMode, nbytes_of
from parallel.nn.rotary import Rotary
from parallel.sharding.context.allgather_attention import AllgatherAttention
from parallel.sharding.context.ring_attention import RingAttention
from parallel.sharding.context.sequence_division import SequenceDivision
from parallel.sharding.context.ulysses_attention import UlyssesAttention
from support.operator_cases import seen_keys

ALGORITHMS = {"ring": RingAttention, "allgather": AllgatherAttention, "ulysses": UlyssesAttention}
BATCH, LENGTH, WIDTH = 2, 48, 3
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


class ContextCase(NamedTuple):
    """Attention of some kind over sequences of some length."""

    heads: int = 12
    kv_heads: int = 12
    mask: AttentionMask = CAUSAL
    length: int = LENGTH
    width: int = WIDTH
    rotary: Rotary | None = None


CASES = {
    "causal": ContextCase(),
    "full": ContextCase(mask=FULL),
    "window": ContextCase(mask=AttentionMask(window=5)),
    "window on both sides": ContextCase(mask=AttentionMask(causal=False, window=20)),
    "documents": ContextCase(mask=AttentionMask(documents=(1, 7, 30))),
    "one kv head": ContextCase(kv_heads=1),
    "grouped": ContextCase(heads=24, kv_heads=12),
    "uneven": ContextCase(length=53),
    "fewer tokens than ranks": ContextCase(length=2),
    "several tiles": ContextCase(heads=12, kv_heads=12, length=330),
    "rotary": ContextCase(heads=24, kv_heads=12, length=53, width=4, rotary=Rotary(60, 30.0)),
}


class WholeAttention(NamedTuple):
    """Inputs, results and gradients of the whole sequence, float64: (batch, heads, length, width) and packed."""

    x: np.ndarray
    dy: np.ndarray
    y: np.ndarray
    log_sum: np.ndarray
    dx: np.ndarray


def rotations(case):
    """Matrices that rotate queries and keys, of shape (length, width, width)."""
    whole, half = np.tile(np.eye(case.width), (case.length, 1, 1)), case.width // 2
    for i in range(half if case.rotary else 0):
        angles = np.arange(case.length) * case.rotary.base ** (-2 * i / case.width)
        whole[:, i, i] = whole[:, i + half, i + half] = np.cos(angles)
        whole[:, i + half, i], whole[:, i, i + half] = np.sin(angles), -np.sin(angles)
    return whole


@cache
def reference(case):
    """softmax(q k^T / sqrt(width)) v and its gradients, from the definition."""
    random, heads, groups, width = np.random.default_rng(0), case.heads, case.kv_heads, case.width
    x = random.standard_normal((BATCH, case.length, heads + 2 * groups, width))
    dy = random.standard_normal((BATCH, case.length, heads, width))
    q, k, v = (part.transpose(0, 2, 1, 3) for part in np.split(x, [heads, heads + groups], axis=2))
    turn = rotations(case)
    q, k = (np.einsum("nij,bhnj->bhni", turn, one) for one in (q, k))
    k, v, dout = k.repeat(heads // groups, 1), v.repeat(heads // groups, 1), dy.transpose(0, 2, 1, 3)
    scores = np.where(seen_keys(case.mask, case.length), q @ k.swapaxes(2, 3) / np.sqrt(width), -np.inf)
    log_sum = np.logaddexp.reduce(scores, axis=-1)
    p = np.exp(scores - log_sum[..., None])
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(width)
    dk, dv = (
        one.reshape(BATCH, groups, heads // groups, case.length, width).sum(2)
        for one in (ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)
    )
    dq, dk = (np.einsum("nij,bhni->bhnj", turn, one) for one in (ds @ k, dk))
    dx = np.concatenate([one.transpose(0, 2, 1, 3) for one in (dq, dk, dv)], axis=2)
    packed = (one.reshape(BATCH, case.length, -1) for one in (x, dy, (p @ v).transpose(0, 2, 1, 3)))
    return WholeAttention(*packed, log_sum, dx.reshape(BATCH, case.length, -1))


def played(axis, algorithm, name, case, x, dy, parts=0):
    """(operator, y, saved, dx) of this rank, its part of arrays of the whole sequence."""
    division = SequenceDivision(name, case.length, axis.size, parts)
    positions = division.positions(axis.rank)
    operator = ALGORITHMS[algorithm](axis, division, case.heads, case.kv_heads, case.mask, case.rotary)
    y, saved = operator.forward(x[:, positions], PassMode())
    spec = operator.outline(ArraySpec((BATCH, len(positions), x.shape[-1]), x.dtype))
    assert spec.y == (y.shape, y.dtype) and nbytes_of(spec.saved) == nbytes_of(saved)
    return operator, y, saved, operator.backward(dy[:, positions], saved, None)


def check(axis, algorithm, name, case, dtype):
    """O, the log of the sum of exponentials, dQ, dK and dV of this rank's tokens against the whole sequence."""
    whole = reference(case)
    operator, y, saved, dx = played(axis, algorithm, name, case, whole.x.astype(dtype), whole.dy.astype(dtype))
    positions, log_sum = operator.division.positions(axis.rank), whole.log_sum
    if algorithm == "ulysses":
        log_sum = log_sum[:, operator._q_slices()[axis.rank]]
        order = np.concatenate([operator.division.positions(rank) for rank in range(axis.size)])
    else:
        order = positions
    found = saved[-1].reshape(BATCH, log_sum.shape[1], len(order))
    assert y.dtype == dx.dtype == dtype
    pairs = (y, whole.y[:, positions]), (dx, whole.dx[:, positions]), (found, log_sum[:, :, order])
    for ours, expected in pairs:
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE[dtype] * max(1, abs(whole.dx).max()))

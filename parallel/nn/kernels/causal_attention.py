"""Steps of causal attention, each of several kernels on the host and of one on a GPU.

Heads have shape (parts, batch, heads, length, width). On the host they are views of packed arrays (batch, length, parts
* heads * width), which products take as they are; on a device they are copies, whose products are one strided batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.kernels import device_kernels
from parallel.nn.kernels.storage import array_namespace, narrow, widen
from quant.types import Array

QUERIES = {"cpu": 64, "cuda": 256}
"""Queries per block on the host and on a GPU, where fewer kernels count more than products of hidden keys."""

_outlined: ContextVar[str] = ContextVar("device of outlines", default="cpu")


def block_length(x: Array = None) -> int:
    """Most queries of a block on the device of `x`, by default that of outlines."""
    return QUERIES[_outlined.get() if x is None else "cpu" if isinstance(x, np.ndarray) else "cuda"]


def blocks(length: int, x: Array = None) -> list[tuple[int, int]]:
    """(start, stop) of each block of queries on the device of `x`, by default that of outlines."""
    queries = block_length(x)
    return [(first, min(first + queries, length)) for first in range(0, length, queries)]


@contextmanager
def outlines_on(device: str) -> Iterator[None]:
    """Context in which outlines (shapes and bytes without data) are made for a device, "cpu" or "cuda"."""
    token = _outlined.set(device)
    try:
        yield
    finally:
        _outlined.reset(token)


def split_heads(x: Array, parts: int, heads: int) -> Array:
    """Heads of a packed array."""
    split = device_kernels.split_heads(x, parts, heads) if device_kernels.suits(x) else None
    return _view(x, parts, heads) if split is None else split


def _view(x: Array, parts: int, heads: int) -> Array:
    return x.reshape(*x.shape[:2], parts, heads, x.shape[2] // (parts * heads)).transpose(2, 0, 3, 1, 4)


def empty_heads(like: Any, parts: int, dtype: np.dtype) -> Array:
    """Heads to be written, as many `parts` of the batch, heads, length and width of `like`."""
    batch, heads, length, width = like.shape
    xp = array_namespace(like)
    if device_kernels.suits(like):
        return xp.empty((parts, *like.shape), dtype)
    return _view(xp.empty((batch, length, parts * heads * width), dtype), parts, heads)


def merge_heads(y: Array, dtype: np.dtype) -> Array:
    """Packed array of heads, rounded to `dtype`."""
    merged = device_kernels.merge_heads(y, dtype) if device_kernels.suits(y) else None
    if merged is not None:
        return merged
    parts, batch, heads, length, width = y.shape
    return narrow(y.transpose(1, 3, 0, 2, 4).reshape(batch, length, parts * heads * width), dtype)


def causal_probabilities(scores: Array, scale: float, first: int, dtype: np.dtype) -> Array:
    """Causal softmax of wide scores, which may be overwritten, rounded to `dtype`."""
    on_device = device_kernels.suits(scores)
    p = device_kernels.causal_probabilities(scores, scale, first, dtype) if on_device else None
    return narrow(kernels.causal_softmax(scores, scale, first), dtype) if p is None else p


def causal_gradient(dp: Array, p: Array, scale: float, first: int) -> Array:
    """Gradient of the scores of `causal_probabilities` p, of its dtype, from wide dp, which may be overwritten."""
    ds = device_kernels.causal_gradient(dp, p, scale, first) if device_kernels.suits(dp) else None
    return narrow(kernels.softmax_backward(dp, widen(p), scale), p.dtype) if ds is None else ds

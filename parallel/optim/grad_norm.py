"""Gradient norm: sums of squares per block of the flat vector, and clipping (Pascanu et al., ICML 2013).

The sums of all ranks are added in the order of the vector, so the result does not depend on its division.
"""

import math
from typing import NamedTuple

import numpy as np

from parallel.nn.flat_params import BLOCK
from parallel.optim.kernels import device_updates, formulas
from parallel.optim.optimizer import expect, portion_of
from quant.types import Array


def block_squares(vector: Array) -> np.ndarray:
    """Sums of squares of each block of 256 elements: a NumPy array, float64, of shape (len(vector) / 256,).

    `vector` has whole blocks of float32 or float64. Each block is added by the same tree, at any position. Inf or NaN
    where the block has one (or, in float64, where squares exceed 1e308).
    """
    if vector.ndim != 1 or len(vector) % BLOCK:
        raise ValueError(f"vector: expected one dimension and whole blocks of {BLOCK}, found shape {vector.shape}")
    on_device = not isinstance(vector, np.ndarray)
    squares, terms = (device_updates.squares, device_updates.SPARE_TERMS) if on_device else (_squares, 1)
    sums = np.empty_like(vector, shape=len(vector) // BLOCK, dtype=np.float64)
    step = portion_of(vector) * terms
    spare = np.empty_like(vector, shape=-(-min(step, len(vector)) // terms), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
        for start in range(0, len(vector), step):
            x = vector[start : start + step]
            squares(x, BLOCK, spare, sums[start // BLOCK : (start + len(x)) // BLOCK])
    return sums if isinstance(sums, np.ndarray) else sums.get()


def _squares(x: np.ndarray, block: int, spare: np.ndarray, out: np.ndarray) -> None:
    if formulas.host is None:
        reference_squares(x, block, spare, out)
    else:
        formulas.host.squares(x, block, spare, out)


def reference_squares(x: np.ndarray, block: int, spare: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of squares of each block of x to `out`, in float64, added in a fixed order (pairwise tree).

    `x` has whole blocks of `block` elements, a power of two. `spare` is float64, of at least len(x) elements, `out`
    float64 of shape (len(x) / block,).
    """
    terms = spare[: len(x)]
    terms[...] = x
    np.multiply(terms, terms, out=terms)
    terms = terms.reshape(-1, block)
    while block > 1:
        block //= 2
        np.add(terms[:, :block], terms[:, block : 2 * block], out=terms[:, :block])
    out[...] = terms[:, 0]


def total(sums: np.ndarray) -> float:
    """Sum of an array of block sums, always added in the same order."""
    return float(np.add.reduce(np.ascontiguousarray(sums, np.float64)))


class GradClip(NamedTuple):
    """Global gradient norm of a step (if inf or NaN, skip the step), and the factor by which to clip the gradient.

    The factor is 1 for a norm up to the limit, and 0 if the norm is not finite.
    """

    norm: float
    factor: float


def clip_factor(squares: np.ndarray, scale: float, limit: float | None) -> GradClip:
    """Compute the global gradient norm and the factor that clips it to `limit`.

    `squares` are the `block_squares` of all ranks, of the gradient before its multiplication by `scale` = 1 /
    (global count x loss scale). Without a `limit` nothing is clipped.

    >>> clip_factor(np.array([9.0, 16.0]), 1.0, 2.5)
    GradClip(norm=5.0, factor=0.5)
    """
    expect("limit", limit, limit is None or limit > 0, "a positive number, or None")
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(total(squares)) * scale
    if not math.isfinite(norm):
        return GradClip(norm, 0.0)
    return GradClip(norm, 1.0 if limit is None or norm <= limit else limit / norm)

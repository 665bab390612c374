"""Rotary position embedding: pairs of elements of queries and keys are rotated by position-dependent angles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import whole_number
from quant.types import Array


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al., "RoFormer", arXiv:2104.09864) in Llama's layout.

    In a head of even width d at position p, elements i and i + d/2 are rotated by the angle p base^(-2i/d), for i from
    0 to below d/2. A product of a query and a key then depends on the distance of their positions alone.

    Parameters
    ----------
    context : int
        Number of positions, from 0 on.
    base : float
        ``rope_theta`` of Hugging Face; ValueError unless it is above 0.
    """

    context: int
    base: float = 1e4

    def __post_init__(self) -> None:
        whole_number("context", self.context)
        if not 0 < self.base < float("inf"):
            raise ValueError(f"base: expected a number above 0, found {self.base}")

    def rotate(self, heads: Array, positions: tuple[range, ...], sign: int = 1) -> None:
        """Rotate heads, of shape (batch, n, heads, d), in place. With -1 as `sign` rotate them back.

        The ranges have the n positions, one after another.
        """
        xp, half = kernels.array_namespace(heads), heads.shape[-1] // 2
        cos, sin = map(xp.asarray, _table(self, positions, half, kernels.wide(heads.dtype)))
        x, sin = kernels.widen(heads), sign * sin
        first = x[..., :half] * cos
        first -= x[..., half:] * sin
        second = x[..., half:] * cos
        second += x[..., :half] * sin
        kernels.narrow(first, heads.dtype, heads[..., :half])
        kernels.narrow(second, heads.dtype, heads[..., half:])


@lru_cache(maxsize=16)
def _table(rotary: Rotary, positions: tuple[range, ...], half: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the angles, each of shape (n, 1, half), computed in float64."""
    rates = rotary.base ** (-np.arange(half) / max(half, 1))
    places = np.concatenate([np.arange(one.start, one.stop, one.step) for one in positions])
    angles = (places[:, None] * rates)[:, None]
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)

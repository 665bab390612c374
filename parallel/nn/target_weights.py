"""Weights of targets and of classes in losses: their checks, and their place in arrays of targets."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel.nn.array_checks import expect, is_single, label
from parallel.nn.kernels.deferred import check
from quant.types import Array


def with_weights(targets: Any, weights: Any) -> np.ndarray:
    """Targets of losses with ``weighted=True``: a weight is one more element along the last axis.

    Parameters
    ----------
    targets : array
        Integer classes of shape (...), or numbers of shape (..., features).
    weights : array of real numbers from 0 on
        One for each class, or each row of features. Those of samples alone, along the first axes, are repeated.

    Returns
    -------
    array of float64, of shape (..., 2) or (..., features + 1)
    """
    wanted, given = np.asarray(targets), np.asarray(weights)
    rows = wanted[..., None] if wanted.dtype.kind in "iu" else wanted
    if rows.ndim < 2 or given.shape != rows.shape[: max(1, given.ndim)] or given.ndim >= rows.ndim:
        raise ValueError(f"weights: expected those of targets of shape {wanted.shape}, found shape {given.shape}")
    given = given.reshape(given.shape + (1,) * (rows.ndim - given.ndim))
    return np.concatenate([rows, np.broadcast_to(given, (*rows.shape[:-1], 1))], axis=-1, dtype=np.float64)


def expect_all(loss: Any, what: str, values: Array, most: float = math.inf) -> None:
    """Raise a ValueError unless all numbers are finite and from 0 to `most`; those on a device when they are read."""
    expected = "finite numbers from 0 on" if most == math.inf else f"numbers from 0 to {most:g}"

    def judge(value: float) -> None:
        if not 0 <= value <= most or value == math.inf:
            raise ValueError(f"{label(loss)}: expected {what} that are {expected}, found {value:g}")

    for extreme in (values.min(), values.max()) if values.size else ():
        check(extreme, judge)


def weights_of(name: str, given: Sequence[float] | None) -> tuple[float, ...] | None:
    """Weights of classes or features as numbers. ValueError unless they are finite and from 0 on."""
    found = None if given is None else tuple(np.asarray(given).tolist())
    for value in found or ():
        if not is_single(value) or value < 0:
            raise ValueError(f"{name}: expected finite numbers from 0 on, found {value!r}")
    return found


def split_weights(loss: Any, targets: Array) -> tuple[Array, Array | None]:
    """Targets, and weights of rows of shape (..., 1), if the loss is `weighted`; otherwise None."""
    if not loss.weighted:
        return targets, None
    expect(targets.ndim > 1 and targets.shape[-1] > 1, loss, "targets and a weight along the last axis", targets)
    weights = targets[..., -1:]
    expect_all(loss, "weights", weights)
    return targets[..., :-1], weights

"""GPTQ: inputs are rounded one after another. The inputs that follow compensate each rounding error.

E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (ICLR 2023).
"""

from typing import Any

import numpy as np

from quant.array import QuantizedArray
from quant.formats import as_float32, expect_real
from quant.ptq.candidates import least_loss
from quant.quantize import quantize
from quant.spec.granularity import PerChannel, PerGroup, PerTensor
from quant.spec.quant_spec import QuantSpec

BLOCK = 128
"""Inputs whose errors are passed on to all later inputs in one matrix product."""


def gptq(w: np.ndarray, moments: np.ndarray, spec: QuantSpec, damping: float = 0.01) -> QuantizedArray:
    """Quantise a weight matrix so that its product w x (rather than w) is approximated for the observed inputs x.

    `w` has shape (outputs, inputs), `moments` is X^T X of shape (inputs, inputs) or a multiple of it. The share
    `damping` of the diagonal's mean, over inputs that are not always 0, is added to the diagonal. Scales have one
    level and are `PerTensor()`, `PerChannel(0)` or `PerGroup(size)`. A group's scale is chosen when its first input is
    rounded. ValueError for other specs. The result's spec has rounding nearest_even.

    Weights of inputs that are always 0 are rounded to nearest. So are all weights if the product is then no worse on
    the observed inputs.
    """
    w = as_float32("w", np.asarray(w))
    check_moments(w, moments)
    along_rows = isinstance(spec.granularity, PerGroup) and spec.granularity.axis in (-1, 1)
    plain = spec.code != "kmeans" and spec.q_range != "peak" and spec.scales.parent is None
    if not plain or not (spec.granularity in (PerTensor(), PerChannel(0), PerChannel(-2)) or along_rows):
        raise ValueError(f"scales are found one by one, for rows or groups of the last axis; {spec} is of another kind")
    nearest = spec.replace(rounding="nearest_even")
    upper = _inverse_root(moments, damping)
    # compensation can lose on few samples: plain rounding competes
    return least_loss(
        [lambda: quantize(w, nearest), *([lambda: _compensated(w, upper, spec)] if w.size else [])],
        lambda q: product_loss(q.dequantize().astype(np.float64) - w, moments),
    )


def check_moments(w: np.ndarray, moments: np.ndarray) -> None:
    """Raise ValueError unless `moments` are finite second moments of the inputs of the weight matrix `w`.

    TypeError unless they are real numbers.
    """
    if w.ndim != 2 or moments.shape != (w.shape[1],) * 2:
        raise ValueError(f"moments of shape {moments.shape} for weights of shape {w.shape}")
    if not np.isfinite(expect_real("moments", moments)).all() or (np.diag(moments) < 0).any():
        raise ValueError("moments: expected finite numbers, and none below 0 on the diagonal")


def product_loss(off: np.ndarray, moments: np.ndarray) -> float:
    """Squared error of the output, summed: ||X off^T||^2, for moments X^T X and `off` of shape (outputs, inputs)."""
    return float(np.einsum("oi,oi->", off @ moments.astype(np.float64), off))


def _compensated(w: np.ndarray, upper: np.ndarray, spec: QuantSpec) -> QuantizedArray:
    """Quantised weights, errors passed on by `upper`, the root of the inverse moments."""
    rows, columns = w.shape
    one = spec.replace(granularity=PerTensor() if spec.granularity == PerTensor() else PerChannel(0))
    size = spec.granularity.size if isinstance(spec.granularity, PerGroup) else columns
    left = np.array(w, np.float64)
    chosen = np.empty((rows, columns), np.float32)
    groups: list[dict[str, Any]] = []
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        lost = np.zeros((rows, last - first))
        for j in range(first, last):
            if j % size == 0:
                if j > first:  # the group may reach beyond the block, whose later inputs need the errors so far
                    left[:, last:] -= lost @ upper[first:last, last:]
                    lost[:] = 0
                groups.append(_parameters(left[:, j : j + size], one))
            chosen[:, j] = quantize(left[:, j : j + 1], one, seed=j, **groups[-1]).dequantize()[:, 0]
            loss = (left[:, j] - chosen[:, j]) / upper[j, j]
            left[:, j + 1 : last] -= loss[:, None] * upper[j, j + 1 : last]
            lost[:, j - first] = loss
        left[:, last:] -= lost @ upper[first:last, last:]
    given: dict[str, Any] = {name: np.concatenate([group[name] for group in groups], axis=1) for name in groups[0]}
    return quantize(chosen, spec.replace(rounding="nearest_even"), **given)


def _inverse_root(moments: np.ndarray, damping: float) -> np.ndarray:
    """Upper triangular U with U^T U the inverse of the damped moments, in units of their mean diagonal.

    Inputs that are always 0 have moments of the mean's size, and none with others: they compensate nothing.
    """
    h = np.array(moments, np.float64)
    live = np.diag(h) > 0
    h /= np.diag(h)[live].mean() if live.any() else 1
    h[~live, ~live] = 1
    h[np.diag_indices_from(h)] += damping
    try:
        return np.linalg.cholesky(np.linalg.inv(h)).T
    except np.linalg.LinAlgError as error:
        raise ValueError(f"moments with damping {damping:g}: expected a positive definite matrix") from error


def _parameters(part: np.ndarray, spec: QuantSpec) -> dict[str, Any]:
    q = quantize(part, spec, seed=0)
    scales = q.scales()
    given = {"scales": np.where(scales == 0, np.float32(1), scales)}
    zeros = q.zeros()
    return given if zeros is None else given | {"zeros": zeros}

"""GPTQ: inputs are rounded one after another; each rounding error is compensated by the inputs after it.

E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (ICLR 2023).
"""

from typing import Any

import numpy as np

from quant.array import QuantizedArray
from quant.quantize import quantize
from quant.spec.granularity import PerChannel, PerGroup, PerTensor
from quant.spec.quant_spec import QuantSpec

BLOCK = 128
"""Inputs whose errors are passed on to all later inputs in one matrix product."""


def gptq(w: np.ndarray, moments: np.ndarray, spec: QuantSpec, damping: float = 0.01) -> QuantizedArray:
    """Quantise a weight matrix so that its product w x (rather than w) is approximated for the observed inputs x.

    `w` has shape (outputs, inputs), `moments` is X^T X of shape (inputs, inputs) or a multiple of it, to whose diagonal
    the share `damping` of its mean is added. Scales have one level and are `PerTensor()`, `PerChannel(0)` or
    `PerGroup(size)`, those of a group chosen when its first input is rounded; ValueError for other specs. Weights of
    inputs that are always 0 become 0, and the result's spec has rounding nearest_even.
    """
    rows, columns = w.shape
    if moments.shape != (columns, columns):
        raise ValueError(f"moments of shape {moments.shape} for weights of shape {w.shape}")
    along_rows = isinstance(spec.granularity, PerGroup) and spec.granularity.axis in (-1, 1)
    plain = spec.code != "kmeans" and spec.q_range != "peak" and spec.scales.parent is None
    if not plain or not (spec.granularity in (PerTensor(), PerChannel(0)) or along_rows):
        raise ValueError(f"scales are found one by one, for rows or groups of the last axis; {spec} is of another kind")
    one = spec.replace(granularity=PerTensor() if spec.granularity == PerTensor() else PerChannel(0))
    size = spec.granularity.size if isinstance(spec.granularity, PerGroup) else columns
    left = np.array(w, np.float64)
    upper = _inverse_root(moments, damping, left)
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
    return quantize(chosen, spec.replace(rounding="nearest_even"), **given) if columns else quantize(chosen, spec)


def _inverse_root(moments: np.ndarray, damping: float, w: np.ndarray) -> np.ndarray:
    """Upper triangular U with U^T U the inverse of the damped moments; zeroes in `w` the weights of inputs always 0."""
    h = np.array(moments, np.float64)
    never = np.diag(h) == 0
    w[:, never] = 0
    h[never, never] = 1
    h[np.diag_indices_from(h)] += damping * np.diag(h).mean() if len(h) else 0
    return np.linalg.cholesky(np.linalg.inv(h)).T


def _parameters(part: np.ndarray, spec: QuantSpec) -> dict[str, Any]:
    q = quantize(part, spec, seed=0)
    scales = q.scales()
    given = {"scales": np.where(scales == 0, np.float32(1), scales)}
    zeros = q.zeros()
    return given if zeros is None else given | {"zeros": zeros}

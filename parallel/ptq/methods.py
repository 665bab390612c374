"""The ways to round a layer's weights: one table of functions on a matrix and what is known of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from parallel.ptq.calibration import Seen
from parallel.ptq.packed_weights import Few
from quant import QuantSpec, quantize
from quant.ptq import awq, gptq, hqq, smoothing


def _rtn(w: np.ndarray, seen: Seen, spec: QuantSpec) -> Few:
    return Few(quantize(w, spec, seed=0))


def _gptq(w: np.ndarray, seen: Seen, spec: QuantSpec) -> Few:
    return Few(gptq(w, seen.moments, spec))


def _awq(w: np.ndarray, seen: Seen, spec: QuantSpec) -> Few:
    return Few(*awq(w, seen.moments, seen.sizes, spec))


def _smoothquant(w: np.ndarray, seen: Seen, spec: QuantSpec) -> Few:
    s = smoothing(seen.largest, w)
    return Few(quantize(w * s, spec, seed=0), s)


def _hqq(w: np.ndarray, seen: Seen, spec: QuantSpec) -> Few:
    return Few(hqq(w, _floating_zeros(spec)))


def _floating_zeros(spec: QuantSpec) -> QuantSpec:
    if not spec.linear:
        raise ValueError(f"hqq moves zero points, and codes {spec.code} have none")
    plain = spec.scales.format if spec.scales.format in ("fp32", "fp16", "bf16") else "fp16"
    return spec.replace(symmetric=False, zero=plain, q_range="restricted")


def _as_asked(spec: QuantSpec) -> QuantSpec:
    return spec


def _nearest(spec: QuantSpec) -> QuantSpec:
    return spec.replace(rounding="nearest_even")


class Method(NamedTuple):
    """A line of the table.

    Attributes
    ----------
    rounded : callable (w, seen, spec) -> Few
        w : float32, shape (outputs, inputs).
    divides : bool
        Whether there are divisors.
    blind : bool
        Whether it needs to know nothing of the inputs, and so suits weights that are only looked up.
    spec : callable spec -> spec
        What becomes of the spec that was asked for: of the codes that come out.
    """

    rounded: Callable[[np.ndarray, Seen, QuantSpec], Few]
    divides: bool = False
    blind: bool = False
    spec: Callable[[QuantSpec], QuantSpec] = _as_asked


METHODS = {
    "rtn": Method(_rtn, blind=True),
    "gptq": Method(_gptq, spec=_nearest),
    "awq": Method(_awq, divides=True),
    "smoothquant": Method(_smoothquant, divides=True),
    "hqq": Method(_hqq, blind=True, spec=_floating_zeros),
}
"""By name: rounding to the nearest, and what `quant.ptq` has."""

"""Rounding methods of weight matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from parallel.ptq.calibration import InputMoments
from parallel.ptq.packed_weights import FewBitWeight
from quant import QuantSpec, quantize
from quant.ptq import awq, gptq, hqq, smoothing


def _rtn(w: np.ndarray, seen: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(quantize(w, spec, seed=0))


def _gptq(w: np.ndarray, seen: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(gptq(w, seen.moments, spec))


def _awq(w: np.ndarray, seen: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(*awq(w, seen.moments, seen.sizes, spec))


def _smoothquant(w: np.ndarray, seen: InputMoments, spec: QuantSpec) -> FewBitWeight:
    s = smoothing(seen.largest, w)
    return FewBitWeight(quantize(w * s, spec, seed=0), s)


def _hqq(w: np.ndarray, seen: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(hqq(w, _floating_zeros(spec)))


def _floating_zeros(spec: QuantSpec) -> QuantSpec:
    if not spec.linear:
        raise ValueError(f"hqq moves zero points, and codes {spec.code} have none")
    plain = spec.scales.format if spec.scales.format in ("fp32", "fp16", "bf16") else "fp16"
    return spec.replace(symmetric=False, zero=plain, q_range="restricted")


def _as_asked(spec: QuantSpec) -> QuantSpec:
    return spec


def _nearest(spec: QuantSpec) -> QuantSpec:
    return spec.replace(rounding="nearest_even")


class RoundingMethod(NamedTuple):
    """Rounding method.

    Attributes
    ----------
    rounded : callable (w, seen, spec) -> Few
        w : float32, shape (outputs, inputs).
    divides : bool
        True if the result has divisors.
    blind : bool
        True if it needs no input statistics, and so suits weights that are only looked up.
    spec : callable spec -> spec
        Spec of the resulting codes, from the requested spec.
    """

    rounded: Callable[[np.ndarray, InputMoments, QuantSpec], FewBitWeight]
    divides: bool = False
    blind: bool = False
    spec: Callable[[QuantSpec], QuantSpec] = _as_asked


METHODS = {
    "rtn": RoundingMethod(_rtn, blind=True),
    "gptq": RoundingMethod(_gptq, spec=_nearest),
    "awq": RoundingMethod(_awq, divides=True),
    "smoothquant": RoundingMethod(_smoothquant, divides=True),
    "hqq": RoundingMethod(_hqq, blind=True, spec=_floating_zeros),
}
"""Rounding methods by name: nearest, and those of `quant.ptq`."""

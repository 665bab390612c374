"""Rounding methods of weight matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from parallel.ptq.calibration import InputMoments
from parallel.ptq.packed_weights import FewBitWeight
from quant import QuantSpec, quantize
from quant.ptq import awq, gptq, hqq, smoothing


def _rtn(w: np.ndarray, inputs: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(quantize(w, spec, seed=0))


def _gptq(w: np.ndarray, inputs: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(gptq(w, inputs.moments, spec))


def _awq(w: np.ndarray, inputs: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(*awq(w, inputs.moments, inputs.sizes, spec))


def _smoothquant(w: np.ndarray, inputs: InputMoments, spec: QuantSpec) -> FewBitWeight:
    s = smoothing(inputs.largest, w)
    return FewBitWeight(quantize(w * s, spec, seed=0), s)


def _hqq(w: np.ndarray, inputs: InputMoments, spec: QuantSpec) -> FewBitWeight:
    return FewBitWeight(hqq(w, _floating_zeros(spec)))


def _floating_zeros(spec: QuantSpec) -> QuantSpec:
    if not spec.linear:
        raise ValueError(f"hqq moves zero points, and codes {spec.code} have none")
    plain = spec.scales.format if spec.scales.format in ("fp32", "fp16", "bf16") else "fp16"
    return spec.replace(symmetric=False, zero=plain, q_range="restricted")


class RoundingMethod(NamedTuple):
    """Rounding method: a function (w, inputs, spec) of a matrix of shape (outputs, inputs), in float32.

    `divides`: the result has divisors. `blind`: it needs no input statistics, and so suits weights that are only looked
    up. `spec`: spec of the resulting codes, from the requested spec.
    """

    rounded: Callable[[np.ndarray, InputMoments, QuantSpec], FewBitWeight]
    divides: bool = False
    blind: bool = False
    spec: Callable[[QuantSpec], QuantSpec] = lambda spec: spec


METHODS = {
    "rtn": RoundingMethod(_rtn, blind=True),
    "gptq": RoundingMethod(_gptq, spec=lambda spec: spec.replace(rounding="nearest_even")),
    "awq": RoundingMethod(_awq, divides=True),
    "smoothquant": RoundingMethod(_smoothquant, divides=True),
    "hqq": RoundingMethod(_hqq, blind=True, spec=_floating_zeros),
}
"""Rounding methods by name: nearest, and those of `quant.ptq`."""

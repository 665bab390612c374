"""Small floating-point formats as tables of values, used for elements and for scales.

Values and rounding are equal to ml_dtypes (tested for every value).
"""

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

GREATEST = np.finfo(np.float32).max
"""Largest float32."""


class Minifloat(NamedTuple):
    """Floating-point format: a sign, `exponent` bits, `mantissa` bits. `dtype` is NumPy's or ml_dtypes'.

    `lowest` is log2 of the smallest normal number, `largest` the largest finite number.
    """

    dtype: np.dtype
    exponent: int
    mantissa: int
    lowest: int
    largest: float

    @property
    def bits(self) -> int:
        """Bits of one value, with the sign."""
        return 1 + self.exponent + self.mantissa

    @property
    def highest(self) -> int:
        """Exponent of the largest value. MX formats subtract it from the shared exponent."""
        return int(np.floor(np.log2(self.largest)))


def _minifloat(dtype: type, exponent: int) -> Minifloat:
    about = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return Minifloat(
        np.dtype(dtype), exponent, int(about.nmant), int(np.log2(float(about.smallest_normal))), float(about.max)
    )


MINIFLOATS = {
    "e2m1": _minifloat(ml_dtypes.float4_e2m1fn, 2),
    "e2m3": _minifloat(ml_dtypes.float6_e2m3fn, 2),
    "e3m2": _minifloat(ml_dtypes.float6_e3m2fn, 3),
    "e4m3": _minifloat(ml_dtypes.float8_e4m3fn, 4),
    "e5m2": _minifloat(ml_dtypes.float8_e5m2, 5),
    "fp16": _minifloat(np.float16, 5),
    "bf16": _minifloat(ml_dtypes.bfloat16, 8),
}
"""Formats of OCP "8-bit floating point" and "Microscaling formats" (2023), fp16 and bf16."""


def expect_real(name: str, x: Any) -> Any:
    """The array itself. TypeError, naming the argument, unless its elements are real numbers."""
    if x.dtype.kind not in "fiub" and x.dtype.name != "bfloat16":
        raise TypeError(f"{name}: expected real numbers, found {x.dtype}")
    return x


def as_float32(name: str, x: Any) -> Any:
    """Array of real numbers in float32, the same if it is one. TypeError, naming the argument, for other elements."""
    expect_real(name, x)
    with np.errstate(over="ignore"):  # infinity is looked for where it matters
        return x.astype(np.float32, copy=False)


# Quantiles of the normal distribution, scaled to [-1, 1], with an exact 0: appendix E of Dettmers, Pagnoni, Holtzman
# and Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
_NF4 = """
-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""
TABLES = {"nf4": np.array([float(level) for level in _NF4.split()], np.float32)}
"""Fixed levels between -1 and 1, ascending."""


@cache
def values(code: str) -> np.ndarray:
    """Table of the value of every code of a format of at most 8 bits, NaN and infinities included: float32, cached.

    ValueError for longer codes.
    """
    if code in TABLES:
        return TABLES[code]
    kind = MINIFLOATS[code]
    if kind.bits > 8:
        raise ValueError(f"code: expected a format of at most 8 bits, found {code} of {kind.bits}")
    with np.errstate(all="ignore"):
        return np.arange(2**kind.bits, dtype=np.uint8).view(kind.dtype).astype(np.float32)

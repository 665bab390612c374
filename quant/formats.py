"""Small floating-point numbers: what their bits mean, as a table.

Elements and scales of few bits are numbers of the same kind, so both take their rounding and their values from here. The
values are those of ml_dtypes; that the rounding is ml_dtypes' too is tested for every number there is.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Minifloat(NamedTuple):
    """A sign, `exponent` bits, `mantissa` bits; the exponent of the smallest normal number, and the largest number.

    Attributes
    ----------
    dtype : dtype
        The same format in NumPy or ml_dtypes.
    exponent, mantissa : int
        Widths in bits.
    lowest : int
        log2 of the smallest normal number.
    largest : float
        The largest finite number.
    """

    dtype: np.dtype
    exponent: int
    mantissa: int
    lowest: int
    largest: float

    @property
    def bits(self) -> int:
        """Of one number, the sign counted."""
        return 1 + self.exponent + self.mantissa

    @property
    def highest(self) -> int:
        """floor(log2(largest)): the exponent that MX formats take off the shared one."""
        return int(np.floor(np.log2(self.largest)))


def _minifloat(dtype: type, exponent: int) -> Minifloat:
    about = ml_dtypes.finfo(dtype)
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
"""Those of OCP's "8-bit floating point" (2023) and "Microscaling formats" (2023), and the two common halves."""

# Quantiles of the normal distribution, scaled to [-1, 1], with an exact 0: appendix E of Dettmers, Pagnoni, Holtzman and
# Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
TABLES = {"nf4": np.array(_NF4, np.float32)}
"""Fixed levels in ascending order, for values between -1 and 1."""


@cache
def values(code: str) -> np.ndarray:
    """What each code stands for, before the scale: float32, NaN and infinities included where the format has them."""
    if code in TABLES:
        return TABLES[code]
    kind = MINIFLOATS[code]
    with np.errstate(all="ignore"):
        return np.arange(2**kind.bits, dtype=np.uint8).view(kind.dtype).astype(np.float32)

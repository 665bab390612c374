"""Named quantisation specs."""

import re
from typing import Any

from quant.spec.granularity import PerChannel, PerGroup
from quant.spec.quant_spec import QuantSpec, Scales

INT8 = QuantSpec(8)
"""8 bits, one scale per tensor: symmetric int8 of ONNX and PyTorch."""

INT4_G32 = QuantSpec(4, granularity=PerGroup(32), scale="fp16")
"""4 bits, one fp16 scale per 32 weights: 4.5 bits per element."""

Q4_0 = QuantSpec(4, granularity=PerGroup(32), q_range="peak", rounding="half_up", scale="fp16", divisor="inverse")
"""Q4_0 of ggml. `quant.io.ggml_blocks` converts to its block format."""

Q8_0 = QuantSpec(8, granularity=PerGroup(32), rounding="half_away", scale="fp16", divisor="inverse")
"""Q8_0 of ggml."""

MXFP8 = QuantSpec(8, granularity=PerGroup(32), code="e4m3", scale="e8m0")
"""OCP microscaling format of 8 bits: 32 elements share a power of two."""

MXFP4 = QuantSpec(4, granularity=PerGroup(32), code="e2m1", scale="e8m0")
"""OCP microscaling format of 4 bits."""

NVFP4 = QuantSpec(4, granularity=PerGroup(16), code="e2m1", scale=Scales("e4m3", parent=Scales("fp32")))
"""4 bits, two levels of scales: e4m3 per 16 elements, one float per tensor."""

VSQ = QuantSpec(4, granularity=PerGroup(16), scale=Scales("uint4", PerChannel(0), Scales("fp32")))
"""Two levels of scales (Dai et al., "VS-Quant", MLSys 2021): 4-bit integer per 16 elements, one float per row."""

NF4 = QuantSpec(4, granularity=PerGroup(64), code="nf4")
"""The 16 quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023)."""

PRESETS = {
    "INT8": INT8,
    "INT4_G32": INT4_G32,
    "Q4_0": Q4_0,
    "Q8_0": Q8_0,
    "MXFP8": MXFP8,
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
    "VSQ": VSQ,
    "NF4": NF4,
}


def grouped(bits: int, size: int, scale: str = "fp16", **options: Any) -> QuantSpec:
    """Spec of codes, linear by default, in groups along the last axis: the usual one for weights and communication.

    >>> grouped(8, 128).bits_per_element
    8.125
    """
    return QuantSpec(bits, granularity=PerGroup(size), scale=scale, **options)


def parse(text: str) -> QuantSpec:
    """Parse a spec: a preset's name, or intB or kmeansB (B bits) with suffixes _gN (groups of N) or _row, and _zero.

    With _row each row has its own scale (or fp16 k-means levels). _zero adds zero points to intB. ValueError for other
    names.

    >>> parse("int3_g64").bits_per_element
    3.25
    >>> parse("int8_row_zero").symmetric
    False
    >>> parse("kmeans4_row").code
    'kmeans'
    """
    name = text.upper()
    if name in PRESETS:
        return PRESETS[name]
    if match := re.fullmatch(r"(?:INT|(KMEANS))([1-8])(?:_G(\d+)|_(ROW))?((?(1)|(?:_ZERO)?))", name):
        means, bits, size, row, zero = match[1], int(match[2]), match[3], match[4], match[5]
        options: dict[str, Any] = {"code": "kmeans", "scale": "fp16"} if means else {"symmetric": False} if zero else {}
        if row:
            options["granularity"] = PerChannel(0)
        return grouped(bits, int(size), **options) if size else QuantSpec(bits, **options)
    names = "intB or kmeansB for B bits, then _gN for groups of N, _row for a scale per row, _zero for zero points"
    raise ValueError(f"no spec {text!r}: expected a preset ({', '.join(PRESETS)}), or {names}")

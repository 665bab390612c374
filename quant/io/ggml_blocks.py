"""Conversion to and from ggml's Q4_0 and Q8_0 blocks: an fp16 scale followed by 32 codes.

https://github.com/ggml-org/ggml. The package gguf reads and writes such files. Codes are equal byte for byte. Only the
scales are interleaved.
"""

import numpy as np

from quant.array import QuantizedArray
from quant.kernels import array_namespace
from quant.spec.presets import Q4_0, Q8_0
from quant.types import Array

BLOCKS = {"Q4_0": Q4_0, "Q8_0": Q8_0}


def to_blocks(q: QuantizedArray) -> Array:
    """Convert a Q4_0 or Q8_0 array to ggml blocks: uint8, shape (..., bytes per row). ValueError for parts of blocks.

    >>> from quant import quantize
    >>> to_blocks(quantize(np.ones((2, 64), np.float32), Q4_0)).shape
    (2, 36)
    """
    if q.spec not in BLOCKS.values():
        raise ValueError(f"spec: expected one of {', '.join(BLOCKS)}, found {q.spec}")
    if not q.shape or q.shape[-1] % 32:
        raise ValueError(f"rows of {q.shape[-1] if q.shape else 1} elements are not whole blocks of 32")
    xp, groups = array_namespace(q.buffer), q.groups
    scales = q.part("scale0").view(np.uint8).reshape(groups, 2)
    codes = q.part("codes").reshape(groups, 4 * q.spec.bits)
    width = 2 + 4 * q.spec.bits
    return xp.concatenate([scales, codes], axis=1).reshape(*q.shape[:-1], q.shape[-1] // 32 * width)


def from_blocks(blocks: Array, kind: str) -> QuantizedArray:
    """Convert ggml blocks (uint8, shape (..., bytes per row)) to a quantised array. `kind` is Q4_0 or Q8_0."""
    if kind not in BLOCKS:
        raise ValueError(f"kind: expected {' or '.join(BLOCKS)}, found {kind!r}")
    spec = BLOCKS[kind]
    width = 2 + 4 * spec.bits
    if not blocks.ndim or blocks.dtype != np.uint8 or blocks.shape[-1] % width:
        raise ValueError(
            f"rows of {kind} are uint8 in multiples of {width}, not {blocks.dtype} of shape {blocks.shape}"
        )
    made = QuantizedArray(spec, (*blocks.shape[:-1], blocks.shape[-1] // width * 32))
    xp = array_namespace(blocks)
    made.buffer = xp.asarray(made.buffer)
    rows = xp.ascontiguousarray(blocks).reshape(-1, width)
    made.put("scale0", xp.ascontiguousarray(rows[:, :2]).view(np.uint16))
    made.part("codes")[...] = rows[:, 2:].reshape(-1)
    return made

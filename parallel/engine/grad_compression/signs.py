"""Sign compression of gradients: one bit per element, and the mean absolute value of every block.

Converges with error feedback (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019). With encoded sums and feedback at both ends it is the exchange of 1-bit Adam (Tang et al., ICML
2021, section 4.3).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.grad_compression.quantized import CodecCompressor
from parallel.nn.flat_params import BLOCK
from quant.kernels import array_namespace
from quant.types import Array


class SignCompressor:
    """Codec that turns x into sign(x) * mean(abs(x) in its block): 1 + 32/256 bits per element. Zero is positive.

    Blocks are those of the flat vector, so no two tensors share a scale. `real` is the number of elements of each block
    that belong to a tensor, all by default; the mean is over these.
    """

    block = BLOCK

    def __init__(self, real: np.ndarray | None = None):
        self._real = real
        self._partial = cache(lambda xp, whole: [] if real is None else _partial_blocks(real[:whole], xp))

    def within(self, start: int, count: int) -> SignCompressor:
        """Codec for the `count` elements from `start` on, as in `collectives.compressed.Codec`."""
        return self if self._real is None else SignCompressor(self._real[start // BLOCK : -(-(start + count) // BLOCK)])

    def nbytes(self, count: int) -> int:
        """Encoded size in bytes of `count` elements: scales and sign bits."""
        return 4 * -(-count // BLOCK) + -(-count // 8)

    def encode(self, x: Array, wire: Array) -> None:
        """Encode `x` into the bytes `wire`. A block with a non-finite element gets a non-finite scale."""
        if not len(x):
            return
        xp, (scales, bits) = array_namespace(x), self._parts(wire, len(x))
        whole = len(x) // BLOCK
        blocks = x[: whole * BLOCK].reshape(whole, BLOCK)
        abs(blocks).mean(axis=1, out=scales[:whole])
        if len(x) % BLOCK:
            scales[whole] = abs(x[whole * BLOCK :][: None if self._real is None else self._real[whole]]).mean()
        for count, these in self._partial(xp, whole):
            scales[these] = abs(blocks[these, :count]).mean(axis=1)
        bits[...] = xp.packbits(x < 0)

    def decode(self, wire: Array, out: Array) -> None:
        if not len(out):
            return
        scales, bits = self._parts(wire, len(out))
        xp = array_namespace(out)
        each = xp.repeat(scales, BLOCK)[: len(out)]
        xp.copysign(each, np.float32(0.5) - xp.unpackbits(bits)[: len(out)], out=out)

    def add(self, wire: Array, out: Array) -> None:
        """Decode the bytes `wire` and add the values to `out`."""
        decoded = array_namespace(out).empty_like(out)
        self.decode(wire, decoded)
        out += decoded

    def _parts(self, wire: Array, count: int) -> tuple[Array, Array]:
        blocks = -(-count // BLOCK)
        return wire[: 4 * blocks].view(np.float32), wire[4 * blocks : self.nbytes(count)]


def _partial_blocks(real: np.ndarray, xp: ModuleType) -> list[tuple[int, Array]]:
    """(number of real elements, blocks that have as many) for each number below a full block's."""
    counts = np.unique(real[real < BLOCK])
    return [(int(count), xp.asarray(np.flatnonzero(real == count))) for count in counts]


def signs(comm: Communicator, bucket: GradBucket, like: Any = None) -> CodecCompressor:
    """Sign compressor of a gradient bucket. Padding at the end of tensors is left out of the mean of a block."""
    real = np.full(bucket.span.size // BLOCK, BLOCK)
    for place in bucket.places:
        if place.size:
            last = (place.span.stop - bucket.span.start) // BLOCK - 1
            real[last] -= place.span.size - place.size
    return CodecCompressor(comm, bucket.span.size, SignCompressor(real), like=like)

"""Sign compression of gradients: one bit per element, and the mean absolute value of every block.

Converges with error feedback (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019). With encoded sums and feedback at both ends it is the exchange of 1-bit Adam (Tang et al., ICML
2021, section 4.3).
"""

from __future__ import annotations

import numpy as np

from collectives import Communicator
from parallel.data_parallel.grad_bucket import GradBucket
from parallel.grad_compression.quantized import CodecCompressor
from parallel.nn.flat_params import BLOCK


class SignCompressor:
    """Codec that turns x into sign(x) * mean(abs(x) in its block): 1 + 32/256 bits per element. Zero is positive.

    Blocks are those of the flat vector, so no two tensors share a scale. `real` is the number of elements of each block
    that belong to a tensor, all by default; the mean is over these.
    """

    block = BLOCK

    def __init__(self, real: np.ndarray | None = None):
        self._real = real

    def within(self, start: int, count: int) -> SignCompressor:
        """Codec for the `count` elements from `start` on, as in `collectives.compressed.Codec`."""
        return self if self._real is None else SignCompressor(self._real[start // BLOCK : -(-(start + count) // BLOCK)])

    def nbytes(self, count: int) -> int:
        """Encoded size in bytes of `count` elements: scales and sign bits."""
        return 4 * -(-count // BLOCK) + -(-count // 8)

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Encode `x` into the bytes `wire`; a block with a non-finite element gets a non-finite scale."""
        scales, bits = self._parts(wire, len(x))
        whole = len(x) // BLOCK
        np.abs(x[: whole * BLOCK]).reshape(whole, BLOCK).mean(axis=1, out=scales[:whole])
        if len(x) % BLOCK:
            scales[whole] = np.abs(x[whole * BLOCK :]).mean()
        if self._real is not None:
            for block in np.flatnonzero(self._real < BLOCK):
                scales[block] = np.abs(x[block * BLOCK :][: self._real[block]]).mean()
        bits[...] = np.packbits(x < 0)

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        scales, bits = self._parts(wire, len(out))
        each = np.repeat(scales, BLOCK)[: len(out)]
        np.copysign(each, np.float32(0.5) - np.unpackbits(bits, count=len(out)), out=out)

    def add(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Decode the bytes `wire` and add the values to `out`."""
        decoded = np.empty_like(out)
        self.decode(wire, decoded)
        out += decoded

    def _parts(self, wire: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = -(-count // BLOCK)
        return wire[: 4 * blocks].view(np.float32), wire[4 * blocks : self.nbytes(count)]


def signs(comm: Communicator, bucket: GradBucket) -> CodecCompressor:
    """Sign compressor of a gradient bucket; padding at the end of tensors is left out of the mean of a block."""
    real = np.full(bucket.span.size // BLOCK, BLOCK)
    for place in bucket.places:
        if place.size:
            last = (place.span.stop - bucket.span.start) // BLOCK - 1
            real[last] -= place.span.size - place.size
    return CodecCompressor(comm, bucket.span.size, SignCompressor(real))

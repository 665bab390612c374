"""Few bits for every element, with a scale for each block of the flat vector.

int8 and int4 round to the nearest code, and what that loses is fed back. QSGD and TernGrad round at random, so that the
mean is right and nothing is owed (Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017; Wen et al., "TernGrad", NeurIPS 2017).
"""

from __future__ import annotations

import numpy as np

from collectives import Communicator
from collectives.compressed import Motion, QuantCodec
from parallel.data_parallel.grad_bucket import GradBucket
from parallel.grad_compression.codec_compressor import CodecCompressor
from parallel.nn.flat_params import BLOCK
from parallel.nn.kernels.philox import key_of
from quant import grouped

SCALES = 2.0**-149, float(np.finfo(np.float32).max)
"""The smallest and the largest there are: blocks of hardly anything, and of next to too much, have one too."""


def nearest(bits: int, comm: Communicator, bucket: GradBucket) -> CodecCompressor:
    """So many bits, to the nearest."""
    return CodecCompressor(comm, bucket.span.size, QuantCodec(grouped(bits, BLOCK, "fp32")))


class DitheredQuantizer(CodecCompressor):
    """So many bits, up or down at random: what is read is x in the mean.

    Parameters
    ----------
    bits : int
        2 to 8: 2^(bits-1) - 1 levels on either side of zero.
    euclidean : bool
        Levels reach up to a block's norm, as in QSGD, or to its largest element, as in TernGrad.
    """

    def __init__(self, bits: int, euclidean: bool, comm: Communicator, bucket: GradBucket, seed: int):
        levels = np.float32(2 ** (bits - 1) - 1)

        def norms(x: np.ndarray) -> np.ndarray:
            squares = np.add.reduceat(np.square(x, dtype=np.float64), np.arange(0, len(x), BLOCK)).reshape(1, -1)
            squares[~np.isfinite(squares) | (squares == 0)] = 1  # all NaN or all 0, whatever the scale
            return np.clip(np.sqrt(squares) / levels, *SCALES).astype(np.float32)

        spec = grouped(bits, BLOCK, "fp32", rounding="stochastic")
        self._codec = QuantCodec(spec, norms if euclidean else None, comm.Get_rank())
        super().__init__(comm, bucket.span.size, self._codec, feedback=False)
        self._name = f"{bucket.number} {comm.Get_rank()}"
        self._seed = seed

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray | None, step: int) -> Motion:
        """As `parallel.grad_compression.Compressor`; other random numbers in every step, on every rank."""
        self._codec.reseed(key_of(self._seed, step, self._name)[0])
        yield from super().exchange(x, out, lost, step)

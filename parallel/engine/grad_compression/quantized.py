"""Gradient compression by quantisation to few bits, with one scale per block: int8, int4, QSGD, TernGrad.

int8 and int4 round to nearest, with error feedback. QSGD and TernGrad round stochastically, which is unbiased and
needs none (Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017;
Wen et al., "TernGrad", NeurIPS 2017).
"""

from typing import Any

import numpy as np

from collectives import Communicator
from collectives.compressed import Codec, HierarchicalAllreduce, Motion, QuantCodec, SegmentedAllreduce, crowded
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.nn.flat_params import BLOCK
from parallel.nn.kernels import key_of
from quant import grouped
from quant.kernels import array_namespace
from quant.types import Array

SCALES = 2.0**-149, float(np.finfo(np.float32).max)
"""Smallest and largest scale: those of float32."""


class CodecCompressor:
    """Compressor by a codec: two-shot allreduce (encoded reduce-scatter and allgather) of `count` elements.

    With several ranks on several nodes, the ranks of a node are summed first, as they share its link.
    """

    def __init__(self, comm: Communicator, count: int, codec: Codec, feedback: bool = True, like: Any = None):
        self.feedback = feedback
        self._sum = (HierarchicalAllreduce if crowded(comm) else SegmentedAllreduce)(comm, count, codec, like=like)

    def exchange(self, x: Array, out: Array, lost: Array | None, step: int) -> Motion:
        yield from self._sum.allreduce(x, out, lost)

    def state(self) -> dict[str, Array]:
        return {}

    def close(self) -> None:
        self._sum.close()


def nearest(bits: int, comm: Communicator, bucket: GradBucket, like: Any = None) -> CodecCompressor:
    return CodecCompressor(comm, bucket.span.size, QuantCodec(grouped(bits, BLOCK, "fp32")), like=like)


class DitheredQuantizer(CodecCompressor):
    """Compressor with unbiased stochastic rounding to `bits` bits (QSGD, TernGrad): 2^bits - 1 levels around 0.

    Levels reach up to the block's norm if `euclidean` (QSGD), else to its largest element (TernGrad).
    """

    def __init__(self, bits: int, euclidean: bool, comm: Communicator, bucket: GradBucket, seed: int, like: Any = None):
        levels = np.float32(2 ** (bits - 1) - 1)

        def norms(x: Array) -> Array:
            xp = array_namespace(x)
            squares = xp.square(x, dtype=np.float64).reshape(-1, BLOCK).sum(axis=1)
            usual = xp.isfinite(squares) & (squares != 0)  # other blocks become NaN or 0 with any scale
            return xp.clip(xp.sqrt(xp.where(usual, squares, 1.0)) / levels, *SCALES).astype(np.float32)

        spec = grouped(bits, BLOCK, "fp32", rounding="stochastic")
        self._codec = QuantCodec(spec, norms if euclidean else None, comm.Get_rank())
        super().__init__(comm, bucket.span.size, self._codec, feedback=False, like=like)
        self._name, self._seed = f"{bucket.places[0].parameter.label} {comm.Get_rank()}", seed

    def exchange(self, x: Array, out: Array, lost: Array | None, step: int) -> Motion:
        """As `Compressor.exchange`. Random numbers of the rounding differ between steps, buckets and ranks."""
        self._codec.reseed(key_of(self._seed, step, self._name)[0])
        yield from super().exchange(x, out, lost, step)

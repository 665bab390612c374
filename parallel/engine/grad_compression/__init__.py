"""Gradient compression: table of compressors by name, and the parser of ``--compress``.

    factory = parse("topk:0.01")             # value of --compress
    compressor = factory(comm, bucket, seed)     # with like=cupy, of gradients on a GPU
    for requests in compressor.exchange(x, out, lost, step): wait_all(requests)

All ranks get the same sum, and each rank its residual. Adding the residual to the next step's gradient is error
feedback, without which biased compressors (signs, top-k, low rank) need not converge.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives import Communicator
from collectives.compressed import Motion
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.grad_compression.powersgd import PowerSGD
from parallel.engine.grad_compression.quantized import DitheredQuantizer, nearest
from parallel.engine.grad_compression.signs import signs
from parallel.engine.grad_compression.topk import TopK
from quant.types import Array


class Compressor(Protocol):
    """Interface of gradient compressors: approximate allreduce of the gradients of one bucket."""

    feedback: bool  # True if the residual must be added to the next step's gradient

    def exchange(self, x: Array, out: Array, lost: Any, step: int) -> Motion:
        """Sum all ranks' `x` approximately into `out` (may be `x`), put this rank's residual in `lost`. Yield requests.

        The residuals of all ranks add up to the exact sum less `out`. `lost` may be None without `feedback`.
        """

    def state(self) -> dict[str, Array]:
        """Arrays by name, equal on all ranks: writable views. Checkpoints have them. Without an update they return."""

    def close(self) -> None:
        """Free the communicators and requests that it owns, if any. Collective."""


NONE = "none"
"""Name for plain sums."""

AUTO = "auto"
"""Name for a choice by measurement (`parallel.engine.compression`)."""


class CompressorFactory(NamedTuple):
    """Collective callable (comm, bucket, seed, like) -> Compressor. `feedback`: its compressors need error feedback.

    With `like`, the module ``cupy`` or one of its arrays, it takes gradients on a GPU.
    """

    make: Callable[[Communicator, GradBucket, int, Any], Compressor]
    feedback: bool

    def __call__(self, comm: Communicator, bucket: GradBucket, seed: int, like: Any = None) -> Compressor:
        return self.make(comm, bucket, seed, like)


class CompressorEntry(NamedTuple):
    """Entry of the table `COMPRESSORS`: a constructor, and the numeric parameter that it takes (``topk:0.01``)."""

    make: Callable[[float, Communicator, GradBucket, int, Any], Compressor]
    default: float | None = None  # number if none is given; None for compressors without a number
    expected: str = ""  # meaning and range of the number, for error messages
    is_valid: Callable[[float], bool] = lambda number: True
    feedback: bool = True


COMPRESSORS: dict[str, CompressorEntry] = {
    "int8": CompressorEntry(lambda _, comm, bucket, seed, like: nearest(8, comm, bucket, like)),
    "int4": CompressorEntry(lambda _, comm, bucket, seed, like: nearest(4, comm, bucket, like)),
    "qsgd": CompressorEntry(
        lambda bits, *others: DitheredQuantizer(int(bits), True, *others),
        4,
        "bits, 2 to 8",
        lambda bits: bits in range(2, 9),
        feedback=False,
    ),
    "terngrad": CompressorEntry(lambda _, *others: DitheredQuantizer(2, False, *others), feedback=False),
    "sign": CompressorEntry(lambda _, comm, bucket, seed, like: signs(comm, bucket, like)),
    "topk": CompressorEntry(
        lambda share, comm, bucket, seed, like: TopK(comm, bucket.span.size, share, like),
        0.01,
        "a share of the elements, above 0 and up to 1",
        lambda share: 0 < share <= 1,
    ),
    "powersgd": CompressorEntry(
        lambda rank, comm, bucket, seed, like: PowerSGD(comm, bucket, int(rank), seed, like),
        2,
        "a rank, 1 or more",
        lambda rank: rank >= 1 and rank == int(rank),
    ),
}


def parse(text: str) -> CompressorFactory:
    """Compressor factory for a value of ``--compress``, ``name`` or ``name:number``, other than "auto" and "none".

    Raises
    ------
    ValueError
        If the name is unknown, "auto" or "none", or the number is invalid or not expected.

    Examples
    --------
    >>> parse("topk:2")
    Traceback (most recent call last):
        ...
    ValueError: compress: topk takes a share of the elements, above 0 and up to 1; found '2'
    """
    name, colon, argument = text.partition(":")
    if name not in COMPRESSORS:
        raise ValueError(f"compress: expected one of {', '.join(COMPRESSORS)}, {AUTO}, {NONE}; found {text!r}")
    entry = COMPRESSORS[name]
    if entry.default is None:
        if colon:
            raise ValueError(f"compress: {name} takes no number; found {argument!r}")
        return CompressorFactory(partial(entry.make, 0), entry.feedback)
    try:
        number = float(argument) if colon else entry.default
    except ValueError:
        number = np.nan  # for the error below
    if not (np.isfinite(number) and entry.is_valid(number)):
        raise ValueError(f"compress: {name} takes {entry.expected}; found {argument!r}")
    return CompressorFactory(partial(entry.make, number), entry.feedback)

"""Gradient compression: the table of compressors.

    compress = parse("topk:0.01")          # a value of the command line
    made = compress(comm, bucket, seed)    # bound to a bucket
    for requests in made.exchange(x, out, lost, step): wait_all(requests)

All of them leave the same sum on all ranks, and compute this rank's residual. Adding it to the next step's gradient is
error feedback, without which the biased ones (signs, the largest elements, low rank) need not converge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives import Communicator
from collectives.compressed import Motion
from parallel.data_parallel.grad_bucket import GradBucket
from parallel.grad_compression.powersgd import PowerSGD
from parallel.grad_compression.quantized import DitheredQuantizer, nearest
from parallel.grad_compression.signs import signs
from parallel.grad_compression.topk import TopK


class Compressor(Protocol):
    """Bound to a bucket.

    Attributes
    ----------
    feedback : bool
        The residual has to be added to the next step's gradient.
    """

    feedback: bool

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: Any, step: int) -> Motion:
        """`out` = about the sum of all ranks' x, which may be the same array; `lost` = what this rank's share lacks.

        The lost of all ranks together is what is missing from the sum. It may be None where there is no `feedback`.
        """

    def state(self) -> dict[str, np.ndarray]:
        """Further state by name, equal on all ranks: views that can be assigned to."""

    def close(self) -> None:
        """Collective."""


NONE = "none"
"""Nothing: plain sums."""

AUTO = "auto"
"""Choose by measurement: see `parallel.grad_compression.auto_select`."""


class CompressorFactory(NamedTuple):
    """Factory of compressors, and True if they need error feedback.

    Attributes
    ----------
    make : callable (comm, bucket, seed) -> Compressor
        Collective.
    feedback : bool
    """

    make: Callable[[Communicator, GradBucket, int], Compressor]
    feedback: bool

    def __call__(self, comm: Communicator, bucket: GradBucket, seed: int) -> Compressor:
        """A compressor for a bucket. Collective."""
        return self.make(comm, bucket, seed)


class CompressorEntry(NamedTuple):
    """A line of the table.

    Attributes
    ----------
    make : callable (number) -> callable (comm, bucket, seed) -> Compressor
        The number is the one behind the colon, or `default`.
    default : float or None
        None if it takes no number.
    says : str
        What the number means and may be; raised with what was found.
    fits : callable (number) -> bool
    feedback : bool
        As its compressors have it.
    """

    make: Callable[[float], Callable[[Communicator, GradBucket, int], Compressor]]
    default: float | None = None
    says: str = ""
    fits: Callable[[float], bool] = lambda number: True
    feedback: bool = True


COMPRESSORS: dict[str, CompressorEntry] = {
    "int8": CompressorEntry(lambda _: lambda comm, bucket, seed: nearest(8, comm, bucket)),
    "int4": CompressorEntry(lambda _: lambda comm, bucket, seed: nearest(4, comm, bucket)),
    "qsgd": CompressorEntry(
        lambda bits: lambda comm, bucket, seed: DitheredQuantizer(int(bits), True, comm, bucket, seed),
        4,
        "bits, 2 to 8",
        lambda bits: bits in range(2, 9),
        feedback=False,
    ),
    "terngrad": CompressorEntry(
        lambda _: lambda comm, bucket, seed: DitheredQuantizer(2, False, comm, bucket, seed), feedback=False
    ),
    "sign": CompressorEntry(lambda _: signs),
    "topk": CompressorEntry(
        lambda share: lambda comm, bucket, seed: TopK(comm, bucket.span.size, share),
        0.01,
        "a share of the elements, above 0 and up to 1",
        lambda share: 0 < share <= 1,
    ),
    "powersgd": CompressorEntry(
        lambda rank: lambda comm, bucket, seed: PowerSGD(comm, bucket, int(rank), seed),
        2,
        "a rank, 1 or more",
        lambda rank: rank >= 1 and rank == int(rank),
    ),
}


def parse(text: str) -> CompressorFactory:
    """Compressor factory of ``name`` or ``name:number``.

    Raises
    ------
    ValueError
        If there is no such thing, or the number does not fit.

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
    kind = COMPRESSORS[name]
    if kind.default is None:
        if colon:
            raise ValueError(f"compress: {name} takes no number; found {argument!r}")
        return CompressorFactory(kind.make(0), kind.feedback)
    try:
        number = float(argument) if colon else kind.default
    except ValueError:
        number = np.nan
    if not (np.isfinite(number) and kind.fits(number)):
        raise ValueError(f"compress: {name} takes {kind.says}; found {argument!r}")
    return CompressorFactory(kind.make(number), kind.feedback)

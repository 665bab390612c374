"""Gradients in fewer bits: what each way to compress makes of a bucket, in one table.

    compress = parse("topk:0.01")          # a value: what is said on the command line
    made = compress(comm, bucket, seed)    # bound to a bucket: what does it
    for requests in made.exchange(x, out, lost, step): wait_all(requests)

All of them leave the same sum on all ranks, and say what they have lost here. Added to the next step's gradient, that
is error feedback, without which the biased ones (signs, the largest elements, low rank) need not converge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives import Communicator
from collectives.compressed import Motion
from parallel.data_parallel.grad_bucket import Bucket
from parallel.grad_compression.powersgd import PowerSGD
from parallel.grad_compression.quantized import Dithered, nearest
from parallel.grad_compression.signs import signs
from parallel.grad_compression.topk import TopK


class Compressor(Protocol):
    """Bound to a bucket.

    Attributes
    ----------
    feedback : bool
        Whether what is lost has to be added to the next step's gradient.
    """

    feedback: bool

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: Any, step: int) -> Motion:
        """`out` = about the sum of all ranks' x, which may be the same array; `lost` = what this rank's share lacks.

        The lost of all ranks together is what is missing from the sum. It may be None where there is no `feedback`.
        """

    def state(self) -> dict[str, np.ndarray]:
        """What else it goes on from, by name, the same on all ranks: views that can be assigned to."""

    def close(self) -> None:
        """Collective."""


NONE = "none"
"""Nothing: plain sums."""

AUTO = "auto"
"""What an engine is told to find out: see `parallel.grad_compression.auto_select`."""


class Maker(NamedTuple):
    """Makes compressors, and says whether what they lose has to be kept.

    Attributes
    ----------
    make : callable (comm, bucket, seed) -> Compressor
        Collective.
    feedback : bool
    """

    make: Callable[[Communicator, Bucket, int], Compressor]
    feedback: bool

    def __call__(self, comm: Communicator, bucket: Bucket, seed: int) -> Compressor:
        """A compressor for a bucket. Collective."""
        return self.make(comm, bucket, seed)


class Kind(NamedTuple):
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

    make: Callable[[float], Callable[[Communicator, Bucket, int], Compressor]]
    default: float | None = None
    says: str = ""
    fits: Callable[[float], bool] = lambda number: True
    feedback: bool = True


COMPRESSORS: dict[str, Kind] = {
    "int8": Kind(lambda _: lambda comm, bucket, seed: nearest(8, comm, bucket)),
    "int4": Kind(lambda _: lambda comm, bucket, seed: nearest(4, comm, bucket)),
    "qsgd": Kind(
        lambda bits: lambda comm, bucket, seed: Dithered(int(bits), True, comm, bucket, seed),
        4,
        "bits, 2 to 8",
        lambda bits: bits in range(2, 9),
        feedback=False,
    ),
    "terngrad": Kind(lambda _: lambda comm, bucket, seed: Dithered(2, False, comm, bucket, seed), feedback=False),
    "sign": Kind(lambda _: signs),
    "topk": Kind(
        lambda share: lambda comm, bucket, seed: TopK(comm, bucket.span.size, share),
        0.01,
        "a share of the elements, above 0 and up to 1",
        lambda share: 0 < share <= 1,
    ),
    "powersgd": Kind(
        lambda rank: lambda comm, bucket, seed: PowerSGD(comm, bucket, int(rank), seed),
        2,
        "a rank, 1 or more",
        lambda rank: rank >= 1 and rank == int(rank),
    ),
}


def parse(text: str) -> Maker:
    """What a name, or a name and a number, stands for.

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
        return Maker(kind.make(0), kind.feedback)
    try:
        number = float(argument) if colon else kind.default
    except ValueError:
        number = np.nan
    if not (np.isfinite(number) and kind.fits(number)):
        raise ValueError(f"compress: {name} takes {kind.says}; found {argument!r}")
    return Maker(kind.make(number), kind.feedback)

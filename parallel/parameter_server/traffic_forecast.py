"""Forecast of a server's traffic from shapes: gradients up, weights down. No MPI.

A worker pushes the whole gradient of each of its parts, 1/S of it to each of S servers. With synchronous updates it
pulls all weights once per step in which it has a part; otherwise once before its first part and again after each part.
With `ssp`, weights that are too old at the next part are pulled in addition.
"""

from __future__ import annotations

from collections.abc import Iterable

from parallel.parameter_server.key_assignment import ServerKey


def up(keys: Iterable[ServerKey], server: int, parts: int, itemsize: int) -> int:
    """Bytes of gradients that a server receives from this number of parts; keys of tables are left out."""
    return parts * _elements(keys, server) * itemsize


def down(keys: Iterable[ServerKey], server: int, reads: int, itemsize: int) -> int:
    """Bytes of weights that a server sends for this number of reads of the whole model; keys of tables are left out."""
    return reads * _elements(keys, server) * itemsize


def reads(parts: Iterable[int], synchronous: bool) -> int:
    """Number of pulls of all weights by a worker with these numbers of parts per step.

    >>> reads([2, 0, 1], synchronous=True), reads([2, 0, 1], synchronous=False), reads([0, 0], synchronous=False)
    (2, 4, 0)
    """
    parts = list(parts)
    return sum(map(bool, parts)) if synchronous else sum(parts) + any(parts)


def _elements(keys: Iterable[ServerKey], server: int) -> int:
    return sum(key.span.size for key in keys if key.server == server and key.table is None)

"""What goes to and from a server, from shapes alone: gradients up, weights down. Knows no MPI.

A worker pushes the whole gradient of each of its parts, 1/S of it to each of S servers. Where steps are one update it
pulls all weights once for every step that it has a part of; else once before its first part, and anew after each. Under
`ssp` come those that were too old when the next part began.
"""

from __future__ import annotations

from collections.abc import Iterable

from parallel.parameter_server.key_assignment import Key


def up(keys: Iterable[Key], server: int, parts: int, itemsize: int) -> int:
    """Bytes of gradients that come to a server of so many parts, of keys that are no tables."""
    return parts * _elements(keys, server) * itemsize


def down(keys: Iterable[Key], server: int, reads: int, itemsize: int) -> int:
    """Bytes of weights that leave a server for so many reads of the whole model, of keys that are no tables."""
    return reads * _elements(keys, server) * itemsize


def reads(parts: Iterable[int], together: bool) -> int:
    """How often a worker pulls all weights, that has so many parts in each step.

    >>> reads([2, 0, 1], together=True), reads([2, 0, 1], together=False), reads([0, 0], together=False)
    (2, 4, 0)
    """
    parts = list(parts)
    return sum(map(bool, parts)) if together else sum(parts) + any(parts)


def _elements(keys: Iterable[Key], server: int) -> int:
    return sum(key.span.size for key in keys if key.server == server and key.table is None)

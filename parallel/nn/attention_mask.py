"""Attention masks as ranges of positions: each query sees the keys from one position up to another.

>>> AttentionMask(window=3).key_ranges(range(4, 6), range(0, 6))
KeyRanges(low=array([2, 3]), high=array([5, 6]))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel.nn.array_checks import whole_number


class KeyRanges(NamedTuple):
    """Keys that each query of a tile sees, as numbers within the tile of keys: `low` up to but excluding `high`."""

    low: np.ndarray
    high: np.ndarray

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        return int((self.high - self.low).sum())

    @property
    def span(self) -> slice:
        """Keys that at least one query sees, from the first to the last; there must be one."""
        seen = self.high > self.low
        return slice(int(self.low[seen].min()), int(self.high[seen].max()))


@dataclass(frozen=True)
class AttentionMask:
    """Rule by which a query at one position of the sequence sees the key at another.

    Parameters
    ----------
    causal : bool
        Keys at later positions are not seen.
    window : int
        Keys at a distance of `window` or more are not seen; 0: no limit.
    documents : tuple of int
        Ascending positions at which another document begins; keys of other documents are not seen.
    """

    causal: bool = True
    window: int = 0
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole_number("window", self.window)
        if any(second <= first for first, second in zip((0, *self.documents), self.documents)):
            raise ValueError(f"documents: expected ascending positions above 0, found {self.documents}")

    def seen_from(self, position: int) -> tuple[int, int | None]:
        """First position seen from `position`, and the first one after those (None: no end)."""
        document = bisect_right(self.documents, position)
        low = self.documents[document - 1] if document else 0
        high = self.documents[document] if document < len(self.documents) else None
        if self.window:
            low = max(low, position - self.window + 1)
            high = position + self.window if high is None else min(high, position + self.window)
        return low, position + 1 if self.causal else high

    def key_ranges(self, queries: range, keys: range) -> KeyRanges:
        """Ranges of `keys` that `queries` see; both are ascending ranges of positions."""
        return _key_ranges(self, queries, keys)

    def pairs(self, queries: Iterable[range], keys: Iterable[range]) -> int:
        """Number of pairs of a query and a key that it sees, over all these ranges of positions."""
        keys = list(keys)
        return sum(self.key_ranges(some, others).pairs for some in queries for others in keys)


CAUSAL = AttentionMask()
FULL = AttentionMask(causal=False)


@lru_cache(maxsize=1 << 14)
def _key_ranges(mask: AttentionMask, queries: range, keys: range) -> KeyRanges:
    limits = [mask.seen_from(position) for position in queries]
    low = [_before(keys, first) for first, _ in limits]
    high = [len(keys) if end is None else _before(keys, end) for _, end in limits]
    ranges = KeyRanges(np.array(low, np.int64), np.maximum(low, high).astype(np.int64))
    for array in ranges:
        array.flags.writeable = False
    return ranges


def _before(keys: range, position: int) -> int:
    """Number of `keys` below a position."""
    return min(max(-(-(position - keys.start) // keys.step), 0), len(keys))

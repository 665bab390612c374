"""Table of measured times by collective, form, ranks, placement and size, with interpolation."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from collectives.schedule.topology import Nodes
from collectives.selection.cost_model import BUILT_IN, Costs

NATIVE = "native"
"""The name of the MPI's own collective among the algorithms."""

Form: TypeAlias = Literal["blocking", "nonblocking", "persistent"]

BLOCKING: Form = "blocking"

MAX_RANKS_RATIO = 1.5
"""Measurements with another number of ranks count up to this ratio."""

MAX_SIZE_RATIO = 4.0
"""Measurements count for sizes outside of the measured range up to this ratio."""


class AlgorithmChoice(NamedTuple):
    """An algorithm's name, and the number of segments in which the data is pipelined through it."""

    algorithm: str
    segments: int = 1

    def __str__(self) -> str:
        return self.algorithm if self.segments == 1 else f"{self.algorithm} x{self.segments}"


def parse(label: str) -> AlgorithmChoice:
    """Parse an algorithm and its number of segments, such as ``chain x16``. ValueError unless that is 1 or more.

    >>> parse("chain x16"), str(AlgorithmChoice("ring"))
    (AlgorithmChoice(algorithm='chain', segments=16), 'ring')
    """
    name, _, text = label.partition(" x")
    segments = int(text or 1)
    if segments < 1:
        raise ValueError(f"segments: expected at least 1, found {label!r}")
    return AlgorithmChoice(name, segments)


Row: TypeAlias = Mapping[AlgorithmChoice, float]
"""Seconds of all choices that were measured at one size."""

Rows: TypeAlias = Mapping[int, Row]
"""Rows by bytes, in ascending order."""


class TimingKey(NamedTuple):
    """Key of a series of measured times. `placement` as returned by `shape`."""

    collective: str
    form: str
    ranks: int
    placement: str


class TimingTable(NamedTuple):
    """Costs fitted to a machine's memory and network, and measured times of collectives."""

    costs: Costs = BUILT_IN
    entries: Mapping[TimingKey, Rows] = {}

    def rows(
        self, collective: str, form: str, v_form: bool, ranks: int, nodes: Nodes | None
    ) -> Iterator[tuple[Rows, bool]]:
        """Yield the measured rows that apply to a call, best first, each with True if they are of exactly its form.

        The same form comes before blocking calls, and a v-form before equal blocks. Rows that are not exact compare
        our algorithms only: their native times do not hold for the call. Rows for another number of ranks apply up to
        `MAX_RANKS_RATIO`, if there are none for this one.
        """
        names = [f"{collective}v", collective] if v_form else [collective]
        for measured_form in dict.fromkeys((form, BLOCKING)):
            for name in names:
                found = self._nearest(name, measured_form, ranks, nodes)
                if found is not None:
                    yield found, (measured_form, name) == (form, names[0])

    def _nearest(self, collective: str, form: str, ranks: int, nodes: Nodes | None) -> Rows | None:
        placement = shape(nodes, ranks)
        exact = self.entries.get(TimingKey(collective, form, ranks, placement))
        if exact is not None or ranks <= 1:
            return exact
        near = {
            max(key.ranks / ranks, ranks / key.ranks): rows
            for key, rows in self.entries.items()
            if key[:2] == (collective, form)
            and key.ranks > 1
            and _placement_class(key.placement) == _placement_class(placement)
        }
        closest = min(near, default=math.inf)
        return near[closest] if closest <= MAX_RANKS_RATIO else None

    def merged(self, other: TimingTable) -> TimingTable:
        """Union of both tables. Rows of `other` replace rows of the same key and size. Its costs replace all costs."""
        entries = dict(self.entries)
        for key, rows in other.entries.items():
            entries[key] = dict(sorted({**entries.get(key, {}), **rows}.items()))
        return TimingTable(other.costs, entries)


def shape(nodes: Nodes | None, ranks: int) -> str:
    """Placement as text: number of ranks of each node, and "scattered" unless ranks of a node are consecutive.

    >>> shape(None, 4), shape((0, 0, 1, 1, 1), 5), shape((0, 1, 0, 1), 4), shape((0, 1, 2, 3), 4)
    ('4', '2+3', '2x2 scattered', '4x1')
    """
    if nodes is None:
        return str(ranks)
    counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    text = "+".join(f"{times}x{count}" if times > 1 else str(count) for count, times in runs)
    return text if list(nodes) == sorted(nodes) else f"{text} scattered"


def _placement_class(placement: str) -> str:
    """Class of a placement, comparable between numbers of ranks: one node, nodes of k ranks each, or itself."""
    return "one node" if placement.isdigit() else re.sub(r"^\d+x(?=\d+$)", "x", placement)


def interpolate(rows: Rows, nbytes: int) -> dict[AlgorithmChoice, float]:
    """Seconds of each choice at a size: log-log between measured sizes, nearest row just outside, {} far outside."""
    sizes = list(rows)
    at = bisect_left(sizes, nbytes)
    if at < len(sizes) and sizes[at] == nbytes:
        return dict(rows[nbytes])
    if at == len(sizes):
        return dict(rows[sizes[-1]]) if sizes and nbytes <= MAX_SIZE_RATIO * max(1, sizes[-1]) else {}
    if at == 0:
        return dict(rows[sizes[0]]) if MAX_SIZE_RATIO * nbytes >= sizes[0] or nbytes == 0 else {}
    low, high = sizes[at - 1], sizes[at]
    # times grow by powers of the size (1 + n keeps empty messages defined)
    share = math.log((1 + nbytes) / (1 + low)) / math.log((1 + high) / (1 + low))
    return {
        choice: seconds ** (1 - share) * rows[high][choice] ** share
        for choice, seconds in rows[low].items()
        if choice in rows[high]
    }

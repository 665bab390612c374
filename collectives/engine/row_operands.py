"""Operands of a program's rows for the interpreter: arrays in memories, their reductions, and lengths."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from collectives.engine.instructions import ABSOLUTE, COPY, INLINE, KIND, LABELS, LANDING, Kind
from collectives.engine.peer import bytes_at

Row = dict[str, int]
"""Fields of a row, and its index."""

RENDEZVOUS = 1 << 13
"""Bytes from which a message may go by its address, in a program for any length."""

FIRST_OWN = 1 << 10
"""Lowest number of a reduction of this engine. Lower ones are numbers of the compiled engine."""

reductions: dict[int, tuple[Callable[..., Any], np.dtype[Any]]] = {}
"""Function ``(left, right, out)`` and dtype of each reduction, by its number in rows."""


def reduction(function: Callable[..., Any], dtype: np.dtype[Any]) -> int:
    """Number of a reduction that only this engine has."""
    for number, (known, kind) in reductions.items():
        if known == function and kind == dtype:
            return number
    number = FIRST_OWN + len(reductions)
    reductions[number] = function, dtype
    return number


class RowOperands:
    """Rows and operands of a program, and views of its memories, whose addresses are in `bases`."""

    def __init__(self, rows: np.ndarray, operands: np.ndarray, bases: np.ndarray) -> None:
        names = *(rows.dtype.names or ()), "index"
        self._records = rows
        self._rows = [dict(zip(names, (*row, index))) for index, row in enumerate(rows.tolist())]
        self._operands = [dict(zip(operands.dtype.names or (), one)) for one in operands.tolist()]
        self._bases = bases
        self._known: list[int] = []  # addresses of the memories at which `_views` are
        self._views: dict[tuple[int, str], np.ndarray] = {}
        self._scale: Any = None

    def _update_views(self) -> None:
        """Drop views of memories that have moved."""
        if self._known != (bases := self._bases.tolist()):
            self._known = bases
            self._views.clear()

    def scale(
        self, record: np.ndarray, units: np.ndarray, order: np.ndarray, bounds: np.ndarray, may_choose: np.ndarray
    ) -> None:
        """Let the program run for any length, by its operands in chunks. See ``scale.c``."""
        self._scale, self._units, self._order, self._may_choose = record[0], units.tolist(), order, may_choose

    def resize(self, elements: int) -> None:
        """Set operands and labels for calls of so many elements."""
        scale = self._scale
        if scale is None or scale["length"] == elements:
            return
        scale["length"] = elements
        pieces, grain, itemsize, starts = (scale[name] for name in ("pieces", "grain", "itemsize", "starts"))
        whole, rest = divmod(elements, grain) if elements >= pieces * grain else (elements, 0)
        lengths = whole // pieces + (np.arange(pieces) < whole % pieces)
        if elements >= pieces * grain:
            lengths *= grain
            lengths[-1] += rest
        ends = []
        for first, stop in pairwise(starts.tolist()):
            ends.append([0, *np.cumsum(lengths[self._order[first:stop] % pieces] * itemsize).tolist()])
        sides = "left", "right", "out"
        for operand, (chunks, *rest) in zip(self._operands, self._units):
            for side, start, memory in zip(sides, rest[:3], rest[3:6]):
                if memory <= LANDING:
                    operand[f"{side}_offset"] = ends[memory][start]
                    operand["nbytes"] = ends[memory][start + chunks] - ends[memory][start]
        nbytes = int(scale["call_bytes"]) * elements
        # equal to `mark_of`: peers compare marks, and may run a program of one length
        mark = (int(scale["mark"]) + ((nbytes * 2654435761 & 0xFFFFFFFF) >> 20)) % (KIND // LABELS) * LABELS
        for row in self._rows:
            row["nbytes"] = sum(self._operands[number]["nbytes"] for number in self._numbers(row))
            self._records["nbytes"][row["index"]] = row["nbytes"]
            if row["kind"] in (Kind.SEND, Kind.RECV):
                self._label_row(row, mark, scale)
        self._views.clear()

    def _label_row(self, row: Row, mark: int, scale: Any) -> None:
        row["label"] = mark + min(row["nbytes"], INLINE + 1)
        in_parts = scale["part"] < row["nbytes"] <= scale["streamed"]
        row["part"] = int(scale["part"]) if in_parts else 0
        chooses = self._may_choose[row["index"]] and row["nbytes"] >= RENDEZVOUS
        is_long = row["nbytes"] > scale["cell_bytes"] and not in_parts
        by_address = row["kind"] == Kind.RECV or chooses or is_long
        row["address_label"] = mark + INLINE + 1 if by_address else 0

    def _address(self, place: tuple[int, int]) -> int:
        number, offset = place
        return offset if number == ABSOLUTE else int(self._known[number] + offset)

    def _array(self, number: int, side: str) -> np.ndarray:
        """Bytes of one side of an operand: left, right or out."""
        found = self._views.get((number, side))
        if found is None:
            operand = self._operands[number]
            found = bytes_at(self._address((operand[side], operand[f"{side}_offset"])), operand["nbytes"])
            self._views[number, side] = found
        return found

    @staticmethod
    def _numbers(row: Row) -> range:
        """Numbers of the operands of a row."""
        return range(row["first_operand"], row["first_operand"] + row["operands"])

    def _apply(self, row: Row, number: int, incoming: np.ndarray, start: int = 0) -> None:
        """Copy or reduce incoming data into an operand, from its byte `start` on."""
        stop = start + incoming.nbytes
        out = self._array(number, "out")[start:stop]
        if row["reduction"] == COPY:
            out[...] = incoming
            return
        function, dtype = reductions[row["reduction"]]
        pair = [incoming.view(dtype), self._array(number, "left")[start:stop].view(dtype)]
        function(*(pair[::-1] if row["mine_first"] else pair), out=out.view(dtype))

    def _compute(self, row: Row) -> bool:
        for number in self._numbers(row):
            left, out = self._array(number, "left"), self._array(number, "out")
            if row["reduction"] == COPY:
                out[...] = left
            else:
                function, dtype = reductions[row["reduction"]]
                right = self._array(number, "right")
                function(left.view(dtype), right.view(dtype), out=out.view(dtype))
        return True

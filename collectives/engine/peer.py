"""Mailboxes to and from one peer, as the interpreter reads and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.cross_memory import CrossMemoryAttach
from collectives.engine.instructions import ACKNOWLEDGED, INLINE, LINE, SENT, SHORT_SPACING, SLOTS, SPREAD

MASK = SLOTS - 1

MOST_SLOTS = 256
"""Views of slots that are kept for each peer."""


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """Bytes at an address. The caller keeps them alive."""
    if not nbytes:
        return np.empty(0, np.uint8)
    whole: Any = MPI.buffer.fromaddress(address, nbytes)
    return np.frombuffer(whole, np.uint8)


class Peer:
    """Mailboxes to and from a peer, by the record of the link. `counts` are its words."""

    def __init__(self, link: np.ndarray) -> None:
        self.record = link[0]
        self.counts = link.view(np.int64).data
        # read once: a field of a NumPy record takes long to read
        fixed: dict[str, int] = {
            name: int(self.record[name]) for name in link.dtype.names or () if name not in _GROWING
        }
        self.copied_bytes, self._cell_bytes, self._short_bytes = (
            fixed[name] for name in ("copied_bytes", "cell_bytes", "short_bytes")
        )
        self._starts = [[fixed[f"{kind}_{way}"] for kind in ("short", "cells")] for way in ("in", "out")]
        boxes = [bytes_at(fixed[name], SLOTS * LINE) for name in ("inbox", "outbox")]
        self.arrived, self.sent = (box.view(np.int64).data for box in boxes)
        self._beside = [box[8:] for box in boxes]
        self.my_ack, self.their_ack = (bytes_at(fixed[f"{who}_ack"], 8).view(np.int64).data for who in ("my", "their"))
        self.process = CrossMemoryAttach(fixed["pid"])
        self._slots: dict[tuple[int, int, bool], np.ndarray] = {}

    def has_room(self) -> bool:
        """True if a slot is free for the next message."""
        counts = self.counts
        if counts[SENT] + 1 - counts[ACKNOWLEDGED] > SLOTS:
            counts[ACKNOWLEDGED] = self.their_ack[0]
        return bool(counts[SENT] + 1 - counts[ACKNOWLEDGED] <= SLOTS)

    def slot(self, number: int, nbytes: int, outgoing: bool) -> np.ndarray:
        """Memory of a message: beside its flag, in a short buffer, or in a bounce buffer."""
        turn = 0
        if SPREAD <= nbytes <= self._cell_bytes:  # uses all of a bounce buffer in turn
            turn = number // SLOTS % max(1, self._cell_bytes // _padded(nbytes))
        key = number & MASK, nbytes, outgoing
        found = self._slots.get(key) if turn == 0 else None
        if found is None:
            found = self._slot(number & MASK, nbytes, outgoing, turn)
            if turn == 0:
                if len(self._slots) >= MOST_SLOTS:
                    self._slots.clear()
                self._slots[key] = found
        return found

    def _slot(self, slot: int, nbytes: int, outgoing: bool, turn: int) -> np.ndarray:
        if nbytes <= INLINE:
            return self._beside[outgoing][slot * LINE :][:nbytes]
        shorts, cells = self._starts[outgoing]
        if nbytes <= self._short_bytes:
            return bytes_at(shorts + slot * SHORT_SPACING * self._short_bytes, nbytes)
        return bytes_at(cells + slot * self._cell_bytes + turn * _padded(nbytes), nbytes)

    def has_mapped(self, address: int, nbytes: int) -> bool:
        """True if the peer has mapped this memory of this rank."""
        own = self.record["own"][: self.record["own_segments"]]
        return bool(((own["start"] <= address) & (address + nbytes <= own["end"])).any())

    def read(self, into: np.ndarray, address: int) -> None:
        """Read memory of the peer's process."""
        for one in self.record["theirs"][: self.record["peer_segments"]]:
            if one["start"] <= address and address + into.nbytes <= one["end"]:
                into[...] = bytes_at(int(one["here"] + address - one["start"]), into.nbytes)
                return
        self.process.read(MPI.Get_address(into), address, into.nbytes)


_GROWING = {"own", "theirs"}
"""Fields of a link that are not numbers."""


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE

"""Rows of messages through mailboxes, for the interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from collectives.engine.fence import memory_fence
from collectives.engine.instructions import (
    ACKNOWLEDGED,
    ADDRESSES,
    COPY,
    INLINE,
    KIND,
    LABELS,
    RECEIVED,
    SENT,
    WORDS,
)
from collectives.engine.peer import MASK, Peer
from collectives.engine.row_operands import Row, RowOperands


class MailboxRows(RowOperands):
    """Sends and receives of a program. `failed` is the index of a row whose message is not the expected one, or -1."""

    failed = -1
    _has_moved = False
    """A part of a message, or a row, is done."""

    def __init__(
        self, rows: np.ndarray, operands: np.ndarray, bases: np.ndarray, links: Sequence[np.ndarray], spare: np.ndarray
    ) -> None:
        super().__init__(rows, operands, bases)
        self._fence, self._links, self._spare = memory_fence(), links, spare
        self._peers: dict[int, Peer] = {}
        self._sent = [0] * len(rows)  # numbers of messages sent by address
        self._done = [0] * len(rows)  # bytes of the parts of messages that are done

    def _peer(self, row: Row) -> Peer:
        peer = self._peers.get(row["link"])
        if peer is None:
            peer = self._peers[row["link"]] = Peer(self._links[row["link"]])
        return peer

    def _addresses(self, row: Row, peer: Peer) -> list[tuple[int, int]]:
        """Address and length of each operand, if the receiver is to read them there. Else an empty list.

        It reads a message that is too long for a copy, or in memory that it has mapped.
        """
        if not row["address_label"]:
            return []
        operands = [self._operands[number] for number in self._numbers(row)]
        found = [(self._address((one["left"], one["left_offset"])), one["nbytes"]) for one in operands]
        is_long = (row["part"] or row["nbytes"]) > peer.copied_bytes  # each part is a copy
        return found if is_long or all(peer.has_mapped(*one) for one in found) else []

    def _send(self, row: Row) -> bool:
        peer = self._peer(row)
        if not peer.has_room():
            return False
        addresses = [] if self._done[row["index"]] else self._addresses(row, peer)  # begun in parts: goes on so
        if addresses:
            label = row["address_label"] + len(addresses)
            self._sent[row["index"]] = self._set_flag(peer, label, list(chain(*addresses)))
            return True
        self._sent[row["index"]] = 0
        while True:
            nbytes, start = self._next_part(row), self._done[row["index"]]
            target = peer.slot(peer.counts[SENT] + 1, nbytes, True)
            for operand, first, at, length in self._runs(row, start, nbytes):
                target[at : at + length] = self._array(operand, "left")[first : first + length]
            self._set_flag(peer, self._label(row, nbytes), [nbytes] if nbytes > INLINE else [])
            if start + nbytes == row["nbytes"]:
                self._done[row["index"]] = 0
                return True
            self._done[row["index"]], self._has_moved = start + nbytes, True
            if not peer.has_room():
                return False

    def _set_flag(self, peer: Peer, label: int, words: list[int]) -> int:
        """Set the flag of the next message, after the words beside it. Returns its number."""
        number = peer.counts[SENT] + 1
        at = (number & MASK) * WORDS
        for place, word in enumerate(words, at + 1):
            peer.sent[place] = word
        peer.counts[SENT] = number
        self._fence()  # the data must be visible before the flag
        peer.sent[at] = number * KIND + label
        return int(number)

    def _next_part(self, row: Row) -> int:
        """Bytes of the next part of a message, or of all of it."""
        left = row["nbytes"] - self._done[row["index"]]
        return min(row["part"], left) if row["part"] else left

    @staticmethod
    def _label(row: Row, nbytes: int) -> int:
        """Label of a message, or of a part of one, beside its flag or in a bounce buffer."""
        return row["label"] // LABELS * LABELS + min(nbytes, INLINE + 1) if row["part"] else row["label"]

    def _runs(self, row: Row, start: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Runs of a part in one operand each: number of the operand, first byte there and in the part, and bytes."""
        at = 0
        for operand in self._numbers(row):
            length = min(self._operands[operand]["nbytes"] - start, nbytes - at)
            if length > 0:
                yield operand, start, at, length
                at, start = at + length, start + length
            start -= self._operands[operand]["nbytes"]

    def _receive(self, row: Row) -> bool:
        peer, nbytes, done = self._peer(row), self._next_part(row), self._done[row["index"]]
        number = peer.counts[RECEIVED] + 1
        at = (number & MASK) * WORDS
        if peer.arrived[at] < number * KIND:
            return False
        self._fence()  # nothing below may be loaded before the flag
        found = peer.arrived[at] - number * KIND
        if found == self._label(row, nbytes) and (nbytes <= INLINE or peer.arrived[at + 1] == nbytes):
            source = peer.slot(number, nbytes, False)
            for operand, first, place, length in self._runs(row, done, nbytes):
                self._apply(row, operand, source[place : place + length], first)
        else:
            addresses = 0 if done else found - row["address_label"]
            words = peer.arrived[at + 1 : at + 1 + 2 * addresses].tolist() if 1 <= addresses <= ADDRESSES else []
            if not words or sum(words[1::2]) != row["nbytes"]:
                self.failed = row["index"]
                return False
            self._receive_by_address(row, peer, words[::2], words[1::2])
            nbytes = row["nbytes"]
        self._fence()  # all data must be read before the sender may overwrite it
        peer.counts[RECEIVED] = number
        peer.my_ack[0] = number
        done += nbytes
        self._done[row["index"]], self._has_moved = done % max(1, row["nbytes"]), True
        return done == row["nbytes"] or self._receive(row)

    def _receive_by_address(self, row: Row, peer: Peer, sources: list[int], lengths: list[int]) -> None:
        """Receive a message out of the sender's memory, in runs that are contiguous at both ends."""
        operand, filled = row["first_operand"], 0
        for source, length in zip(sources, lengths):
            while length:
                run = min(length, self._operands[operand]["nbytes"] - filled)
                if row["reduction"] != COPY:
                    run = min(run, self._spare.nbytes)
                    peer.read(self._spare[:run], source)
                    self._apply(row, operand, self._spare[:run], filled)
                elif run:
                    peer.read(self._array(operand, "out")[filled : filled + run], source)
                source, length, filled = source + run, length - run, filled + run
                if filled == self._operands[operand]["nbytes"]:
                    operand, filled = operand + 1, 0

    def _expect_none(self, row: Row) -> bool:
        peer = self._peer(row)
        number = peer.counts[RECEIVED] + 1
        if peer.arrived[(number & MASK) * WORDS] >= number * KIND:
            self.failed = row["index"]
            return False
        return True

    def _await_read(self, row: Row) -> bool:
        number, peer = self._sent[row["after"]], self._peer(self._rows[row["after"]])
        if peer.counts[ACKNOWLEDGED] < number:
            peer.counts[ACKNOWLEDGED] = peer.their_ack[0]
        return bool(peer.counts[ACKNOWLEDGED] >= number)

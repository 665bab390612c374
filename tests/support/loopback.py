"""Transport between threads of one process, for tests and teaching. Sends are synchronous, the strictest mode."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

from collectives.runtime.execution.local_steps import call_rounds
from collectives.transport.wire import BoundMessage, Iovec, Piece, Wire
from collectives.types import Wait


class _LoopbackMessage:
    """A bound message; `done` is False while it is in progress."""

    def __init__(self, source: int, target: int, pieces: Sequence[Iovec], sends: bool) -> None:
        self.pair = (source, target)
        self.pieces = list(pieces)
        self.sends = sends
        self.done = True

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class LoopbackHub:
    """Message matching for the ranks of one process. A wait of more than `patience` seconds counts as a deadlock."""

    def __init__(self, size: int, patience: float = 30.0) -> None:
        self.size = size
        self.patience = patience
        self.changed = threading.Condition()
        self._sends: dict[tuple[int, int], deque[_LoopbackMessage]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[_LoopbackMessage]] = defaultdict(deque)

    def wire(self, rank: int) -> Loopback:
        """Transport of one rank."""
        return Loopback(self, rank)

    def copy(self, source: _LoopbackMessage, target: _LoopbackMessage) -> None:
        """Copy a message; subclasses for other kinds of memory override it."""
        _copy(source, target)

    def start(self, message: _LoopbackMessage) -> None:
        with self.changed:
            message.done = False
            mine, others = (self._sends, self._receives) if message.sends else (self._receives, self._sends)
            if not others[message.pair]:
                mine[message.pair].append(message)
                return
            partner = others[message.pair].popleft()
            source, target = (message, partner) if message.sends else (partner, message)
            self.copy(source, target)
            source.done = target.done = True
            self.changed.notify_all()


def _copy(source: _LoopbackMessage, target: _LoopbackMessage) -> None:
    if source.nbytes != target.nbytes:
        raise ValueError(f"expected a message of {target.nbytes} bytes, found {source.nbytes}, pair {source.pair}")
    data = b"".join(ctypes.string_at(*piece) for piece in source.pieces)
    for address, nbytes in target.pieces:
        ctypes.memmove(address, data, nbytes)
        data = data[nbytes:]


class Loopback(Wire):
    """Transport of one rank on a hub."""

    def __init__(self, hub: LoopbackHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def send(self, peer: int, pieces: Sequence[Piece], stable: bool = True) -> BoundMessage:
        return self._bind(_LoopbackMessage(self._rank, peer, [piece.iovec for piece in pieces], sends=True))

    def receive(self, peer: int, pieces: Sequence[Piece]) -> BoundMessage:
        return self._bind(_LoopbackMessage(peer, self._rank, [piece.iovec for piece in pieces], sends=False))

    def _bind(self, message: _LoopbackMessage) -> BoundMessage:
        def wait() -> None:
            with self._hub.changed:
                if not self._hub.changed.wait_for(lambda: message.done, self._hub.patience):
                    raise TimeoutError(f"rank {self._rank} waited {self._hub.patience} s for message {message.pair}")

        steps = [partial(self._hub.start, message), Wait(wait, lambda: message.done)]
        start, end = call_rounds(steps)[0][0]
        return BoundMessage([start], [end])

    def free(self) -> None:
        """No resources to free."""

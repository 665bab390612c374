"""All ranks in one process: the wire that tests and teaching use. A send waits for its receiver, the strictest way."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

from collectives.transport.wire import Apart, Piece, Wait


class _Message:
    """One bound message; `done` while it is not under way."""

    def __init__(self, source: int, target: int, pieces: Sequence[Piece], sends: bool) -> None:
        self.pair = (source, target)
        self.pieces = list(pieces)
        self.sends = sends
        self.done = True

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Hub:
    """Where the ranks of one process meet. `patience` seconds without the awaited message are a deadlock."""

    def __init__(self, size: int, patience: float = 30.0) -> None:
        self.size = size
        self.patience = patience
        self.changed = threading.Condition()
        self._sends: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)

    def wire(self, rank: int) -> Loopback:
        """The wire of one rank."""
        return Loopback(self, rank)

    def copy(self, source: _Message, target: _Message) -> None:
        """Bring a message over; a hub for another kind of memory does it in another way."""
        _copy(source, target)

    def start(self, message: _Message) -> None:
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


def _copy(source: _Message, target: _Message) -> None:
    if source.nbytes != target.nbytes:
        raise ValueError(f"a message of {source.nbytes} bytes met room for {target.nbytes}, pair {source.pair}")
    data = b"".join(ctypes.string_at(*piece) for piece in source.pieces)
    for address, nbytes in target.pieces:
        ctypes.memmove(address, data, nbytes)
        data = data[nbytes:]


class Loopback(Apart):
    """One rank's end of the hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def send(self, peer: int, pieces: Sequence[Piece], stays: bool = True) -> _Message:
        return _Message(self._rank, peer, pieces, sends=True)

    def receive(self, peer: int, pieces: Sequence[Piece]) -> _Message:
        return _Message(peer, self._rank, pieces, sends=False)

    def starting(self, messages: Sequence[_Message]) -> Sequence[Callable[[], object]]:
        return [partial(self._hub.start, message) for message in messages]

    def waiting(self, messages: Sequence[_Message]) -> Sequence[Wait]:
        def test() -> bool:
            return all(message.done for message in messages)

        def wait() -> None:
            with self._hub.changed:
                if not self._hub.changed.wait_for(test, self._hub.patience):
                    late = [message.pair for message in messages if not message.done]
                    raise TimeoutError(f"rank {self._rank} waited {self._hub.patience} s for messages {late}")

        return [Wait(wait, test)]

    def free(self) -> None:
        """Nothing is held."""

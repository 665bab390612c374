"""Messages between servers and workers, and their binary format. No MPI.

| message | from, to | meaning | answer |
| --- | --- | --- | --- |
| DRAW | worker to first server | part `number` of step `before` is done; request the next part of `clock` | WORK |
| PULL | worker | request a key for step `clock`; of a table, the given rows | WEIGHTS, once the rule allows |
| PUSH | worker | gradient of a key from part `number` of step `clock`; of a table, the given rows | ACK |
| TICK | worker to all servers | the worker has made `clock` steps, the last one of `parts` parts | |
| READ | worker | request a key as it is; with `number`, a vector of its state for a checkpoint | COPY |
| REST | worker to all servers | the worker waits for all others | RESTED, once all wait |
| SQUARES | server to all servers | block sums of squares of its shard's gradient of step `clock` | |
| PROBLEM | any to all | the training has failed; last message of the sender | |
| AGAIN | first server to workers | a part must be redone: stop waiting and draw | |
| HELD | server to its predecessor in a chain | the tail has all messages up to number `at` | |
| GONE | head of a chain to its members | worker `sender` is dead | |
| LOST | message bus | the source is dead; its last message | |
| BYE | any to all servers | the sender needs the server no more | |

Every message may be sent twice. A push is identified by its part (`clock`, `number`): a server that has it
acknowledges and ignores it. A worker that draws without having finished its part gets the same part again. A tick
carries the absolute clock.
"""

from __future__ import annotations

import struct
from enum import IntEnum, auto
from typing import Any, NamedTuple


class MessageKind(IntEnum):
    """Kind of a message."""

    DRAW = auto()
    WORK = auto()
    PULL = auto()
    WEIGHTS = auto()
    PUSH = auto()
    ACK = auto()
    TICK = auto()
    READ = auto()
    COPY = auto()
    REST = auto()
    RESTED = auto()
    SQUARES = auto()
    PROBLEM = auto()
    AGAIN = auto()
    HELD = auto()
    GONE = auto()
    LOST = auto()
    BYE = auto()


class ServerMessage(NamedTuple):
    """Header of a message, without the vectors that follow.

    Attributes
    ----------
    kind : MessageKind
    key : int
        Number of a `ServerKey`.
    clock : int
        Step. Of WEIGHTS: number of steps of every worker in them.
    before : int
        Of DRAW: step of the finished part.
    number : int
        Part of the step; -1 for none.
    parts : int
        Number of parts of the step.
    rows : int
        Number of table rows that follow; -1 for the whole key.
    elements : int
        Length of the vector that follows (after the row numbers).
    targets : int
        Number of targets of the part.
    last : int
        Step after which the training ends; -1 if it is not set.
    stop : int
        1 if the sender requests to end.
    ticket : int
        Number of the worker's request, repeated in the answer.
    shard, at, sender : int
        Chain of the message, its number there, and its author (`replication_chain`).
    loss : float
        Summed over the part's targets.
    factor : float
        Scale of the pushed gradient. Of DRAW: norm of the part's gradient, per target.
    clocks : tuple of int
        Clocks of all workers, as known to the sender.
    """

    kind: MessageKind
    key: int = -1
    clock: int = 0
    before: int = -1
    number: int = -1
    parts: int = 0
    rows: int = -1
    elements: int = 0
    targets: int = 0
    last: int = -1
    stop: int = 0
    ticket: int = 0
    shard: int = -1
    at: int = 0
    sender: int = -1
    loss: float = 0.0
    factor: float = 0.0
    clocks: tuple[int, ...] = ()


class MessageFormat:
    """Binary format of headers, of fixed length.

    Parameters
    ----------
    workers : int
        Number of clocks.

    Examples
    --------
    >>> wire = MessageFormat(2)
    >>> message = ServerMessage(MessageKind.PUSH, key=3, clock=7, number=1, elements=256, clocks=(7, 6))
    >>> wire.unpack(wire.pack(message)) == message
    True
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._struct = struct.Struct(f"=15q2d{workers}q")
        self.nbytes = self._struct.size

    def pack(self, message: ServerMessage) -> bytes:
        """Pack a header; missing clocks become zeros."""
        *fixed, clocks = message
        return self._struct.pack(*fixed, *(clocks or (0,) * self._workers))

    def unpack(self, data: Any) -> ServerMessage:
        values = self._struct.unpack(data)
        fixed = dict(zip(ServerMessage._fields, values))
        return ServerMessage(
            **{**fixed, "kind": MessageKind(values[0]), "clocks": values[len(ServerMessage._fields) - 1 :]}
        )


class Envelope(NamedTuple):
    """Received message: rank of the sender, header, and vectors."""

    source: int
    message: ServerMessage
    vectors: tuple[Any, ...] = ()

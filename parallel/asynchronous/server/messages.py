"""Messages between servers and workers, and their binary format. No MPI.

| message | from, to | meaning | answer |
| --- | --- | --- | --- |
| DRAW | worker to first server | part `number` of step `before` is done. Request the next part of `clock` | WORK |
| PULL | worker | request a key for step `clock`; of a table: the given rows | WEIGHTS, once the rule allows |
| PUSH | worker | gradient of a key from part `number` of step `clock`; of a table, the given rows | ACK |
| TICK | worker to all servers | the worker has made `clock` steps, the last one of `parts` parts | |
| READ | worker | request a key as it is; with `number`, a vector of its state for a checkpoint | COPY |
| REST | worker to all servers | the worker waits for all others | RESTED, once all wait |
| SQUARES | server to all servers | block sums of squares of its shard's gradient of step `clock` | |
| PROBLEM | server to all, worker to all servers | the training has failed. Last message of the sender | |
| AGAIN | first server to workers | a part must be redone: stop waiting and draw | |
| HELD | server to its predecessor in a chain | the tail has all messages up to number `at` | |
| GONE | head of a chain to its members | worker `sender` is dead | |
| LOST | message bus | the source is dead. Its last message | |
| BYE | any to all servers | the sender needs the server no more | |

A DRAW has the records of the operators in the finished part, as bytes.

Every message may be sent twice. A push is identified by its part (`clock`, `number`): a server that has it
acknowledges and ignores it. A worker that draws without having finished its part gets the same part again. A tick
carries the absolute clock.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

MessageKind = IntEnum(
    "MessageKind",
    "DRAW WORK PULL WEIGHTS PUSH ACK TICK READ COPY REST RESTED SQUARES PROBLEM AGAIN HELD GONE LOST BYE",
)


class ServerMessage(NamedTuple):
    """Header of a message, without the vectors that follow."""

    kind: MessageKind
    key: int = -1  # number of a `ServerKey`
    clock: int = 0  # step. Of WEIGHTS: number of steps of every worker in them
    before: int = -1  # of DRAW: step of the finished part
    number: int = -1  # part of the step, -1 for none
    parts: int = 0  # number of parts of the step
    rows: int = -1  # number of table rows that follow, -1 for the whole key
    elements: int = 0  # length of the vector that follows (after the row numbers)
    last: int = -1  # step after which the training ends, -1 if it is not set
    stop: int = 0  # 1 if the sender requests to end
    ticket: int = 0  # number of the worker's request, repeated in the answer
    shard: int = -1  # chain of the message, its number in the chain, and its author (`replication_chain`)
    at: int = 0
    sender: int = -1
    targets: float = 0.0  # number of targets of the part
    loss: float = 0.0  # summed over the part's targets
    factor: float = 0.0  # scale of the pushed gradient. Of DRAW: norm of the part's gradient, per target
    clocks: tuple[int, ...] = ()  # clocks of all workers, as known to the sender


class MessageFormat:
    """Fixed-length binary format of message headers, with the clocks (finished steps) of `workers` workers."""

    def __init__(self, workers: int):
        self._workers = workers
        self._struct = struct.Struct(f"=14q3d{workers}q")
        self.nbytes = self._struct.size

    def pack(self, message: ServerMessage) -> bytes:
        """Pack a header. Missing clocks become zeros."""
        *fixed, clocks = message
        return self._struct.pack(*fixed, *(clocks or (0,) * self._workers))

    def unpack(self, data: Any) -> ServerMessage:
        kind, *fields = self._struct.unpack(data)
        fixed = len(ServerMessage._fields) - 2
        return ServerMessage._make([MessageKind(kind), *fields[:fixed], tuple(fields[fixed:])])


class Envelope(NamedTuple):
    """Received message: rank of the sender, header, and vectors."""

    source: int
    message: ServerMessage
    vectors: tuple[Any, ...] = ()


class MessageHandle:
    """Completion handle of a message. This base class, always done, is for messages that were dropped or copied."""

    def done(self) -> bool:
        """True if the message's vectors may be changed. Always so for a message that was dropped or copied."""
        return True


Awaits = Callable[[], Mapping[int, str]]
"""Function that returns what this rank waits for, by rank."""


class Mail:
    """Interface of a message bus. Users set ``accept(source, message)``. It returns buffers for received vectors."""

    accept: Callable[[int, ServerMessage], Sequence[Any]]

    def send(self, peer: int, message: ServerMessage, *vectors: Any) -> MessageHandle:
        raise NotImplementedError

    def poll(self) -> Envelope | None:
        raise NotImplementedError

    def idle(self, awaits: Awaits) -> None:
        """Pause after a `poll` without a message. Raises an exception if the wait is too long or in vain."""
        raise NotImplementedError

    def abandon(self, *kinds: MessageKind) -> None:
        """Forget open requests of these kinds: no resending, answers are dropped. No-op on a bus that never resends."""

"""What servers and workers say to each other. Knows no MPI.

| message | from | says | is answered by |
| --- | --- | --- | --- |
| DRAW | worker, to the first server | part `number` of step `before` is done; what is next of `clock`? | WORK |
| PULL | worker | may I have this key, to work on step `clock`? of a table, these rows | WEIGHTS, once the rule allows |
| PUSH | worker | the gradient of part `number` of step `clock` by this key; of a table, these rows of it | ACK |
| TICK | worker, to all servers | I have made `clock` steps, of `parts` parts the last | |
| READ | worker | this key as it is: for an evaluation; or, by `number`, what a checkpoint keeps of it | COPY |
| REST | worker, to all servers | I wait for all others | RESTED, once all have said so |
| SQUARES | server, to all servers | the block sums of squares of my part of the gradient of step `clock` | |
| PROBLEM | anyone, to all | it is over, and this is my last word | |
| AGAIN | the first server, to workers | a part waits to be done again: leave what you wait for, and draw | |
| HELD | server, to the one before it in a chain | the tail has all letters up to number `at` | |
| GONE | the head of a chain, to all of it | the worker `sender` is dead | |
| LOST | the post | the sender of this letter is dead, and this is its last | |
| BYE | anyone, to all servers | I need you no more | |

All may be said twice. A push is known by its part: (`clock`, `number`) is the sequence number of the work, whoever does
it, and a server that has it already answers, and does nothing. A worker that draws without having done what it has gets
the same again. A tick says where a clock stands, not that it moves.
"""

from __future__ import annotations

import struct
from enum import IntEnum, auto
from typing import Any, NamedTuple


class Kind(IntEnum):
    """What a message is."""

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


class Message(NamedTuple):
    """A message without the vectors that follow it.

    Attributes
    ----------
    kind : Kind
    key : int
        Which range of parameters it is about.
    clock : int
        Of which step. Of WEIGHTS: how many steps of every worker are in them.
    before : int
        Of DRAW: of which step the part was that is done.
    number : int
        Of which of its parts; -1 for none.
    parts : int
        How many parts the step has.
    rows : int
        How many rows of a table follow; -1 if all of the key does.
    elements : int
        Of the vector that follows, behind the numbers of rows.
    targets : int
        Of the part: what its loss is summed over.
    last : int
        The step after which all end, if anybody wishes to; -1 if nobody does.
    stop : int
        Whether the sender wishes to end.
    ticket : int
        A worker's number of what it asks, which the answer repeats.
    shard, at, sender : int
        Which server's chain the letter is about, its number there, and who wrote it; for `parallel.parameter_server.replication_chain`.
    loss : float
        Summed over the part's targets.
    factor : float
        What the pushed gradient is to be multiplied with. Of DRAW: the norm of the part's gradient, per target.
    clocks : tuple of int
        What the sender has heard of all workers' clocks.
    """

    kind: Kind
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


class Wire:
    """Messages as bytes of one length.

    Parameters
    ----------
    workers : int
        How many clocks there are.

    Examples
    --------
    >>> wire = Wire(2)
    >>> message = Message(Kind.PUSH, key=3, clock=7, number=1, elements=256, clocks=(7, 6))
    >>> wire.unpack(wire.pack(message)) == message
    True
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._struct = struct.Struct(f"=15q2d{workers}q")
        self.nbytes = self._struct.size

    def pack(self, message: Message) -> bytes:
        """A message without clocks has zeros in their place."""
        *fixed, clocks = message
        return self._struct.pack(*fixed, *(clocks or (0,) * self._workers))

    def unpack(self, data: Any) -> Message:
        """The message that was packed."""
        values = self._struct.unpack(data)
        fixed = dict(zip(Message._fields, values))
        return Message(**{**fixed, "kind": Kind(values[0]), "clocks": values[len(Message._fields) - 1 :]})


class Letter(NamedTuple):
    """A message that has arrived, from which rank, and the vectors that came with it."""

    source: int
    message: Message
    vectors: tuple[Any, ...] = ()

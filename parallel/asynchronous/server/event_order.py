"""Order in which a server handles messages: by arrival, or as recorded in an earlier run. No MPI.

Messages that are not allowed yet wait. Every choice becomes an entry of the server's record. In a replay workers read
the same weights, compute the same gradients, and servers apply them in the same order, so the weights are the same.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from parallel.asynchronous.server.messages import Envelope, MessageKind
from parallel.asynchronous.server.server_settings import ServerContext

ORDERED = frozenset({MessageKind.DRAW, MessageKind.PULL, MessageKind.PUSH, MessageKind.TICK, MessageKind.REST})
"""Kinds whose order influences the result. The others are handled at once."""

FORMAT = "chorus order 1"  # in the first line of a record file

RECORDED = ("seed", "precision", "reproducible", "clip", "servers", "consistency", "bucket_bytes", "first_bytes")
"""Settings that must be equal for a recorded order of events to be replayed."""


class EventEntry(NamedTuple):
    """Recorded message: kind, sender, key. `number` is the micro-batch given to a DRAW, -1 for none and other kinds."""

    kind: int
    source: int
    key: int
    number: int


class ReplayMismatch(RuntimeError):
    """The messages of a replay differ from the recorded ones."""


class EventOrder:
    """Queue of a server's received messages, handled in order of arrival or of `script`.

    The order goes to `record`.
    """

    def __init__(self, script: Sequence[EventEntry] | None = None, record: TextIO | None = None):
        self._script, self._record, self.waiting = script, record, list[Envelope]()
        self._handled = 0
        self._rests: dict[int, deque[bool]] = defaultdict(deque)  # of the messages to come, by sender
        for entry in script or ():
            self._rests[entry.source].append(entry.kind == MessageKind.REST)

    def put(self, envelope: Envelope) -> None:
        """Add a received message. `ReplayMismatch` if its sender's messages outnumber the record or differ in RESTs.

        Without RESTs between the same messages as recorded, some ranks would wait forever. The rest is not checked.
        """
        kind, source = envelope.message.kind, envelope.source
        if self._script is not None and kind in ORDERED:
            if not self._rests[source]:
                raise ReplayMismatch(f"replay: the record ends before a {kind.name} of rank {source}")
            if self._rests[source].popleft() != (kind is MessageKind.REST):
                raise ReplayMismatch("replay: tests and checkpoints must come after the same steps as in the record")
        self.waiting.append(envelope)

    def take(self, allowed: Callable[[Envelope], bool]) -> Envelope | None:
        """Remove and return the first waiting message that is allowed and, in a replay, next in the script.

        Otherwise None.

        Kinds outside `ORDERED` are returned regardless of both.
        """
        for at, envelope in enumerate(self.waiting):
            if envelope.message.kind not in ORDERED or (self._is_next(envelope) and allowed(envelope)):
                return self.waiting.pop(at)
        return None

    def _is_next(self, envelope: Envelope) -> bool:
        """True if a message has the kind, sender and key of the script's next entry, or if there is no script."""
        found = envelope.message.kind, envelope.source, envelope.message.key
        return self._script is None or self._script[self._handled][:3] == found

    def expect_drawn(self, number: int, clock: int, parts: int) -> None:
        """`ReplayMismatch` if the record gave the DRAW just taken another micro-batch than `number` (-1: none)."""
        if self._script is not None and self._script[self._handled].number != number:
            text = f"as many micro-batches in step {clock} as in the record, found {parts}"
            raise ReplayMismatch(f"replay: expected {text}")

    def note(self, envelope: Envelope, number: int = -1) -> None:
        self._handled += 1
        if self._record is not None:
            entry = int(envelope.message.kind), envelope.source, envelope.message.key, number
            self._record.write(" ".join(map(str, entry)) + "\n")

    def flush(self) -> None:
        if self._record is not None:
            self._record.flush()

    def close(self) -> None:
        """Close the record file. No message may be handled afterwards."""
        if self._record is not None:
            self._record.close()

    def clear(self) -> None:
        self.waiting = []


def create(path: Path, facts: Mapping[str, Any]) -> TextIO:
    """Create or overwrite a record file that begins with `facts`: settings (JSON values) to be equal in a replay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w", encoding="utf-8")
    file.write(json.dumps({"format": FORMAT, **facts}) + "\n")
    return file


def read(path: Path, facts: Mapping[str, Any]) -> list[EventEntry]:
    """Read the entries of a record file. ValueError if it is no record or was written with other `facts`."""
    head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    try:
        found = json.loads(head)
        entries = [EventEntry(*map(int, line.split())) for line in lines]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no record of an order: {error}") from error
    found = found if isinstance(found, dict) else {}
    for name, value in json.loads(json.dumps({"format": FORMAT, **facts})).items():
        if found.get(name) != value:
            raise ValueError(f"{path} is of another training: {name} is {value} here, and {found.get(name)} there")
    return entries


def open_order(context: ServerContext) -> EventOrder:
    """New event order of this rank. On servers with opened files to record to and to replay, if set."""
    settings, rank = context.settings, context.plan.rank
    if rank in context.workers:
        return EventOrder()
    facts = {name: getattr(settings, name) for name in RECORDED}
    facts["optimizer"] = [(f"optimizer's {what}", value) for what, value in context.optimizer.describe().items()]
    facts |= {"ranks": context.plan.ranks, "keys": [key.span for key in context.keys]}
    script = read(Path(f"{settings.replay}.{rank}"), facts) if settings.replay else None
    return EventOrder(script, create(Path(f"{settings.record}.{rank}"), facts) if settings.record else None)

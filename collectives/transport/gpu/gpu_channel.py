"""Meetings of ranks on a board in shared host memory, before calls with arrays on GPUs: posts, and their versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from collectives.engine.assembly import Instruction, MemoryOperand, Place
from collectives.engine.extension import reduction_number
from collectives.engine.instructions import ABSOLUTE, Kind
from collectives.transport.gpu.exported_memory import HANDLE, ExportedBlock
from collectives.transport.gpu.gpu_kernels import MOST_RANKS

if TYPE_CHECKING:
    from collectives.transport.gpu.shared_gpu import SharedGpu

LEADER = 0
"""Rank on the node whose stream runs the kernels."""

PATIENCE = 2e-3
"""Most seconds for which a blocking call waits for its stream, or for the leader's kernels, before it uses an event."""

BLOCK = np.dtype([("block", "i8"), ("start", "i8"), ("count", "i8")])
RECORD = np.dtype(
    [
        ("mark", "i8"),
        ("parts", "i8"),
        ("event", f"V{HANDLE}"),
        ("source", f"V{HANDLE}"),
        ("target", f"V{HANDLE}"),
        ("sent", BLOCK, MOST_RANKS),
        ("received", BLOCK, MOST_RANKS),
    ]
)
"""Record that a rank posts of a call: its mark (or `ON_HOST`) and the places of its buffers.

Then the number of parts to run the call in, and handles of the rank's event and of the memory of its buffers. Blocks of
that memory: number (-1: none), offset in bytes, count of units.
"""

ENTRY = np.dtype(
    [("number", "i8"), ("launched", "i8"), ("posted", "i8", 2), ("version", "i8", 2), ("records", RECORD, 2)]
)
"""State of one rank on one channel: number of its latest meeting or call with host arrays, and of the latest launch (of
the leader). Then of its two latest posts, that with an even number first: their numbers, the versions of their records,
negative if the leader's stream is to wait for the rank's event, and the records. A rank posts after all have reached
the number before, and so have read the post that it replaces."""

LAUNCHED, POSTED, VERSION = 1, 2, 4
"""Places of these fields of an entry, in words of 8 bytes. The number is the first word."""

HEADER = 64
"""Bytes of a board before a rank's entries."""

ON_HOST = -1
"""Mark of a rank whose arrays are not on the GPU, or that has no space on it."""


class Post(NamedTuple):
    """Record, and its version: a number that differs between the records of a rank on a channel.

    A record of a version that is known need not be written, or read, again.
    """

    record: np.ndarray
    version: int


class GpuChannel:
    """Meetings of one channel: numbers, this rank's event, and its workspace. One call at a time runs on a channel."""

    def __init__(self, gpu: SharedGpu, number: int) -> None:
        self.gpu, self.number, self._version = gpu, 0, 0
        self._at = (HEADER + number * ENTRY.itemsize) // 8
        self._records = [one[number]["records"] for one in gpu.entries]
        count = gpu.entries[gpu.rank]["number"][number : number + 1]
        self._one = np.ones(1, np.int64)
        at, one = (Place(ABSOLUTE, array.ctypes.data) for array in (count, self._one))
        number = reduction_number(np.add, np.add, count.dtype)
        self.count = Instruction(Kind.LOCAL, [MemoryOperand(8, at, one, at)], reduction=number)
        """Counts a call with host arrays."""

        self.event, self.handle = gpu.exported.new_event()
        self._counted = self.new_post(ON_HOST).record
        self._events: dict[int, int] = {}
        self._workspaces: dict[str, ExportedBlock] = {}
        with gpu.cupy.cuda.Device(gpu.device):
            self.unused = gpu.cupy.cuda.Event(disable_timing=True)
        """End of the work on the workspaces. The next call waits for it, since it may be on another stream."""

    def workspace(self, end: str, nbytes: int) -> ExportedBlock:
        """Exported memory for the "source" or "target" of a call. RuntimeError or MemoryError if CUDA refuses."""
        if end not in self._workspaces or self._workspaces[end].nbytes < nbytes:
            self._workspaces[end] = self.gpu.exported.allocate(nbytes)  # the smaller one stays open elsewhere
        return self._workspaces[end]

    def meet(self, post: Post, waits: bool = False) -> Iterator[None]:
        """Post, and iterate until all ranks have posted or counted. `waits`: for this rank's event, recorded before."""
        at, own, fence = self._at, self.gpu.words[self.gpu.rank], self.gpu.node_memory.fence
        self.number = number = own[at] + 1
        yield from self._reached(number - 1)
        turn = number % 2
        if abs(own[at + VERSION + turn]) != post.version:
            self._records[self.gpu.rank][turn] = post.record
        own[at + VERSION + turn], own[at + POSTED + turn] = -post.version if waits else post.version, number
        if fence is not None:
            fence()
        own[at] = number
        yield from self._reached(number)
        if fence is not None:
            fence()

    def _reached(self, number: int) -> Iterator[None]:
        """Iterate until all ranks have posted or counted `number` calls."""
        at, boards = self._at, self.gpu.words
        for words in boards:
            while words[at] < number:
                if self.gpu.watch.is_due:
                    self.gpu.watch.check(place for place, other in enumerate(boards) if other[at] < number)
                yield

    def new_post(self, mark: int, parts: int = 1) -> Post:
        """Post without buffers."""
        record = np.zeros((), RECORD)
        record["mark"], record["parts"], record["event"] = mark, parts, np.void(self.handle)
        record["sent"]["block"] = record["received"]["block"] = -1
        self._version += 1
        return Post(record, self._version)

    @property
    def versions(self) -> list[int]:
        """Versions of the records of this meeting, by rank. 0 for a rank that has only counted.

        Negative if the leader's stream is to wait for the rank's event.
        """
        number = self.number
        posted, version = self._at + POSTED + number % 2, self._at + VERSION + number % 2
        return [words[version] if words[posted] == number else 0 for words in self.gpu.words]

    @property
    def records(self) -> list[np.ndarray]:
        """Records of this meeting, by rank. One without buffers for a rank that has only counted."""
        turn = self.number % 2
        posts = zip(self.versions, self._records)
        return [records[turn] if version else self._counted for version, records in posts]

    def event_of(self, rank: int) -> int:
        """CUDA's number of the event of a rank that has posted in this meeting."""
        if rank not in self._events:
            handle = self._records[rank][self.number % 2]["event"].tobytes()
            self._events[rank] = self.gpu.exported.open_event(handle)
        return self._events[rank]

    def show_launch(self) -> None:
        """Show the other ranks that the leader's event is recorded."""
        self.gpu.node_memory.fence()
        self.gpu.words[self.gpu.rank][self._at + LAUNCHED] = self.number

    def is_launched(self) -> bool:
        return bool(self.gpu.words[LEADER][self._at + LAUNCHED] >= self.number)


def set_place(record: np.ndarray, end: str, handle: bytes, blocks: Sequence[tuple[int, int, int]]) -> None:
    """Write to a record the handle of its "source" or "target", and the blocks in it: (block, offset, count)."""
    record[end] = np.void(handle.ljust(HANDLE, b"\0"))
    rows = record["sent" if end == "source" else "received"]
    rows[: len(blocks)] = blocks

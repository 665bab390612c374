"""Collectives of Python objects, as collectives of frames of fixed length and, after them, of what did not fit there.

So they progress active requests, and a wait for a rank that has left ends in an error. Where an object of one rank
cannot be pickled, all ranks that would receive it raise.
"""

# mypy: disable-error-code="override"

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms.neighbors import Neighbors
from collectives.engine.extension import read_frames
from collectives.engine.instructions import FRAME
from collectives.runtime.execution.progress import progress_until
from collectives.runtime.methods.collective_methods import CollectiveMethods, NeighborMethods
from collectives.runtime.methods.inherited_methods import Inherited
from collectives.runtime.methods.object_messages import (
    ReceivedObject,
    SentObject,
    copied,
    lower_blocks,
    sent_objects,
    tree,
)
from collectives.transport.waits import Others, limited

MOST_REDUCED = 8
"""Ranks up to which the objects of a reduction are reduced where they are needed, of all ranks. On more ranks mpi4py's
tree reduces them in less time, though it first waits for all."""

TAG = 0
"""Tag of blocking calls on the private communicator."""

_loads = MPI.pickle.loads


class _Exchange(Inherited):
    """Frames, and messages of what follows them."""

    _rank: int
    _size: int
    _open_planner: Any
    _break_off: Any
    _agreed: Any

    @cached_property
    def _frame(self) -> np.ndarray:
        """Frame of an object."""
        return np.zeros(FRAME, np.uint8)

    @cached_property
    def _frames(self) -> tuple[np.ndarray, np.ndarray]:
        """Frames for all ranks, and of all ranks."""
        return np.zeros((self._size, FRAME), np.uint8), np.zeros((self._size, FRAME), np.uint8)

    def _exchange(
        self,
        name: str,
        frames: np.ndarray,
        senders: Sequence[int],
        sent: Sequence[tuple[int, SentObject]],
        order: Sequence[int] | None = None,
    ) -> list[Any]:
        """Objects whose `frames` have come from `senders`, by rank; send what follows the frames of those `sent`.

        None of sender -1. Objects of one sender arrive in `order` of their places.
        """
        found: list[Any] | None = None
        if not any(one.parts for _, one in sent) and (order is None or min(senders, default=0) >= 0):
            found = read_frames(frames, _loads)
        if found is not None:
            return found
        received = [ReceivedObject(frame) if peer >= 0 else None for peer, frame in zip(senders, frames)]
        arrivals = [(senders[at], received[at]) for at in (range(len(senders)) if order is None else order)]
        comm = self._open_planner().comm
        try:
            requests = [
                *(comm.Irecv([part, MPI.BYTE], peer, TAG) for peer, one in arrivals if one for part in one.parts),
                *(comm.Isend([part, MPI.BYTE], peer, TAG) for peer, one in sent for part in one.parts),
            ]
            with limited(self._agreed.timeout, self._rank):
                progress_until(lambda: MPI.Request.Testall(requests), Others(name, "for their objects"))
        except BaseException as error:
            self._open_planner().cache.poison(name, error, None, received, sent)
            self._break_off("blocking", error, name)
            raise
        for _, one in sent:
            if one.problem is not None:
                raise one.problem
        return [one if one is None else one.load(name, peer) for peer, one in zip(senders, received)]


class ObjectMethods(_Exchange, CollectiveMethods):
    """Collectives of objects, with the arguments and results of mpi4py's.

    Arrays of 32 KiB and more are not copied into a pickle. None, numbers and tuples of numbers are not pickled.
    """

    def _alone(self, obj: Any) -> Any:
        """An object of the only rank, as it would be received."""
        self._open_planner()
        return copied(obj, self._frame)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of `root`, on all ranks. Collective."""
        if self._size == 1 and root == 0:
            return self._alone(obj)
        frame, sent = self._frame, None
        if self._rank == root:
            sent = SentObject(obj, frame)
        self.Bcast(frame, root)
        if sent is None:
            if (found := read_frames(frame, _loads)) is not None:
                return found[0]
            received = ReceivedObject(frame)
            for part in received.parts:
                self.Bcast(part, root)
            return received.load("bcast", root)
        for part in sent.parts:
            self.Bcast(part, root)
        return sent.load()

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks, as a list on `root`, None on others. Collective."""
        if self._size == 1 and root == 0:
            return [self._alone(sendobj)]
        frame, is_root = self._frame, self._rank == root
        frames = self._frames[1] if is_root else None
        sent = SentObject(sendobj, frame)
        self.Gather(frame, frames, root)
        if frames is not None:
            return self._exchange("gather", frames, range(self._size), [(root, sent)])
        if sent.parts or sent.problem:
            self._exchange("gather", frame[:0], (), [(root, sent)])
        return None

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """This rank's one of the p objects of `root`. Collective."""
        frame, sent, frames = self._frame, [], None
        if self._rank == root:
            frames = self._frames[0]
            sent = sent_objects(sendobj, frames)
        self.Scatter(frames, frame, root)
        return self._exchange("scatter", frame.reshape(1, FRAME), [root], list(enumerate(sent)))[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, as a list. Collective."""
        if self._size == 1:
            return [self._alone(sendobj)]
        frame, frames = self._frame, self._frames[1]
        sent = SentObject(sendobj, frame)
        self.Allgather(frame, frames)
        if not sent.parts and (found := read_frames(frames, _loads)) is not None:
            return found
        every = [sent if rank == self._rank else ReceivedObject(frame) for rank, frame in enumerate(frames)]
        for rank, one in enumerate(every):
            for part in one.parts:
                self.Bcast(part, rank)
        mine = sent.load()
        return [one.load("allgather", r) if isinstance(one, ReceivedObject) else mine for r, one in enumerate(every)]

    def alltoall(self, sendobj: Any) -> list[Any]:
        """The objects that each rank has for this one, as a list. `sendobj` has p objects. Collective."""
        outgoing, incoming = self._frames
        sent = sent_objects(sendobj, outgoing)
        self.Alltoall(outgoing, incoming)
        return self._exchange("alltoall", incoming, range(self._size), list(enumerate(sent)))

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        """The objects of all ranks reduced by ``op(left, right)`` on `root`, None on others. Collective.

        Neighbouring ranks are combined first, then pairs of these, as mpi4py does it.
        """
        if self._size > MOST_REDUCED:
            return super().reduce(sendobj, op, root)
        found = self.gather(sendobj, root)
        return None if found is None else tree(found, op)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """As `reduce`, on all ranks. Collective."""
        if self._size > MOST_REDUCED:
            return super().allreduce(sendobj, op)
        return tree(self.allgather(sendobj), op)

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """The objects of ranks 0 to this one, reduced by ``op(left, right)``. Collective."""
        if self._size > MOST_REDUCED:
            return super().scan(sendobj, op)
        found = self.allgather(sendobj)[: self._rank + 1]
        return reduce(lambda right, left: op(left, right), lower_blocks(found, op), found[-1])

    def exscan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """The objects of the ranks below this one, reduced by ``op(left, right)``; None on rank 0. Collective."""
        if self._size > MOST_REDUCED:
            return super().exscan(sendobj, op)
        blocks = lower_blocks(self.allgather(sendobj)[: self._rank + 1], op)
        nearest = next(blocks, None)
        return reduce(lambda right, left: op(left, right), blocks, nearest)


class NeighborObjectMethods(_Exchange, NeighborMethods):
    """Collectives of neighbours in a topology, of objects too, with the arguments and results of mpi4py's."""

    _neighbors: Neighbors

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all sources, as a list. None of a source that does not exist. Collective."""
        frame, (sources, destinations, order) = self._frame, self._neighbors
        frames = np.zeros((len(sources), FRAME), np.uint8)
        sent = SentObject(sendobj, frame)
        self.Neighbor_allgather(frame, frames)
        messages = [(rank, sent) for rank in destinations if rank >= 0]
        return self._exchange("neighbor_allgather", frames, sources, messages, order)

    def neighbor_alltoall(self, sendobj: Any) -> list[Any]:
        """The objects of all sources, as a list. `sendobj` has one for each destination. Collective."""
        sources, destinations, order = self._neighbors
        outgoing, frames = (np.zeros((len(side), FRAME), np.uint8) for side in (destinations, sources))
        sent = sent_objects(sendobj, outgoing)
        self.Neighbor_alltoall(outgoing, frames)
        messages = [(rank, one) for rank, one in zip(destinations, sent) if rank >= 0]
        return self._exchange("neighbor_alltoall", frames, sources, messages, order)

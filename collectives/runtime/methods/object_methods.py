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
from collectives.engine.extension import read_frames, write_all
from collectives.engine.instructions import FRAME
from collectives.runtime.execution.progress import progress_until
from collectives.runtime.methods.collective_methods import CollectiveMethods, NeighborMethods
from collectives.runtime.methods.inherited_methods import Inherited
from collectives.runtime.methods.object_messages import (
    PartMessages,
    ReceivedObject,
    SentObject,
    copied,
    lower_blocks,
    sent_objects,
    tree,
)
from collectives.runtime.requests.request_lists import wait_all
from collectives.transport.waits import limited

MOST_REDUCED = 8
"""Ranks up to which the objects of a reduction are reduced where they are needed, of all ranks. On more ranks mpi4py's
tree reduces them in less time, though it first waits for all."""

LONG = 1 << 20
"""Bytes of a part beside whose message this rank copies its own objects."""

_loads = MPI.pickle.loads


class ObjectExchange(Inherited):
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

    def _spread(self, parts: Sequence[np.ndarray], root: int) -> list[Any]:
        """Broadcast what follows a frame. Returns requests of the long parts."""
        requests = []
        for part in parts:
            if len(part) < LONG:
                self.Bcast(part, root)
            else:
                requests.append(self.Ibcast(part, root))
        return requests

    def _wait(self, name: str, requests: Sequence[Any] | PartMessages, *memory: object) -> None:
        """Wait for what follows the frames. After an error no later call is trusted, as messages may still arrive."""
        try:
            if isinstance(requests, PartMessages):
                with limited(self._agreed.timeout, self._rank), requests:
                    progress_until(requests.are_complete, requests)
            elif requests:
                wait_all(requests, timeout=self._agreed.timeout)
        except BaseException as error:
            self._open_planner().cache.poison(name, error, None, *memory)
            self._break_off("blocking", error, name)
            raise

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
        rank, places = self._rank, range(len(senders)) if order is None else order
        mine = iter([one for peer, one in sent if peer == rank])
        found: list[Any] = [None] * len(senders)
        incoming: list[tuple[int, np.ndarray]] = []
        for at in places:
            if (peer := senders[at]) == rank:
                found[at] = next(mine)
            elif peer >= 0:
                found[at] = ReceivedObject(frames[at])
                incoming += [(peer, part) for part in found[at].parts]
        outgoing = [(peer, part) for peer, one in sent if peer != rank for part in one.parts]
        requests: Any = []
        if self._size == 2:  # a broadcast is a message then
            for root in range(2):
                requests += self._spread([part for _, part in (outgoing if root == rank else incoming)], root)
        else:
            requests = PartMessages(name, self._open_planner().comm, incoming, outgoing)
        try:
            own = {at: found[at].load() for at, peer in enumerate(senders) if peer == rank}
        finally:
            self._wait(name, requests, incoming, outgoing)
        for _, one in sent:
            one.check()
        return [
            own[at] if peer == rank else None if peer < 0 else found[at].load(name, peer)
            for at, peer in enumerate(senders)
        ]


class ObjectMethods(ObjectExchange, CollectiveMethods):
    """Collectives of objects, with the arguments and results of mpi4py's.

    Arrays of 32 KiB and more are not copied into a pickle. None, numbers and strings are not pickled, nor are lists,
    tuples and dictionaries of these.
    """

    def _alone(self, obj: Any) -> Any:
        """An object of the only rank, as it would be received."""
        self._open_planner()
        return copied(obj)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of `root`, on all ranks. Collective."""
        return self._alone(obj) if self._size == 1 and root == 0 else self._bcast(obj, root)

    def _bcast(self, obj: Any, root: int, problem: Exception | None = None) -> Any:
        """`bcast`, or of an error of the root in place of the object. Other ranks raise their own error at its end."""
        frame = self._frame
        if self._rank == root:
            sent = SentObject(obj, frame)
            if problem is not None:
                sent.fail(problem, frame)
            self.Bcast(frame, root)
            requests = self._spread(sent.parts, root)
            try:
                return sent.load()
            finally:
                self._wait("bcast", requests, sent.parts)
        self.Bcast(frame, root)
        if (found := read_frames(frame, _loads)) is not None and problem is None:
            return found[0]
        received = ReceivedObject(frame)
        self._wait("bcast", self._spread(received.parts, root), received.parts)
        if problem is not None:
            raise problem
        return received.load("bcast", root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks, as a list on `root`, None on others. Collective."""
        if self._size == 1 and root == 0:
            return [self._alone(sendobj)]
        frame = self._frame
        sent = SentObject(sendobj, frame)
        if self._rank != root:
            self.Gather(frame, None, root)
            if sent.parts:
                self._exchange("gather", frame[:0], (), [(root, sent)])
            sent.check()
            return None
        frames = self._frames[1]
        self.Gather(frame, frames, root)
        if not sent.parts and (found := read_frames(frames, _loads)) is not None:
            return found
        return self._exchange("gather", frames, range(self._size), [(root, sent)])

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """This rank's one of the p objects of `root`. Collective."""
        if self._size == 1 and root == 0 and type(sendobj) is list and len(sendobj) == 1:
            return self._alone(sendobj[0])
        frame = self._frame
        if self._rank == root:
            frames = self._frames[0]
            if write_all(frames, sendobj):
                self.Scatter(frames, frame, root)
                return copied(sendobj[root])
            sent = sent_objects(sendobj, frames)
            self.Scatter(frames, frame, root)
            return self._exchange("scatter", frame[None], [root], list(enumerate(sent)))[0]
        self.Scatter(None, frame, root)
        if (found := read_frames(frame, _loads)) is not None:
            return found[0]
        return self._exchange("scatter", frame[None], [root], ())[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all ranks, as a list. Collective."""
        if self._size == 1:
            return [self._alone(sendobj)]
        frame, frames = self._frame, self._frames[1]
        sent = SentObject(sendobj, frame)
        self.Allgather(frame, frames)
        if not sent.parts and (found := read_frames(frames, _loads)) is not None:
            return found
        every = [sent if rank == self._rank else ReceivedObject(one) for rank, one in enumerate(frames)]
        requests = [request for rank, one in enumerate(every) for request in self._spread(one.parts, rank)]
        try:
            mine = sent.load()
        finally:
            self._wait("allgather", requests, every)
        return [mine if isinstance(one, SentObject) else one.load("allgather", rank) for rank, one in enumerate(every)]

    def alltoall(self, sendobj: Any) -> list[Any]:
        """The objects that each rank has for this one, as a list. `sendobj` has p objects. Collective."""
        if self._size == 1 and type(sendobj) is list and len(sendobj) == 1:
            return [self._alone(sendobj[0])]
        outgoing, incoming = self._frames
        sent = () if write_all(outgoing, sendobj) else sent_objects(sendobj, outgoing)
        self.Alltoall(outgoing, incoming)
        if not any(one.parts for one in sent) and (found := read_frames(incoming, _loads)) is not None:
            return found
        return self._exchange(
            "alltoall", incoming, range(self._size), list(enumerate(sent or sent_objects(sendobj, outgoing)))
        )

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
        if self._size <= 2:
            return tree(self.allgather(sendobj), op)
        total = problem = None
        try:
            total = self.reduce(sendobj, op)
        except Exception as error:  # all ranks are to raise one
            if getattr(error, "left_collective", False):
                raise
            problem = error
        return self._bcast(total, 0, problem)

    def scan(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """The objects of ranks 0 to this one, reduced by ``op(left, right)``. Collective."""
        if self._size == 1:
            return self._alone(sendobj)
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


class NeighborObjectMethods(ObjectExchange, NeighborMethods):
    """Collectives of neighbours in a topology, of objects too, with the arguments and results of mpi4py's."""

    _neighbors: Neighbors

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """The objects of all sources, as a list. None of a source that does not exist. Collective."""
        frame, (sources, destinations, order) = self._frame, self._neighbors
        frames = np.zeros((len(sources), FRAME), np.uint8)
        sent = SentObject(sendobj, frame)
        self.Neighbor_allgather(frame, frames)
        messages = [(rank, sent) for rank in destinations if rank >= 0]
        found = self._exchange("neighbor_allgather", frames, sources, messages, order)
        sent.check()
        return found

    def neighbor_alltoall(self, sendobj: Any) -> list[Any]:
        """The objects of all sources, as a list. `sendobj` has one for each destination. Collective."""
        sources, destinations, order = self._neighbors
        outgoing, frames = (np.zeros((len(side), FRAME), np.uint8) for side in (destinations, sources))
        sent = sent_objects(sendobj, outgoing)
        self.Neighbor_alltoall(outgoing, frames)
        messages = [(rank, one) for rank, one in zip(destinations, sent) if rank >= 0]
        found = self._exchange("neighbor_alltoall", frames, sources, messages, order)
        for one in sent:
            one.check()
        return found

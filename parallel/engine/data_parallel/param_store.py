"""Parameter storage: replicated, or sharded and gathered on use."""

from collections.abc import Sequence

from mpi4py import MPI

from parallel.engine.data_parallel.grad_bucket import GradBucket, own_views
from parallel.engine.data_parallel.run_context import RunContext
from parallel.nn.flat_params import Span
from quant.types import Array


class ReplicatedParams:
    """Parameter storage with all weights on every rank.

    `spans` are updated by this rank, and `buckets` gathered by `allgather_updates` (none where every rank updates
    everything). `own` are the spans and their weights.
    """

    replicated = True

    def __init__(self, context: RunContext, spans: Sequence[Span], buckets: Sequence[GradBucket] = ()):
        self._context, self._buckets = context, buckets
        self.vector = context.memory.shared("parameters", context.flat.length, context.storage)
        context.flat.bind(self.vector)
        self.own = [(span, self.vector[context.flat.within(span)]) for span in spans]

    def begin(self, path: Sequence[int]) -> None: ...

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def allgather_updates(self) -> None:
        """All-gather each bucket's weights, of which every rank has updated its part. No-op in DDP. Collective."""
        for bucket in self._buckets:
            with self._context.recorder("communication", "allgather", bucket=bucket.number):
                run = self.vector[self._context.flat.within(bucket.span)]
                self._context.comm.Allgatherv(MPI.IN_PLACE, [run, bucket.counts])

    def close(self) -> None: ...


class ShardedParams:
    """Sharded parameter storage (ZeRO 3): a unit's weights are gathered on use, prefetched during the unit before.

    A bucket has a slot in memory, which it shares with buckets of other units: units with even and odd numbers take
    turns. A bucket that is still in its slot when it is needed again is not gathered again. Parameters of several units
    have slots of their own; no bucket has parameters of two units, unless all of its parameters have both.

    `users` are the units that use each bucket, ascending; `own` is this rank's part of each bucket.
    """

    replicated = False

    def __init__(self, context: RunContext, buckets: Sequence[GradBucket], users: Sequence[tuple[int, ...]]):
        self._context, self._buckets, self._users = context, buckets, users
        self.vector = context.memory.shared("parameters", sum(bucket.own.size for bucket in buckets), context.storage)
        self.own = own_views(self.vector, buckets)
        self._slot = resident_slots(users)
        sizes = slot_sizes(self._slot, buckets)
        slots = {slot: context.memory.shared("buffers", size, context.storage) for slot, size in sizes.items()}
        self._views: list[Array] = [slots[slot][: bucket.span.size] for slot, bucket in zip(self._slot, buckets)]
        self._requests = [
            context.comm.Allgatherv_init(part, [view, bucket.counts])
            for bucket, (_, part), view in zip(buckets, self.own, self._views)
        ]
        self._held: dict[object, int] = {}
        self._in_flight: set[int] = set()
        self._path: Sequence[int] = ()
        self._at = -1

    def begin(self, path: Sequence[int]) -> None:
        self._path, self._at = path, -1

    def unshard(self) -> None:
        """Gather the weights of the path's next unit, unless prefetched, bind them, and prefetch the unit after it."""
        self._at += 1
        here = self._needs(self._at)
        for number in here:
            self._fetch(number)
        for number in here:
            if number in self._in_flight:
                with self._context.recorder("communication", "gather", bucket=number):
                    self._requests[number].Wait()
                self._in_flight.remove(number)
            self._context.flat.bind(self._views[number], self._buckets[number].places, self._buckets[number].span.start)
        busy = {self._slot[number] for number in here}
        for number in self._needs(self._at + 1):
            if self._slot[number] not in busy:
                self._fetch(number)

    def reshard(self) -> None:
        """Unbind the current unit's parameters until `unshard`. Gathered weights stay in a buffer until its reuse."""
        for number in self._needs(self._at):
            for place in self._buckets[number].places:
                place.parameter.bind(None)

    def allgather_updates(self) -> None:
        """Invalidate gathered weights after an update, so that they are gathered again before use."""
        self._held.clear()

    def close(self) -> None:
        """Free the requests. One that is active, of a step that was broken off, is freed when it ends."""
        for request in self._requests:
            if not request.active:
                request.Free()
        self._requests = []

    def _needs(self, at: int) -> list[int]:
        if at >= len(self._path):
            return []
        return [number for number, users in enumerate(self._users) if self._path[at] in users]

    def _fetch(self, number: int) -> None:
        slot = self._slot[number]
        if self._held.get(slot) != number:
            self._held[slot] = number
            self._in_flight.add(number)
            with self._context.recorder("communication", "start gather", bucket=number):
                self._requests[number].Start()


def resident_slots(users: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Buffer slot of each bucket: (parity of its unit, index in the unit). Buckets of several units get their own."""
    slots: list[tuple[int, ...]] = []
    seen: dict[int, int] = {}
    for number, units in enumerate(users):
        if len(units) == 1:
            slots.append((units[0] % 2, seen.setdefault(units[0], 0)))
            seen[units[0]] += 1
        else:
            slots.append((2, 0, number))
    return slots


def slot_sizes(slots: Sequence[object], buckets: Sequence[GradBucket]) -> dict[object, int]:
    sizes: dict[object, int] = {}
    for slot, bucket in zip(slots, buckets):
        sizes[slot] = max(sizes.get(slot, 0), bucket.span.size)
    return sizes

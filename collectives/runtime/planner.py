"""From a call to a program that runs, in three forms; what is kept of them is bounded in number and memory.

Small blocking calls pass through slots; larger ones are bound to the user's own memory, and nothing is copied that the
algorithm does not need.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.runtime import native
from collectives.runtime.persistent_agreement import Channels, Sight, sight
from collectives.runtime.binding import (
    bound,
    changes_target,
    check_apart,
    combining,
    direct,
    ends_of,
    needs_staging,
    owners,
    reaches,
    task,
)
from collectives.runtime.call import Call
from collectives.algorithms.catalog import build
from collectives.runtime.binder import Memory, Program, bind
from collectives.kept import KEPT, NEW, Kept, quickly_done
from collectives.runtime.count_exchange import Lengths, asking, learns
from collectives.selection.timing_table import NATIVE, Choice, Form
from collectives.schedule.topology import Nodes, numbered
from collectives.runtime.requests import Request, drive
from collectives.runtime.single_exchange import shorten
from collectives.runtime.eager_buffers import Slots, longest, suits
from collectives.buffers.staging import Device
from collectives.schedule.steps import Recv, RecvReduce, Send
from collectives.transport.device import cuda_aware
from collectives.transport.shared_heap import Heap
from collectives.transport.mailbox import Edge, Node
from collectives.transport.mpi import Immediate, Persistent
from collectives.transport.shm import Nearest, Shared
from collectives.transport.fused_exchange import Compiled
from collectives.transport.wire import Wire

BLOCKING_CHANNEL = 0
"""The channel of the node's mailboxes for the same calls."""

BLOCKING_TAG = 0
"""The tag of blocking calls, of which a communicator has one at a time; all others have one of their own."""


def _neighbours(comm: MPI.Intracomm, nodes: Nodes | None) -> MPI.Intracomm:
    """The ranks that share memory with this one, and the node that the placement gives it."""
    sharing = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    if nodes is None:
        return sharing
    together = MPI.Intracomm(sharing.Split(nodes[comm.Get_rank()]))
    sharing.Free()
    return together


class Plans:
    """The programs of one communicator, over a private communicator of the MPI underneath.

    Parameters
    ----------
    comm : MPI.Intracomm
        Used for nothing else, so that messages never meet the user's. `free` frees it.
    aware : bool or None
        Whether its messages may lie in device memory, if all ranks say so; None asks the MPI.
    shared : bool
        Whether ranks of one node talk through shared memory. Not where messages may lie in device memory: no rank
        knows whether those of its peers do, and both ends of a message must take the same wire.
    nodes : sequence of int, optional
        The node of every rank, the same sequence on all ranks, where it is not for the MPI to say. Ranks on different
        nodes share no memory, even if they could.

    Attributes
    ----------
    nodes : tuple of int or None
        Which ranks share a node; None if all do.
    kept : Kept
        Programs of blocking calls.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        aware: bool | None = None,
        shared: bool = True,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.comm = comm
        named = None if nodes is None else numbered(nodes)
        neighbours = _neighbours(comm, named)
        self.nodes = named if nodes is not None else numbered(comm.allgather(neighbours.bcast(comm.Get_rank())))
        self.aware = bool(comm.allreduce(cuda_aware() if aware is None else aware, MPI.LAND))
        shares = shared and not self.aware
        self.heap = Heap(comm, neighbours if shares else None)
        self.node = Node(neighbours, comm.Get_rank(), self.heap) if shares else None
        if self.node is None:
            neighbours.Free()
        self._edges: dict[int, dict[int, Edge]] = defaultdict(dict)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.kept = Kept(self.rank)
        self._littered = False  # messages of what was broken off may still lie about
        self._litter: list[Request] = []  # or come, into memory that these keep
        self._idle: dict[Hashable, list[Program]] = {}
        self._lengths: dict[Hashable, Lengths] = {}
        self._lent: weakref.WeakSet[Request] = weakref.WeakSet()  # those under way are in `requests.under_way`
        self._dropped: deque[tuple[Program, int | None]] = deque()  # at any moment, by requests that are gone
        self._channels = Channels(comm)
        self._resting = self._calls = self._inits = 0
        most = comm.Get_attr(MPI.TAG_UB)
        self._tags = (32767 if most is None else int(most)) // 2

    def allocate(self, nbytes: int) -> np.ndarray:
        """Bytes that the neighbours see: see `Heap.allocate`. Collective."""
        array = self.heap.allocate(nbytes)
        for edges in self._edges.values():
            for edge in edges.values():
                edge.look()
        return array

    def sight(self, call: Call) -> Sight:
        """What all ranks know of the memory of a call that is to be bound. Collective."""
        check_apart(call)
        return sight(self.comm, self.node, call)

    # -------------------------------------------------------------------------------- the three forms

    def run(
        self,
        call: Call,
        choice: Choice,
        known: tuple[Any, ...] = NEW,
        sendbuf: Any = None,
        recvbuf: Any = None,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Do a blocking call; `known` and the arguments are those of `Kept.again`, to remember it by."""
        self.kept.check_in_step()
        if learns(call, choice):
            call, known = self._learn(call, choice), NEW
        if needs_staging(call):
            self._run_elsewhere(call, choice)
            return
        small = self._fits_slots(call, choice)
        key = _key(call, choice, not small)
        kept = self.kept.bound.get(key)
        check_apart(call)
        if kept is None:
            kept = self._bind_slots(call, choice) if small else self._bind(call, choice, "blocking")
            self.kept.keep(key, kept)
        try:
            if isinstance(kept, Slots):
                kept.run(call)
            else:
                drive(kept)
        except BaseException as error:
            self.kept.forget(key)  # its messages may still be under way: never start them again
            self.kept.break_off(error)
            raise
        self.kept.know(known, sendbuf, recvbuf, op, key, partial(self._quickly, call, choice))

    def _quickly(self, call: Call, choice: Choice, s: np.ndarray, r: np.ndarray, program: Program) -> Compiled | None:
        """The call between such arrays in one compiled call; None if it is not so short."""
        if choice.algorithm == NATIVE:
            return None
        short = shorten(task(call, choice, self.rank, self.size, self.nodes))
        if short is None:
            return None
        return quickly_done(short, call, s, r, program, self._edges[BLOCKING_CHANNEL].get(short.peer))

    def _run_elsewhere(self, call: Call, choice: Choice) -> None:
        """Do a blocking call on data that is not dense host memory."""
        check_apart(call)
        call, device = self._where(call, choice)
        if device is None:
            program = self._bind(call, choice, "blocking")
            self._drive(program)
            program.free()
            return
        key = _key(call, choice, True, device)
        kept = self.kept.bound.get(key)
        if kept is None:
            kept = self._bind(call, choice, "blocking", device)
            self.kept.keep(key, kept)
        assert isinstance(kept, Program) and kept.lane is not None
        try:
            kept.lane.follow(*owners(call))
            self._drive(kept)
        except BaseException:
            self.kept.forget(key)
            raise

    def _drive(self, program: Program) -> None:
        try:
            drive(program)
        except BaseException as error:
            self.kept.break_off(error)
            raise

    def _where(self, call: Call, choice: Choice) -> tuple[Call, Device | None]:
        """The call as it is to be bound, and the device on which, if it need not be staged."""
        return (direct(call) if self.aware and choice.algorithm != NATIVE else None) or (call, None)

    def begin(self, call: Call, choice: Choice, gate: Callable[[], bool] | None) -> Request:
        """Begin a non-blocking call."""
        self._take_back()
        device = None
        if needs_staging(call):
            call, device = self._where(call, choice)
        unlike = learns(call, choice) or (needs_staging(call) and device is None)
        key = None if unlike else _key(call, choice, True, device)
        idle = self._idle.get(key)
        if idle:
            program = idle.pop()
            self._resting -= 1
            if not idle:
                del self._idle[key]
        else:
            check_apart(call)
            program = self._bind(call, choice, "nonblocking", device)
        if program.lane is not None:
            program.lane.follow(*owners(call))
        self._calls += 1  # only now that nothing can be refused: the ranks must count alike
        if isinstance(program.wire, Immediate):
            program.wire.tag = 1 + self._calls % (self._tags - 1)
        request = Request(call.collective, program, partial(self._rest, key), call)
        self._lent.add(request)
        request.begin(gate)
        return request

    def skip(self) -> None:
        """Use up the number that a non-blocking call would get: another rank may have begun one by mistake."""
        self._calls += 1

    def init(self, call: Call, choice: Choice, seen: bool = False) -> Request:
        """Bind a persistent call; `seen` is what `sight` says of it."""
        check_apart(call)
        self._inits += 1
        call, device = self._where(call, choice)
        first = [] if device is None else [partial(device.follow, *owners(call))]
        channel = None if self.node is None or choice.algorithm == NATIVE else self._take_channel()
        program = self._bind(call, choice, "persistent", device, first, channel, seen)
        request = Request(call.collective, program, partial(self._return, channel), call, persistent=True)
        request.finalizer = weakref.finalize(request, self._dropped.append, (program, channel))
        request.finalizer.atexit = False
        self._lent.add(request)
        return request

    def _take_channel(self) -> int | None:
        self._take_back()
        return self._channels.take()

    def _take_back(self) -> None:
        """Give back what requests held that were dropped without `Free`."""
        while self._dropped:
            self._give_back(*self._dropped.popleft())

    def _give_back(self, program: Program, channel: int | None) -> None:
        program.free()
        self._littered |= program.broken
        if channel is not None and not program.broken:
            self._channels.give_back(channel)

    def free(self) -> None:
        """Give everything back: programs, idle requests, shared memory, and the private communicator. Collective."""
        self.kept.free()
        for program in [program for programs in self._idle.values() for program in programs]:
            program.free()
        for lengths in self._lengths.values():
            lengths.program.free()
        for request in tuple(self._lent):
            if not request.active:
                request.Free()
        self._take_back()
        self._idle.clear()
        self._lengths.clear()
        self._lent.clear()
        self.heap.free()
        if self.node is not None:
            self.node.free()
        if not (self._littered or self.kept.broken):  # its number may go to another, which must not get those messages
            self.comm.Free()

    @property
    def under_way(self) -> int:
        """Operations that were begun and are not over."""
        return sum(request.active for request in self._lent)

    # -------------------------------------------------------------------------------- binding and keeping

    def _wire(self, form: Form, channel: int | None = BLOCKING_CHANNEL, itemsize: int = 1, seen: bool = False) -> Wire:
        """The wires for one stream of messages: MPI with a tag, and a channel of the node's mailboxes, if it has one.

        Messages are cut between elements, so one that no cell holds must be read where it lies, or be MPI's.
        """
        if form == "nonblocking":
            return Immediate(self.comm)
        tag = self._tags + self._inits % self._tags if form == "persistent" else BLOCKING_TAG
        far = Persistent(self.comm, tag)
        if self.node is None or channel is None or (itemsize > self.node.cells[channel] and not self.node.reads):
            return far
        compiles = form == "persistent" or self.kept.compiles
        return Nearest(Shared(self.node, channel, self._edges[channel], compiles, seen), far)

    def _bind(
        self,
        call: Call,
        choice: Choice,
        form: Form,
        device: Device | None = None,
        first: Sequence[Callable[[], object]] = (),
        channel: int | None = BLOCKING_CHANNEL,
        seen: bool = False,
    ) -> Program:
        if learns(call, choice):
            return self._bind_later(call, choice, self._wire(form, channel), device, first)
        if choice.algorithm != NATIVE:
            wire = self._wire(form, channel, call.unit.itemsize, seen)
            return bound(call, choice, self.rank, self.size, wire, device, first, self.nodes)
        call = native.settled(call)
        ends = ends_of(call, None)
        steps = [*first, *ends.first], ends.last
        program = native.program(self.comm, call, form, ends.source.array, ends.target.array, *steps)
        program.keep(ends.keep)
        return program

    def _bind_later(
        self, call: Call, choice: Choice, wire: Wire, device: Device | None, first: Sequence[Callable[[], object]]
    ) -> Program:
        """A program that asks for lengths and is bound when it knows them: where it starts again, once for all."""
        lengths = asking(call, choice, self.rank, self.size, wire, self.nodes)
        later: list[Program] = []

        def ask() -> None:
            if not later:
                lengths.tell(call)
                lengths.program.start()

        def begin() -> None:
            if not later:
                now = lengths.learned(call)
                later.append(bound(now, choice, self.rank, self.size, wire, device, first, self.nodes))
            later[0].start()

        def await_lengths() -> None:
            if not later:
                lengths.program.finish()

        calls = ask, await_lengths, begin, lambda: later[0].finish()
        tests = None, lambda: bool(later) or lengths.program.advance(), None, lambda: later[0].advance()
        return Program(calls, tests, wire, lengths.known.nbytes, lengths, device)

    def _learn(self, call: Call, choice: Choice) -> Call:
        """Ask for the lengths of a blocking call, all ranks together."""
        key = call.collective, choice.algorithm, call.root
        lengths = self._lengths.pop(key, None)  # back when all went well: messages may still be under way if not
        if lengths is None:
            lengths = asking(call, choice, self.rank, self.size, self._wire("blocking"), self.nodes)
        lengths.tell(call)
        self._drive(lengths.program)
        self._lengths[key] = lengths
        if len(self._lengths) > KEPT:
            self._lengths.pop(next(iter(self._lengths))).program.free()
        return lengths.learned(call)

    def _fits_slots(self, call: Call, choice: Choice) -> bool:
        """Whether the call is small, or no more than a swap, and suits slots."""
        nbytes = max(reaches(call)) * call.unit.itemsize
        return suits(call) and (nbytes <= longest() or self._swaps_only(call, choice, nbytes))

    def _swaps_only(self, call: Call, choice: Choice, nbytes: int) -> bool:
        """Whether a message for a message is all that this rank does: then nothing passes through the slots."""
        if call.source is None or call.target is None or call.source is call.target:
            return False
        if self.node is None or choice.algorithm == NATIVE or nbytes > self.node.cells[BLOCKING_CHANNEL]:
            return False
        algorithm, segments = choice
        rounds = build(call.collective, algorithm, self.rank, self.size, call.root, segments, self.nodes)
        steps = [step for steps in rounds for step in steps]
        if sum(map(bool, rounds)) > 1:
            return False
        kinds = [isinstance(step, Send) for step in steps if isinstance(step, (Send, Recv, RecvReduce))]
        if not all(self.node.reaches(step.peer) for step in steps if isinstance(step, (Send, Recv, RecvReduce))):
            return False
        return len(kinds) == len(steps) and kinds.count(True) <= 1 and kinds.count(False) <= 1

    def _bind_slots(self, call: Call, choice: Choice) -> Slots:
        spans = reaches(call)
        source = Memory.allocate(spans[0], call.unit)
        target = source if call.source is call.target else Memory.allocate(spans[1], call.unit)
        if choice.algorithm == NATIVE:
            program = native.program(self.comm, call, "blocking", source.array, target.array)
        else:
            schedule = task(call, choice, self.rank, self.size, self.nodes)
            program = bind(
                schedule, source, target, self._wire("blocking", itemsize=call.unit.itemsize), combining(call)
            )
        return Slots(program, source.array, target.array, bool(call.brings), changes_target(call))

    def _rest(self, key: Hashable, request: Request, program: Program) -> None:
        """A non-blocking call is over: keep its program for the next one like it."""
        self._lent.discard(request)
        if program.broken:
            self._littered = True
            self._litter.append(request)
            return
        if key is None:
            program.free()
            return
        self._idle.setdefault(key, []).append(program)
        self._resting += 1
        if self._resting > KEPT:
            oldest = next(iter(self._idle))
            self._idle[oldest].pop().free()
            self._resting -= 1
            if not self._idle[oldest]:
                del self._idle[oldest]

    def _return(self, channel: int | None, request: Request, program: Program) -> None:
        self._lent.discard(request)
        self._give_back(program, channel)


def _key(call: Call, choice: Choice, addresses: bool, device: Device | None = None) -> Hashable:
    """What two calls must have in common to share a program."""
    where: tuple[object, ...] = (call.source is call.target, None if device is None else device.number)
    if addresses:
        where += tuple(None if b is None else b.address for b in (call.source, call.target))
    blocks = tuple(call.brings.items()), tuple(call.takes.items())
    what = call.collective, call.uneven, choice
    return (*what, call.lengths, call.unit, call.root, call.op, call.moved, blocks, where)

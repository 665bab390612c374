"""From a call to a program that runs: bound once, kept while it is of use, bounded in number and memory.

Small calls pass through slots that the program owns, since copying a few bytes costs less than binding to every new
address; larger ones are bound to the user's own memory, and nothing is copied that the algorithm does not need.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import buffers, native
from collectives.buffers import Buffer
from collectives.calls import Blocks, Call, staged
from collectives.catalog import blocks, build, find
from collectives.chunks import Layout, Place, even
from collectives.errors import InvalidArgument, OutOfStep
from collectives.execute import SOURCE, TARGET, Combining, Memory, Program, Task, bind
from collectives.measured import NATIVE, Choice, Form
from collectives.ops import on_device
from collectives.placement import Nodes, numbered
from collectives.requests import Request, under_way, until
from collectives.select import relays
from collectives.semantics import MEANINGS
from collectives.short import Short, shorten
from collectives.staging import Device, device_of, stage
from collectives.steps import Recv, RecvReduce, Send
from collectives.transport import compiled
from collectives.transport.device import cuda_aware
from collectives.transport.heap import Heap
from collectives.transport.mailbox import CHANNELS, Edge, Node
from collectives.transport.mpi import Immediate, Persistent
from collectives.transport.shm import Nearest, Shared
from collectives.transport.swap import Compiled, compile_swap
from collectives.transport.wire import Piece, Wait, Wire

SLOT = 4096
"""Bytes up to which a blocking call passes through slots."""

COMPILED = 1 << 15
"""The same where short calls are compiled once they are made often: then nothing passes through slots."""

SWAPPED = 1 << 18
"""The same, of a call that only swaps a message for a message: it goes straight between the user's arrays."""

SEGMENT = 1 << 18
"""Bytes in which a long message that is to be combined travels: a few fit the second-level cache."""

KEPT = 256
"""Programs that are kept for calls to come, of blocking and of non-blocking ones each."""

KEPT_BYTES = 1 << 28
"""Scratch memory that the kept programs of blocking calls may hold together."""

LINE = 64
"""Bytes to whose multiples a vector is cut where it is long enough."""

_READY = 0x0401
"""NumPy's flags of an array that is C-contiguous and writeable."""

_ndarray, _address, _IN_PLACE = np.ndarray, MPI.Get_address, MPI.IN_PLACE

BLOCKING_CHANNEL = 0
"""The channel of the node's mailboxes for the same calls."""

BLOCKING_TAG = 0
"""The tag of blocking calls, of which a communicator has one at a time; all others have one of their own."""


def task(call: Call, choice: Choice, rank: int, size: int, nodes: Nodes | None = None) -> Task:
    """The schedule of the choice, laid over the call's memory."""
    schedule = build(call.collective, choice.algorithm, rank, size, call.root, choice.segments, nodes)
    itemsize = call.unit.itemsize
    memory = TARGET if call.source is call.target else SOURCE
    if MEANINGS[call.collective].vector:
        lengths = even(
            call.lengths[0], blocks(call.collective, choice.algorithm, size) * choice.segments, max(1, LINE // itemsize)
        )
        starts = dict(enumerate(Layout.packed(lengths).offsets))
        source = _places(memory, starts if call.brings else {}, lengths, 1)
        target = _places(TARGET, starts if call.takes else {}, lengths, 1)
    else:
        lengths = tuple(piece for length in call.lengths for piece in even(length, choice.segments))
        source = _places(memory, call.brings, lengths, choice.segments)
        target = _places(TARGET, call.takes, lengths, choice.segments)
    return Task(schedule, lengths, source, target, itemsize, SEGMENT if call.combine else 0)


def _places(memory: int, blocks: Blocks, lengths: tuple[int, ...], parts: int) -> dict[int, Place]:
    places = {}
    for block, start in blocks.items():
        for chunk in range(block * parts, (block + 1) * parts):
            places[chunk] = Place(memory, start, start + lengths[chunk])
            start += lengths[chunk]
    return places


class _Ends(NamedTuple):
    """A call's two memories, and what must be done before and after the rounds."""

    source: Memory
    target: Memory
    first: list[Callable[[], object] | Wait]
    last: list[Callable[[], object] | Wait]
    keep: list[object]


def _span(call: Call, blocks: Blocks) -> int:
    """Units from the beginning of a buffer to the end of its last block."""
    return max((start + call.lengths[block] for block, start in blocks.items() if call.lengths[block]), default=0)


def _spans(call: Call) -> tuple[int, int]:
    """Units that source and target reach; in place they are one memory that both share."""
    source, target = _span(call, call.brings), _span(call, call.takes)
    return (max(source, target),) * 2 if call.source is call.target else (source, target)


def _stores(call: Call) -> bool:
    """Whether the call changes the target: the root of a broadcast has what it takes already."""
    untouched = call.source is call.target and call.combine is None and call.takes.keys() <= call.brings.keys()
    return bool(call.takes) and not untouched


def _check_apart(call: Call) -> None:
    source, target = call.source, call.target
    if source is None or target is None or source is target or source.device != target.device:
        return
    if not (call.brings and call.takes and source.contiguous and target.contiguous):
        return
    ends = [span * call.unit.itemsize for span in _spans(call)]
    if all(ends) and source.address < target.address + ends[1] and target.address < source.address + ends[0]:
        raise InvalidArgument(MPI.ERR_BUFFER, "sendbuf and recvbuf overlap; to work in place pass MPI.IN_PLACE")


def _ends(call: Call, device: Device | None) -> _Ends:
    """The user's memory as the program sees it: itself on the device, if one is given."""
    first: list[Callable[[], object] | Wait] = []
    last: list[Callable[[], object] | Wait] = []
    keep: list[object] = []

    def memory(buffer: Buffer | None, span: int, load: bool, store: bool) -> Memory:
        if buffer is None:
            return Memory((device or np).empty(0, call.unit), 0)
        if device is not None:
            return Memory(device.view(buffer.address, span, call.unit), buffer.address)
        if not staged(buffer):
            return Memory(buffers.view(buffer.address, span, call.unit), buffer.address)
        staging = stage(buffer, load, store)
        keep.append(staging)
        first.extend(staging.loading)
        last.extend(staging.storing)
        array = staging.host.view(call.unit)
        return Memory(array, MPI.Get_address(staging.host))

    spans, stores = _spans(call), _stores(call)
    if call.source is call.target:
        source = target = memory(call.target, spans[1], bool(call.brings), stores)
    elif call.snapshot:
        target = memory(call.target, spans[1], True, stores)
        source = Memory.allocate(spans[0], call.unit, device or np)
        copy = partial(source.array.__setitem__, slice(None), target.array[: spans[0]])
        first.append(copy if device is None else device.working(copy))
    else:
        source = memory(call.source, spans[0], bool(call.brings), False)
        target = memory(call.target, spans[1], False, stores)
    if call.moved >= 0:
        start, length = call.takes[call.moved], call.lengths[call.moved]
        home, wanted = target.array[start : start + length], target.array[:length]
        move = partial(wanted.__setitem__, slice(None), home) if device is None else partial(_move, wanted, home)
        last.insert(0, move)
    return _Ends(source, target, first, last, keep)


def _move(target: Any, source: Any) -> None:
    target[...] = source.copy()  # they may overlap, which NumPy alone minds


def direct(call: Call) -> tuple[Call, Device] | None:
    """The call on the device that all of its memory lies on; None if there is none, or it cannot do its part."""
    ends = [buffer for buffer in (call.source, call.target) if buffer is not None]
    if not ends or not all(buffer.device and buffer.contiguous for buffer in ends):
        return None
    device, kernel = device_of(ends[0].owner), call.combine
    if not all(device.holds(buffer.owner) for buffer in ends[1:]):
        return None
    if kernel is not None:
        kernel = on_device(kernel, call.unit, device)
        if kernel is None:
            return None
    return call._replace(combine=kernel), device


def _owners(call: Call) -> list[Any]:
    return [buffer.owner for buffer in (call.source, call.target) if buffer is not None]


def bound(
    call: Call,
    choice: Choice,
    rank: int,
    size: int,
    wire: Wire,
    device: Device | None = None,
    first: Sequence[Callable[[], object]] = (),
    nodes: Nodes | None = None,
) -> Program:
    """The program of a call, on a device if one is given; `first` is done before all else."""
    ends = _ends(call, device)
    program = bind(
        task(call, choice, rank, size, nodes),
        ends.source,
        ends.target,
        wire,
        _combining(call),
        lane=device,
        first=[*first, *ends.first],
        last=ends.last,
    )
    program.keep(ends.keep)
    return program


class _Raw:
    """A reduction of elements that only MPI can describe, on arrays of as many raw bytes."""

    def __init__(self, combining: Combining) -> None:
        self._combining = combining

    def bind(self, left: Any, right: Any, out: Any) -> Callable[[], object]:
        return self._combining.bind(left.view(np.uint8), right.view(np.uint8), out.view(np.uint8))


def _combining(call: Call) -> Combining | None:
    if call.combine is not None and call.unit.type is np.void and call.unit.names is None:  # bfloat16 is of kind V too
        return _Raw(call.combine)
    return call.combine


def _neighbours(comm: MPI.Intracomm, nodes: Nodes | None) -> MPI.Intracomm:
    """The ranks that share memory with this one, and the node that the placement gives it."""
    sharing = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    if nodes is None:
        return sharing
    together = MPI.Intracomm(sharing.Split(nodes[comm.Get_rank()]))
    sharing.Free()
    return together


class Lengths(NamedTuple):
    """A program that sends the lengths of private blocks along the ways that the blocks will go.

    Whoever will pass a block on learns its length, so any schedule can do a call of which ranks know only their part.

    Attributes
    ----------
    known : numpy.ndarray of int64
        Units in every block, as far as this rank has to do with it.
    program : Program
        What makes it so, once `tell` has put in what the call says.
    """

    known: np.ndarray
    program: Program

    def tell(self, call: Call) -> None:
        """Put in the lengths of the blocks that the rank brings."""
        for block in call.brings:
            self.known[block] = call.lengths[block]

    def learned(self, call: Call) -> Call:
        """The call with all lengths that matter here; those of the blocks that it takes the call says itself."""
        lengths = self.known.tolist()
        for block in call.takes:
            lengths[block] = call.lengths[block]
        return call._replace(lengths=tuple(lengths), private=False)


class Sight(NamedTuple):
    """What all ranks know of a call's memory.

    Attributes
    ----------
    seen : bool
        Neighbours see whatever is sent where it lies.
    in_place : bool
    """

    seen: bool = False
    in_place: bool = False


BLIND = Sight()
"""Where nobody asked, or nobody sees anything."""


class Slots(NamedTuple):
    """A program on memory of its own, to copy into before it runs and out of after."""

    program: Program
    source: np.ndarray
    target: np.ndarray
    loads: bool
    stores: bool

    def run(self, call: Call) -> None:
        """Do the call through the slots."""
        if self.loads and call.source is not None:
            self.source[:] = buffers.view(call.source.address, self.source.size, call.unit)
        drive(self.program)
        if self.stores and call.target is not None:
            buffers.view(call.target.address, self.target.size, call.unit)[:] = self.target


def drive(program: Program) -> None:
    """Run to the end; while other operations are under way, they go on too."""
    if under_way:
        program.start()
        until(program.advance)
    else:
        program.run()


class Origin(NamedTuple):
    """What a known call comes from: its program, and under which key it is bound."""

    program: Program
    bound: Hashable


class Again(NamedTuple):
    """A blocking call with the very same arguments.

    `calls` are the program's; `load` and `store` its slots in the arrays' own shape. Where the last call would combine
    into the slot it is left out, and `finish` combines into the user's array at once. Where a message for a message is
    all there is, `swap` does that between the user's arrays.
    """

    swap: Callable[[Any, Any], None] | None
    calls: tuple[Callable[[], object], ...]
    load: np.ndarray | None
    store: np.ndarray | None
    finish: Callable[[np.ndarray], object] | None
    origin: Origin


NEW: tuple[Any, ...] = (None,)
"""What `Plans.again` gives for arguments that it cannot know again."""

_DONE, _NO = compiled.DONE, compiled.NO

WORTH_COMPILING = 100
"""Repeated short calls after which they are compiled: it takes a second, or less if it was done before."""

_SMALL, _LARGE = 9, 13
"""Lengths of the keys of a call: as far as the shapes and dtypes of its arrays, and their addresses too."""

_UFUNCS = {op.handle: ufunc for op, ufunc in ((MPI.SUM, np.add), (MPI.PROD, np.multiply), (MPI.MAX, np.maximum),
                                              (MPI.MIN, np.minimum))}  # fmt: skip
"""Operations that are compiled."""


def _key_without(
    name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
) -> tuple[Any, ...]:
    """The key of a call in which an array is None or MPI.IN_PLACE."""
    if sendbuf is None and recvbuf is None:
        return name, id(op), root, algorithm, segments
    sends, array = type(sendbuf) is _ndarray, sendbuf if type(sendbuf) is _ndarray else recvbuf
    other = recvbuf if sends else sendbuf
    if type(array) is not _ndarray or not (other is None or other is _IN_PLACE):
        return NEW
    if not array.flags.forc or not (sends or array.flags.writeable):
        return NEW
    key = name, id(op), root, algorithm, segments, sends, other, array.shape, array.dtype
    if array.nbytes > (COMPILED if compiled.available() else SLOT) or not array.flags.c_contiguous:
        return (*key, _address(array), array.strides, None, None)
    return key if array.flags.c_contiguous else NEW


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
        self._bound: dict[Hashable, Program | Slots] = {}
        self._again: dict[tuple[Any, ...], Again] = {}
        self._quick: dict[tuple[Any, ...], Compiled] = {}
        self._quickly: dict[tuple[Any, ...], Program] = {}
        self._repeats = 0
        self._broken: str | None = None  # what broke a blocking call off, after which none can be trusted
        self._littered = False  # messages of what was broken off may still lie about
        self._litter: list[Request] = []  # or come, into memory that these keep
        self._idle: dict[Hashable, list[Program]] = {}
        self._lengths: dict[Hashable, Lengths] = {}
        self._lent: weakref.WeakSet[Request] = weakref.WeakSet()  # those under way are in `requests.under_way`
        self._dropped: deque[tuple[Program, int | None]] = deque()  # at any moment, by requests that are gone
        self._channels: set[int] = set()  # that requests have given back
        self._held = self._resting = self._calls = self._inits = self._used = 0
        bound = comm.Get_attr(MPI.TAG_UB)
        self._tags = (32767 if bound is None else int(bound)) // 2

    def allocate(self, nbytes: int) -> np.ndarray:
        """Bytes that the neighbours see: see `Heap.allocate`. Collective."""
        array = self.heap.allocate(nbytes)
        for edges in self._edges.values():
            for edge in edges.values():
                edge.look()
        return array

    # -------------------------------------------------------------------------------- the three forms

    def again(
        self, name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
    ) -> tuple[Any, ...]:
        """Do a blocking call that was done before with the same kind of arrays; this is the way of nearly all calls.

        Returns an empty tuple if it is done, otherwise what `run` is to know it by the next time. Arrays that fit
        slots are known by shape and dtype, larger ones also by where they lie.
        """
        key: tuple[Any, ...]
        sends, receives = type(sendbuf) is _ndarray, type(recvbuf) is _ndarray
        if self._quick and (sends or receives) and not under_way:
            said = _NO
            try:
                if sends and receives:
                    s, r = sendbuf, recvbuf
                    quick = self._quick.get((name, id(op), root, algorithm, segments, s.nbytes, s.dtype))
                else:
                    s = r = sendbuf if sends else recvbuf
                    other = recvbuf if sends else sendbuf
                    quick = self._quick.get((name, id(op), root, algorithm, segments, s.nbytes, s.dtype, sends, other))
                if quick is not None:
                    said = quick[0](s, r, quick[1], quick[2])
            except TypeError:  # something that cannot be looked up, or other arrays than were compiled for
                pass
            except KeyboardInterrupt as error:
                self._break_off(error)
                raise
            if said == _DONE:
                return ()
            if said != _NO and quick is not None:
                try:
                    quick.finish(said, s, r)
                except BaseException as error:
                    self._break_off(error)
                    raise
                return ()
        if sends and receives:
            s, r = sendbuf, recvbuf
            key = (name, id(op), root, algorithm, segments, s.shape, s.dtype, r.shape, r.dtype)
            try:
                known = self._again.get(key)
            except TypeError:  # a root or a name that cannot be looked up: the long way says what is wrong with it
                return NEW
            if known is not None:
                if r.flags.num & _READY != _READY or not s.flags.c_contiguous:
                    return NEW
            elif s.nbytes > SLOT or r.nbytes > SLOT:
                if not (s.flags.forc and r.flags.forc):
                    return NEW
                key = (*key, _address(s), s.strides, _address(r), r.strides)
                known = self._again.get(key)
                if known is not None and not r.flags.writeable:
                    return NEW
        else:
            key = _key_without(name, sendbuf, recvbuf, op, root, algorithm, segments)
            try:
                known = self._again.get(key)
            except TypeError:
                return NEW
        if known is None:
            return key
        swap, calls, load, store, finish, origin = known
        try:
            if swap is not None and not under_way:
                swap(sendbuf, recvbuf)
                self._repeated()
                return ()
            if load is not None:
                load[...] = sendbuf if type(sendbuf) is _ndarray else recvbuf
            if under_way:
                drive(origin.program)
                finish = None
            else:
                for call in calls:
                    call()
        except BaseException as error:
            self._forget(origin.bound)
            self._break_off(error)
            raise
        if finish is not None:
            finish(recvbuf)
        elif store is not None:
            recvbuf[...] = store
        if load is not None or store is not None:
            self._repeated()
        return ()

    def _break_off(self, error: BaseException) -> None:
        """A blocking call ends in the middle: its messages may still come, or never leave. Trust no other after it."""
        self._broken = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._littered = True
        self._again.clear()
        self._quick.clear()
        self._quickly.clear()

    def check_in_step(self) -> None:
        """Refuse a blocking call after one that was broken off.

        Raises
        ------
        OutOfStep
            If there was one.
        """
        if self._broken is not None:
            message = (
                f"a blocking call was broken off on rank {self.rank} by {self._broken}; what comes now may be of it"
            )
            raise OutOfStep(MPI.ERR_OTHER, f"{message}: go on with a new Communicator")

    def _repeated(self) -> None:
        """Count short calls that were made before: if there are many, they are bound anew, and compiled."""
        self._repeats += 1
        if self._repeats == WORTH_COMPILING and compiled.available():
            for key in [key for key, kept in self._bound.items() if isinstance(kept, Slots)]:
                self._forget(key).free()

    @property
    def _compiles(self) -> bool:
        return self._repeats >= WORTH_COMPILING and compiled.available()

    def _compile(
        self, call: Call, choice: Choice, known: tuple[Any, ...], sendbuf: Any, recvbuf: Any, program: Program
    ) -> None:
        """From now on do such calls at once, if they are no more than a message out, one in, and a copy."""
        sends, receives = type(sendbuf) is _ndarray, type(recvbuf) is _ndarray
        s, r = sendbuf if sends else recvbuf, recvbuf if receives else sendbuf
        if not (sends or receives) or s.ndim != 1 or r.ndim != 1 or s.dtype != r.dtype or choice.algorithm == NATIVE:
            return
        short = shorten(task(call, choice, self.rank, self.size, self.nodes))
        quick = None if short is None else self._quickly_done(short, call, s, r, program)
        if quick is not None:
            other = () if sends and receives else (sends, recvbuf if sends else sendbuf)
            self._quick[*known, s.nbytes, s.dtype, *other] = quick
            self._quickly[*known, s.nbytes, s.dtype, *other] = program

    def _quickly_done(self, short: Short, call: Call, s: np.ndarray, r: np.ndarray, program: Program) -> Any:
        """The short call between such arrays in one compiled call; None if there is no such thing."""
        dtype, edge = s.dtype, self._edges[BLOCKING_CHANNEL].get(short.peer)
        several, rest = divmod(dtype.itemsize, call.unit.itemsize)
        counted = (*short.out, *short.into, short.mine or 0, *short.copy)
        reduces = short.mine is not None
        operation = _UFUNCS.get(call.operation.handle) if reduces and call.operation is not None else None
        if edge is None or dtype not in compiled.DTYPES or rest or any(number % several for number in counted):
            return None
        if reduces and (operation is None or call.unit != dtype):
            return None
        out, count, into, length, mine, origin, home, copied = (number // several for number in counted)
        if max(count, length) * dtype.itemsize > edge.cell:
            return None  # it travels in parts
        numbers = {
            compiled.SEND_BYTES: s.nbytes,
            compiled.RECV_BYTES: r.nbytes,
            compiled.OUT: out,
            compiled.OUT_COUNT: count,
            compiled.INTO: into,
            compiled.INTO_COUNT: length,
            compiled.MINE: mine,
            compiled.OPERATION: compiled.OPERATIONS.index(operation),
            compiled.MINE_FIRST: int(short.side == "right"),
            compiled.FROM: origin,
            compiled.TO: home,
            compiled.COPIED: copied,
            compiled.ONE: int(_address(s) == _address(r)),
        }
        spare = np.empty(length, dtype)
        message = program.wire.receive(short.peer, [Piece(_address(spare), spare.nbytes)])

        def told(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
            message.start()
            message.wait()
            goal = recvbuf[into : into + length]
            if operation is None:
                goal[...] = spare
            else:
                own = sendbuf[mine : mine + length]
                left, right = (own, spare) if short.side == "right" else (spare, own)
                operation(left, right, out=goal)

        return compile_swap(edge, dtype, numbers, told)

    def _know(
        self,
        known: tuple[Any, ...],
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op,
        bound: Hashable,
        call: Call | None = None,
        choice: Choice | None = None,
    ) -> None:
        """Remember that calls with such arguments are this program's."""
        kept = self._bound.get(bound)
        if known is NEW or kept is None or len(self._again) >= 4 * KEPT:
            return
        if isinstance(kept, Slots):
            known = known[:_SMALL] if len(known) >= _LARGE else known  # wherever the arrays lie
        elif len(known) < _LARGE:
            return  # known by shape only, but bound to an address
        if not op.is_predefined:
            return  # it may be freed, and another get its id
        if not isinstance(kept, Slots):
            self._again[known] = Again(None, kept.calls, None, None, None, Origin(kept, bound))
            return
        if any(type(array) is _ndarray and not array.flags.c_contiguous for array in (sendbuf, recvbuf)):
            return
        sent = sendbuf if type(sendbuf) is _ndarray else recvbuf
        load = _in_shape(kept.source, sent) if kept.loads else None
        store = _in_shape(kept.target, recvbuf) if kept.stores else None
        program, swap = kept.program, None
        if program.swap is not None and type(sendbuf) is _ndarray and type(recvbuf) is _ndarray:
            swap = program.swap.between(kept.source, kept.target, sendbuf, recvbuf)
        if self._compiles and call is not None and choice is not None:
            self._compile(call, choice, known[:5], sendbuf, recvbuf, program)
        calls, finish = program.calls, _finisher(program.calls, store)
        if finish is not None:
            calls = calls[:-1]
        self._again[known] = Again(swap, calls, load, store, finish, Origin(program, bound))

    def run(
        self,
        call: Call,
        choice: Choice,
        known: tuple[Any, ...] = NEW,
        sendbuf: Any = None,
        recvbuf: Any = None,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Do a blocking call; `known` and the arguments are those of `again`, to remember it by."""
        self.check_in_step()
        if _learns(call, choice):
            call, known = self._learn(call, choice), NEW
        if _needs_staging(call):
            self._run_elsewhere(call, choice)
            return
        small = self._fits_slots(call, choice)
        key = _key(call, choice, not small)
        kept = self._bound.get(key)
        _check_apart(call)
        if kept is None:
            kept = self._bind_slots(call, choice) if small else self._bind(call, choice, "blocking")
            self._keep(key, kept)
        try:
            if isinstance(kept, Slots):
                kept.run(call)
            else:
                drive(kept)
        except BaseException as error:
            self._forget(key)  # its messages may still be under way: never start them again
            self._break_off(error)
            raise
        self._know(known, sendbuf, recvbuf, op, key, call, choice)

    def _run_elsewhere(self, call: Call, choice: Choice) -> None:
        """Do a blocking call on data that is not dense host memory."""
        _check_apart(call)
        call, device = self._where(call, choice)
        if device is None:
            program = self._bind(call, choice, "blocking")
            self._drive(program)
            program.free()
            return
        key = _key(call, choice, True, device)
        kept = self._bound.get(key)
        if kept is None:
            kept = self._bind(call, choice, "blocking", device)
            self._keep(key, kept)
        assert isinstance(kept, Program) and kept.lane is not None
        try:
            kept.lane.follow(*_owners(call))
            self._drive(kept)
        except BaseException:
            self._forget(key)
            raise

    def _drive(self, program: Program) -> None:
        try:
            drive(program)
        except BaseException as error:
            self._break_off(error)
            raise

    def _where(self, call: Call, choice: Choice) -> tuple[Call, Device | None]:
        """The call as it is to be bound, and the device on which, if it need not be staged."""
        return (direct(call) if self.aware and choice.algorithm != NATIVE else None) or (call, None)

    def begin(self, call: Call, choice: Choice, gate: Callable[[], bool] | None) -> Request:
        """Begin a non-blocking call."""
        self._take_back()
        device = None
        if _needs_staging(call):
            call, device = self._where(call, choice)
        unlike = _learns(call, choice) or (_needs_staging(call) and device is None)
        key = None if unlike else _key(call, choice, True, device)
        idle = self._idle.get(key)
        if idle:
            program = idle.pop()
            self._resting -= 1
            if not idle:
                del self._idle[key]
        else:
            _check_apart(call)
            program = self._bind(call, choice, "nonblocking", device)
        if program.lane is not None:
            program.lane.follow(*_owners(call))
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

    def sight(self, call: Call) -> Sight:
        """What all ranks know of the memory of a call that is to be bound. Collective."""
        _check_apart(call)
        if self.node is None or self.size == 1:
            return BLIND
        common = self._common(self._shows(call) | (call.source is call.target) << 1)
        return Sight(bool(common & 1), bool(common & 2))

    def _shows(self, call: Call) -> bool:
        """Whether neighbours see all that this rank will send of a call, and may read what little they do not."""
        if self.node is None or not self.node.reads or call.snapshot or relays(call.collective, self.size):
            return False
        ends = zip((call.source, call.target), _spans(call), strict=True)
        return all(
            not staged(buffer) and self.heap.shows(buffer.address, span * call.unit.itemsize)
            for buffer, span in ends
            if buffer is not None and span
        )

    def _common(self, bits: int) -> int:
        """The bits that all ranks have set. Collective."""
        mine, common = np.array([bits]), np.zeros(1, np.int64)
        until(self.comm.Iallreduce(mine, common, MPI.BAND).Test)  # others may wait for what is under way here
        return int(common[0])

    def init(self, call: Call, choice: Choice, seen: bool = False) -> Request:
        """Bind a persistent call; `seen` is what `sight` says of it."""
        _check_apart(call)
        self._inits += 1
        call, device = self._where(call, choice)
        first = [] if device is None else [partial(device.follow, *_owners(call))]
        channel = None if self.node is None or choice.algorithm == NATIVE else self._channel()
        program = self._bind(call, choice, "persistent", device, first, channel, seen)
        request = Request(call.collective, program, partial(self._return, channel), call, persistent=True)
        request.finalizer = weakref.finalize(request, self._dropped.append, (program, channel))
        request.finalizer.atexit = False
        self._lent.add(request)
        return request

    def _channel(self) -> int | None:
        """A channel for one more persistent request, the same on all ranks; None if all are in use. Collective.

        Each is used once before ranks ask each other which of them everyone has given back: whoever has done so has
        taken all messages that came there, so the next request goes on where the last one ended.
        """
        if self._used < CHANNELS - 1:
            self._used += 1
            return self._used
        self._take_back()
        common = self._common(sum(1 << channel for channel in self._channels))
        lowest = common & -common
        if not lowest:
            return None
        channel = lowest.bit_length() - 1
        self._channels.remove(channel)
        return channel

    def _take_back(self) -> None:
        """Give back what requests held that were dropped without `Free`."""
        while self._dropped:
            self._give_back(*self._dropped.popleft())

    def _give_back(self, program: Program, channel: int | None) -> None:
        program.free()
        self._littered |= program.broken
        if channel is not None and not program.broken:
            self._channels.add(channel)

    def free(self) -> None:
        """Give everything back: programs, idle requests, shared memory, and the private communicator. Collective."""
        for kept in self._bound.values():
            _program(kept).free()
        for program in [program for programs in self._idle.values() for program in programs]:
            program.free()
        for lengths in self._lengths.values():
            lengths.program.free()
        for request in tuple(self._lent):
            if not request.active:
                request.Free()
        self._take_back()
        self._bound.clear()
        self._again.clear()
        self._quick.clear()
        self._quickly.clear()
        self._idle.clear()
        self._lengths.clear()
        self._lent.clear()
        self.heap.free()
        if self.node is not None:
            self.node.free()
        if not self._littered:  # an MPI gives its number to a later communicator, which must not get those messages
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
        compiles = form == "persistent" or self._compiles
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
        if _learns(call, choice):
            return self._bind_later(call, choice, self._wire(form, channel), device, first)
        if choice.algorithm != NATIVE:
            wire = self._wire(form, channel, call.unit.itemsize, seen)
            return bound(call, choice, self.rank, self.size, wire, device, first, self.nodes)
        call = native.settled(call)
        ends = _ends(call, None)
        steps = [*first, *ends.first], ends.last
        program = native.program(self.comm, call, form, ends.source.array, ends.target.array, *steps)
        program.keep(ends.keep)
        return program

    def _bind_later(
        self, call: Call, choice: Choice, wire: Wire, device: Device | None, first: Sequence[Callable[[], object]]
    ) -> Program:
        """A program that asks for lengths and is bound when it knows them: where it starts again, once for all."""
        lengths, later = self._asking(call, choice, wire), list[Program]()

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

    def _asking(self, call: Call, choice: Choice, wire: Wire) -> Lengths:
        """The lengths of a call's blocks as a call of its own: a number for every block."""
        count = len(call.lengths)
        schedule = build(call.collective, choice.algorithm, self.rank, self.size, call.root, 1, self.nodes)
        places = {block: Place(TARGET, block, block + 1) for block in range(count)}
        brought = {block: places[block] for block in call.brings}
        known = np.zeros(count, np.int64)
        memory = Memory(known, MPI.Get_address(known))
        task = Task(schedule, (1,) * count, brought, places, known.itemsize)
        return Lengths(known, bind(task, memory, memory, wire))

    def _learn(self, call: Call, choice: Choice) -> Call:
        """Ask for the lengths of a blocking call, all ranks together."""
        key = call.collective, choice.algorithm, call.root
        lengths = self._lengths.pop(key, None)  # back when all went well: messages may still be under way if not
        if lengths is None:
            lengths = self._asking(call, choice, self._wire("blocking"))
        lengths.tell(call)
        self._drive(lengths.program)
        self._lengths[key] = lengths
        if len(self._lengths) > KEPT:
            self._lengths.pop(next(iter(self._lengths))).program.free()
        return lengths.learned(call)

    def _fits_slots(self, call: Call, choice: Choice) -> bool:
        """Whether the call is small and its blocks lie without gaps; in place there is one slot for both ends."""
        nbytes = max(_spans(call)) * call.unit.itemsize
        if nbytes > SWAPPED or call.moved >= 0 or call.snapshot:
            return False
        if nbytes > (COMPILED if compiled.available() else SLOT) and not self._swaps_only(call, choice, nbytes):
            return False
        return all(
            sum(call.lengths[block] for block in blocks) == _span(call, blocks) for blocks in (call.brings, call.takes)
        )

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
        spans = _spans(call)
        source = Memory.allocate(spans[0], call.unit)
        target = source if call.source is call.target else Memory.allocate(spans[1], call.unit)
        if choice.algorithm == NATIVE:
            program = native.program(self.comm, call, "blocking", source.array, target.array)
        else:
            schedule = task(call, choice, self.rank, self.size, self.nodes)
            program = bind(
                schedule, source, target, self._wire("blocking", itemsize=call.unit.itemsize), _combining(call)
            )
        return Slots(program, source.array, target.array, bool(call.brings), _stores(call))

    def _keep(self, key: Hashable, kept: Program | Slots) -> None:
        self._bound[key] = kept
        self._held += _program(kept).nbytes
        while len(self._bound) > KEPT or (self._held > KEPT_BYTES and len(self._bound) > 1):
            self._forget(next(iter(self._bound))).free()

    def _forget(self, key: Hashable) -> Program:
        program = _program(self._bound.pop(key))
        self._held -= program.nbytes
        for known in [known for known, again in self._again.items() if again.origin.program is program]:
            del self._again[known]
        for known in [known for known, its in self._quickly.items() if its is program]:
            del self._quick[known], self._quickly[known]
        return program

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


def _in_shape(slot: np.ndarray, array: np.ndarray) -> np.ndarray:
    """The slot's memory as an array like the user's."""
    return slot.view(np.uint8).view(array.dtype).reshape(array.shape)


def _finisher(
    calls: tuple[Callable[[], object], ...], store: np.ndarray | None
) -> Callable[[np.ndarray], object] | None:
    """The last call with its result left open, if it is a ufunc that writes all of the slot and nothing else."""
    last = calls[-1] if calls else None
    if store is None or not isinstance(last, partial) or not isinstance(last.func, np.ufunc) or len(last.args) != 3:
        return None
    left, right, out = last.args
    if (_address(out), out.nbytes, out.dtype) != (_address(store), store.nbytes, store.dtype):
        return None
    return partial(last.func, left.reshape(store.shape), right.reshape(store.shape))


def _program(kept: Program | Slots) -> Program:
    return kept.program if isinstance(kept, Slots) else kept


def _learns(call: Call, choice: Choice) -> bool:
    """Whether ranks must be told the lengths of blocks that they have to pass on."""
    if not call.private or choice.algorithm == NATIVE:
        return False
    return not find(call.collective, choice.algorithm).private


def _needs_staging(call: Call) -> bool:
    return any(buffer is not None and staged(buffer) for buffer in (call.source, call.target))


def _key(call: Call, choice: Choice, addresses: bool, device: Device | None = None) -> Hashable:
    """What two calls must have in common to share a program."""
    where: tuple[object, ...] = (call.source is call.target, None if device is None else device.number)
    if addresses:
        where += tuple(None if b is None else b.address for b in (call.source, call.target))
    blocks = tuple(call.brings.items()), tuple(call.takes.items())
    what = call.collective, call.uneven, choice
    return (*what, call.lengths, call.unit, call.root, call.op, call.moved, blocks, where)

"""Programs of blocking calls, kept for calls to come; and calls that are known again by their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives.runtime.call import Call
from collectives.errors import OutOfStep
from collectives.runtime.binder import Program
from collectives.runtime.requests import drive, under_way
from collectives.runtime.single_exchange import Short
from collectives.runtime.eager_buffers import SLOT, Slots, longest, program_of
from collectives.transport import compiled_exchange as compiled
from collectives.transport.mailbox import Edge
from collectives.transport.fused_exchange import Compiled, compile_swap
from collectives.transport.wire import Piece

KEPT = 256
"""Programs that are kept for calls to come, of blocking and of non-blocking ones each."""

KEPT_BYTES = 1 << 28
"""Scratch memory that the kept programs of blocking calls may hold together."""

WORTH_COMPILING = 100
"""Repeated short calls after which they are compiled: it takes a second, or less if it was done before."""

_READY = 0x0401
"""NumPy's flags of an array that is C-contiguous and writeable."""

Quickly: TypeAlias = Callable[[np.ndarray, np.ndarray, Program], Compiled | None]

_ndarray, _address, _IN_PLACE = np.ndarray, MPI.Get_address, MPI.IN_PLACE


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
"""What `Kept.again` gives for arguments that it cannot know again."""

_DONE, _NO = compiled.DONE, compiled.NO

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
    if array.nbytes > (longest()) or not array.flags.c_contiguous:
        return (*key, _address(array), array.strides, None, None)
    return key if array.flags.c_contiguous else NEW


class Kept:
    """What one rank keeps of the blocking calls of one communicator.

    Parameters
    ----------
    rank : int
        For messages.

    Attributes
    ----------
    bound : dict of Program or Slots
        The programs, the oldest first, by what the calls that share one have in common.
    known : dict of Again
        By arguments.
    quick : dict of Compiled
        Short calls that are one compiled call, looked up first of all.
    held : int
        Bytes of scratch memory.
    broken : str or None
        What broke a blocking call off, after which none can be trusted.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.bound: dict[Hashable, Program | Slots] = {}
        self.known: dict[tuple[Any, ...], Again] = {}
        self.quick: dict[tuple[Any, ...], Compiled] = {}
        self._quickly: dict[tuple[Any, ...], Program] = {}
        self._repeats = 0
        self.held = 0
        self.broken: str | None = None

    # -------------------------------------------------------------------------------- known again

    def again(
        self, name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
    ) -> tuple[Any, ...]:
        """Do a blocking call that was done before with the same kind of arrays; this is the way of nearly all calls.

        Returns an empty tuple if it is done, otherwise what `run` is to know it by the next time. Arrays that fit
        slots are known by shape and dtype, larger ones also by where they lie.
        """
        key: tuple[Any, ...]
        sends, receives = type(sendbuf) is _ndarray, type(recvbuf) is _ndarray
        if self.quick and (sends or receives) and not under_way:
            said = _NO
            try:
                if sends and receives:
                    s, r = sendbuf, recvbuf
                    quick = self.quick.get((name, id(op), root, algorithm, segments, s.nbytes, s.dtype))
                else:
                    s = r = sendbuf if sends else recvbuf
                    other = recvbuf if sends else sendbuf
                    quick = self.quick.get((name, id(op), root, algorithm, segments, s.nbytes, s.dtype, sends, other))
                if quick is not None:
                    said = quick[0](s, r, quick[1], quick[2])
            except TypeError:  # something that cannot be looked up, or other arrays than were compiled for
                pass
            except KeyboardInterrupt as error:
                self.break_off(error)
                raise
            if said == _DONE:
                return ()
            if said != _NO and quick is not None:
                try:
                    quick.finish(said, s, r)
                except BaseException as error:
                    self.break_off(error)
                    raise
                return ()
        if sends and receives:
            s, r = sendbuf, recvbuf
            key = (name, id(op), root, algorithm, segments, s.shape, s.dtype, r.shape, r.dtype)
            try:
                known = self.known.get(key)
            except TypeError:  # a root or a name that cannot be looked up: the long way says what is wrong with it
                return NEW
            if known is not None:
                if r.flags.num & _READY != _READY or not s.flags.c_contiguous:
                    return NEW
            elif s.nbytes > SLOT or r.nbytes > SLOT:
                if not (s.flags.forc and r.flags.forc):
                    return NEW
                key = (*key, _address(s), s.strides, _address(r), r.strides)
                known = self.known.get(key)
                if known is not None and not r.flags.writeable:
                    return NEW
        else:
            key = _key_without(name, sendbuf, recvbuf, op, root, algorithm, segments)
            try:
                known = self.known.get(key)
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
            self.forget(origin.bound)
            self.break_off(error)
            raise
        if finish is not None:
            finish(recvbuf)
        elif store is not None:
            recvbuf[...] = store
        if load is not None or store is not None:
            self._repeated()
        return ()

    def know(
        self,
        known: tuple[Any, ...],
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op,
        bound: Hashable,
        quickly: Quickly,
    ) -> None:
        """Remember that calls with such arguments are this program's.

        Parameters
        ----------
        known, sendbuf, recvbuf, op
            What `again` gave, and the arguments.
        bound : Hashable
            Under what the program is kept.
        quickly : callable (source, target, program) -> Compiled or None
            The call between 1-D arrays of one dtype as one compiled call, if it can be. Asked for if that is worth it.
        """
        kept = self.bound.get(bound)
        if known is NEW or kept is None or len(self.known) >= 4 * KEPT:
            return
        if isinstance(kept, Slots):
            known = known[:_SMALL] if len(known) >= _LARGE else known  # wherever the arrays lie
        elif len(known) < _LARGE:
            return  # known by shape only, but bound to an address
        if not op.is_predefined:
            return  # it may be freed, and another get its id
        if not isinstance(kept, Slots):
            self.known[known] = Again(None, kept.calls, None, None, None, Origin(kept, bound))
            return
        if any(type(array) is _ndarray and not array.flags.c_contiguous for array in (sendbuf, recvbuf)):
            return
        sent = sendbuf if type(sendbuf) is _ndarray else recvbuf
        load = _in_shape(kept.source, sent) if kept.loads else None
        store = _in_shape(kept.target, recvbuf) if kept.stores else None
        program, swap = kept.program, None
        if program.swap is not None and type(sendbuf) is _ndarray and type(recvbuf) is _ndarray:
            swap = program.swap.between(kept.source, kept.target, sendbuf, recvbuf)
        if self.compiles:
            self._compile(known[:5], sendbuf, recvbuf, program, quickly)
        calls, finish = program.calls, _finisher(program.calls, store)
        if finish is not None:
            calls = calls[:-1]
        self.known[known] = Again(swap, calls, load, store, finish, Origin(program, bound))

    def _compile(
        self,
        known: tuple[Any, ...],
        sendbuf: Any,
        recvbuf: Any,
        program: Program,
        quickly: Quickly,
    ) -> None:
        """From now on do such calls at once, if they are no more than a message out, one in, and a copy."""
        sends, receives = type(sendbuf) is _ndarray, type(recvbuf) is _ndarray
        s, r = sendbuf if sends else recvbuf, recvbuf if receives else sendbuf
        if not (sends or receives) or s.ndim != 1 or r.ndim != 1 or s.dtype != r.dtype:
            return
        quick = quickly(s, r, program)
        if quick is not None:
            other = () if sends and receives else (sends, recvbuf if sends else sendbuf)
            self.quick[*known, s.nbytes, s.dtype, *other] = quick
            self._quickly[*known, s.nbytes, s.dtype, *other] = program

    def _repeated(self) -> None:
        """Count short calls that were made before: if there are many, they are bound anew, and compiled."""
        self._repeats += 1
        if self._repeats == WORTH_COMPILING and compiled.available():
            for key in [key for key, kept in self.bound.items() if isinstance(kept, Slots)]:
                self.forget(key).free()

    @property
    def compiles(self) -> bool:
        """Whether short calls are made often enough to be compiled, and can be."""
        return self._repeats >= WORTH_COMPILING and compiled.available()

    # -------------------------------------------------------------------------------- kept and given back

    def keep(self, key: Hashable, kept: Program | Slots) -> None:
        """Keep a program, and give back the oldest if these are too many or too large."""
        self.bound[key] = kept
        self.held += program_of(kept).nbytes
        while len(self.bound) > KEPT or (self.held > KEPT_BYTES and len(self.bound) > 1):
            self.forget(next(iter(self.bound))).free()

    def forget(self, key: Hashable) -> Program:
        """The program that was kept under the key, and is no longer."""
        program = program_of(self.bound.pop(key))
        self.held -= program.nbytes
        for known in [known for known, again in self.known.items() if again.origin.program is program]:
            del self.known[known]
        for known in [known for known, its in self._quickly.items() if its is program]:
            del self.quick[known], self._quickly[known]
        return program

    def break_off(self, error: BaseException) -> None:
        """A blocking call ends in the middle: its messages may still come, or never leave. Trust no other after it."""
        self.broken = f"{type(error).__name__}: {error}".removesuffix(": ")
        self.known.clear()
        self.quick.clear()
        self._quickly.clear()

    def check_in_step(self) -> None:
        """Refuse a blocking call after one that was broken off.

        Raises
        ------
        OutOfStep
            If there was one.
        """
        if self.broken is not None:
            message = (
                f"a blocking call was broken off on rank {self._rank} by {self.broken}; what comes now may be of it"
            )
            raise OutOfStep(MPI.ERR_OTHER, f"{message}: go on with a new Communicator")

    def free(self) -> None:
        """Give the programs back."""
        for kept in self.bound.values():
            program_of(kept).free()
        self.bound.clear()
        self.known.clear()
        self.quick.clear()
        self._quickly.clear()


def quickly_done(
    short: Short, call: Call, s: np.ndarray, r: np.ndarray, program: Program, edge: Edge | None
) -> Compiled | None:
    """The short call between such arrays in one compiled call; None if there is no such thing."""
    dtype = s.dtype
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

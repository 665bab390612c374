"""Cache of bound programs, looked up by call arguments.

A repeated blocking call is found by the name, operation, root, algorithm and segments, and by its arrays: by shape and
dtype if its data passes through buffers of the program, and also by address if the program reads the user's memory.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives.errors import RanksDisagree
from collectives.runtime.binding import SLOT, EagerBuffers, longest, program_of
from collectives.runtime.program import Program
from collectives.runtime.progress import active_requests, run_program
from collectives.transport import compiled_exchange
from collectives.transport.fused_exchange import CompiledExchange

MAX_PROGRAMS = 256
"""Cached programs, of blocking and of non-blocking calls each."""

MAX_BYTES = 1 << 28
"""Scratch memory of all cached programs of blocking calls."""

COMPILE_AFTER = 100
"""Repeated short calls after which they are compiled, which takes up to a second the first time."""

_READY = 0x0401
"""NumPy's flags of a C-contiguous, writeable array."""

Compile: TypeAlias = Callable[[np.ndarray, np.ndarray, Program], CompiledExchange | None]

_ndarray, _address, _IN_PLACE = np.ndarray, MPI.Get_address, MPI.IN_PLACE


class CallKey(NamedTuple):
    """Cache keys of a blocking call: by its scalar arguments; also by its arrays' shapes; also by their addresses.

    Attributes
    ----------
    call
        Collective, id of the operation, root, algorithm, segments.
    shape
        `call`, and shape and dtype of the arrays: key of programs that copy from and to the arrays.
    address
        `shape`, and addresses and strides of the arrays: key of programs bound to them. None for small arrays.
    """

    call: tuple[Any, ...]
    shape: tuple[Any, ...]
    address: tuple[Any, ...] | None


UNCACHEABLE = CallKey((), (), None)
"""Key of calls whose arguments cannot be looked up, such as lists; compared by identity."""


class CachedCall(NamedTuple):
    """Cache entry of a blocking call: its program, and eager buffers in the arrays' shape if the program has them.

    Attributes
    ----------
    swap
        ``swap(sendbuf, recvbuf)`` runs the whole call directly between the arrays, if it is a single exchange.
    calls
        The program's calls.
    load, store
        Eager buffers in the arrays' shape, to copy into before and out of after the calls.
    finish
        Last reduction, writing to the user's array instead of the eager buffer; it replaces the last call and `store`.
    program, key
        The program and its key in `ProgramCache.bound`.
    """

    swap: Callable[[Any, Any], None] | None
    calls: tuple[Callable[[], object], ...]
    load: np.ndarray | None
    store: np.ndarray | None
    finish: Callable[[np.ndarray], object] | None
    program: Program
    key: Hashable


_DONE, _NO = compiled_exchange.DONE, compiled_exchange.NO

_CONSTANTS = {id(op): op for op in vars(MPI).values() if isinstance(op, MPI.Op)}
"""MPI's predefined operations by id. Held here, so that no other object gets their ids; ids of others are reused."""


def _one_array_key(
    name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
) -> CallKey:
    """Cache key of a call with at most one array, the other None or MPI.IN_PLACE; `UNCACHEABLE` for other arguments."""
    call = name, id(op), root, algorithm, segments
    if sendbuf is None and recvbuf is None:
        return CallKey(call, call, None)
    sends, array = type(sendbuf) is _ndarray, sendbuf if type(sendbuf) is _ndarray else recvbuf
    other = recvbuf if sends else sendbuf
    if type(array) is not _ndarray or not (other is None or other is _IN_PLACE):
        return UNCACHEABLE
    if not array.flags.forc or not (sends or array.flags.writeable):
        return UNCACHEABLE
    shape = *call, sends, other, array.shape, array.dtype
    if array.nbytes > longest() or not array.flags.c_contiguous:
        return CallKey(call, shape, (*shape, _address(array), array.strides))
    return CallKey(call, shape, None)


class ProgramCache:
    """Cache of the programs of blocking calls on one communicator; `rank` is for error messages.

    Attributes
    ----------
    bound
        Programs, the oldest first, by the properties that calls of one program share.
    ready
        Calls by `CallKey.shape` or by `CallKey.address`.
    compiled
        Short calls that are one compiled function, looked up first.
    nbytes
        Scratch memory of all programs.
    broken
        Error that aborted a blocking call. Its messages may still arrive, so that no later call can be trusted.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.bound: dict[Hashable, Program | EagerBuffers] = {}
        self.ready: dict[tuple[Any, ...], CachedCall] = {}
        self.compiled: dict[tuple[Any, ...], CompiledExchange] = {}
        self._compiled_from: dict[tuple[Any, ...], Program] = {}
        self._repeats = 0
        self.nbytes = 0
        self.broken: str | None = None

    def run_cached(
        self, name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
    ) -> CallKey | tuple[()]:
        """Run a blocking call if it is in the cache and return an empty tuple; else return its key for `store`.

        The hot path of nearly all calls, hence not split up.
        """
        sends, receives = type(sendbuf) is _ndarray, type(recvbuf) is _ndarray
        if self.compiled and (sends or receives) and not active_requests:
            result = _NO
            try:
                if sends and receives:
                    s, r = sendbuf, recvbuf
                    fused = self.compiled.get((name, id(op), root, algorithm, segments, s.nbytes, s.dtype))
                else:
                    s = r = sendbuf if sends else recvbuf
                    other = recvbuf if sends else sendbuf
                    kind = type(other)  # not the object itself: MPI.IN_PLACE equals an integer, which is no buffer
                    fused = self.compiled.get((name, id(op), root, algorithm, segments, s.nbytes, s.dtype, sends, kind))
                if fused is not None:
                    result = fused[0](s, r, fused[1], fused[2])
            except TypeError:  # unhashable arguments, or arrays of another kind than it was compiled for
                pass
            except KeyboardInterrupt as error:
                self.poison(error)
                raise
            if result == _DONE:
                return ()
            if result != _NO and fused is not None:
                try:
                    fused.finish(result, s, r)
                except BaseException as error:
                    self.poison(error)
                    raise
                return ()
        if sends and receives:
            s, r, address = sendbuf, recvbuf, None
            shape = (name, id(op), root, algorithm, segments, s.shape, s.dtype, r.shape, r.dtype)
            try:
                cached = self.ready.get(shape)
            except TypeError:  # unhashable arguments: their validation reports the error
                return UNCACHEABLE
            if cached is not None:
                if r.flags.num & _READY != _READY or not s.flags.c_contiguous:
                    return UNCACHEABLE
            elif s.nbytes > SLOT or r.nbytes > SLOT:
                if not (s.flags.forc and r.flags.forc):
                    return UNCACHEABLE
                address = (*shape, _address(s), s.strides, _address(r), r.strides)
                cached = self.ready.get(address)
                if cached is not None and not r.flags.writeable:
                    return UNCACHEABLE
            if cached is None:
                return CallKey((name, id(op), root, algorithm, segments), shape, address)
        else:
            key_of_one = _one_array_key(name, sendbuf, recvbuf, op, root, algorithm, segments)
            try:
                cached = self.ready.get(key_of_one.address or key_of_one.shape)
            except TypeError:
                return UNCACHEABLE
            if cached is None:
                return key_of_one
        swap, calls, load, store, finish, program, key = cached
        try:
            if swap is not None and not active_requests:
                swap(sendbuf, recvbuf)
                self._count_repeat()
                return ()
            if load is not None:
                load[...] = sendbuf if type(sendbuf) is _ndarray else recvbuf
            if active_requests:
                run_program(program)
                finish = None
            else:
                for call in calls:
                    call()
        except BaseException as error:
            self.evict(key)
            self.poison(error)
            raise
        if finish is not None:
            finish(recvbuf)
        elif store is not None:
            recvbuf[...] = store
        if load is not None or store is not None:
            self._count_repeat()
        return ()

    def store(
        self, key: CallKey, sendbuf: Any, recvbuf: Any, op: MPI.Op, bound: Hashable, compile_call: Compile
    ) -> None:
        """Let later calls with these arguments find the program already stored under `bound`; no-op where impossible.

        `key` is what `run_cached` returned. A no-op for `UNCACHEABLE`, an evicted program, a user-defined `op`, a full
        cache, and most arrays with gaps. Once short calls are frequent (`compiles`), `compile_call` compiles this one.
        """
        entry = self.bound.get(bound)
        if key is UNCACHEABLE or entry is None or len(self.ready) >= 4 * MAX_PROGRAMS:
            return
        if id(op) not in _CONSTANTS:
            return  # user-defined, or a copy of a predefined one: after its end another object may get its id
        if not isinstance(entry, EagerBuffers):
            if key.address is not None:  # bound to addresses, so it cannot be found by shape
                self.ready[key.address] = CachedCall(None, entry.calls, None, None, None, entry, bound)
            return
        sends, receives = type(sendbuf) is _ndarray, type(recvbuf) is _ndarray
        s, r = sendbuf if sends else recvbuf, recvbuf if receives else sendbuf
        if (sends or receives) and not (s.flags.c_contiguous and r.flags.c_contiguous):
            return
        load = _reshape_like(entry.source, s) if entry.loads else None
        store = _reshape_like(entry.target, recvbuf) if entry.stores else None
        program, swap = entry.program, None
        if program.swap is not None and sends and receives:
            swap = program.swap.bind_arrays(entry.source, entry.target, sendbuf, recvbuf)
        if self.compiles and (sends or receives) and s.ndim == r.ndim == 1 and s.dtype == r.dtype:
            fused = compile_call(s, r, program)
            if fused is not None:
                other = () if sends and receives else (sends, type(recvbuf if sends else sendbuf))
                compiled = *key.call, s.nbytes, s.dtype, *other
                self.compiled[compiled], self._compiled_from[compiled] = fused, program
        calls, finish = program.calls, _final_reduction(program.calls, store)
        if finish is not None:
            calls = calls[:-1]
        self.ready[key.shape] = CachedCall(swap, calls, load, store, finish, program, bound)

    def _count_repeat(self) -> None:
        """Count a repeated short call; from `COMPILE_AFTER` in all on, short calls are compiled, if numba is available.

        Their programs are evicted then, to be bound anew.
        """
        self._repeats += 1
        if self._repeats == COMPILE_AFTER and compiled_exchange.available():
            for key in [key for key, entry in self.bound.items() if isinstance(entry, EagerBuffers)]:
                self.evict(key).free()

    @property
    def compiles(self) -> bool:
        """True if short calls are frequent enough to be compiled, and numba is available."""
        return self._repeats >= COMPILE_AFTER and compiled_exchange.available()

    def add(self, key: Hashable, entry: Program | EagerBuffers) -> None:
        """Add a program to the cache; free the oldest ones beyond `MAX_PROGRAMS` and `MAX_BYTES`."""
        self.bound[key] = entry
        self.nbytes += program_of(entry).nbytes
        while len(self.bound) > MAX_PROGRAMS or (self.nbytes > MAX_BYTES and len(self.bound) > 1):
            self.evict(next(iter(self.bound))).free()

    def evict(self, key: Hashable) -> Program:
        """Remove a program and all cached calls that use it, and return it, not freed: its messages may be active."""
        program = program_of(self.bound.pop(key))
        self.nbytes -= program.nbytes
        for known in [known for known, cached in self.ready.items() if cached.program is program]:
            del self.ready[known]
        for known in [known for known, its in self._compiled_from.items() if its is program]:
            del self.compiled[known], self._compiled_from[known]
        return program

    def poison(self, error: BaseException) -> None:
        """Make all later blocking calls on this communicator raise, as messages of the aborted one may still arrive."""
        self.broken = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._clear()

    def _clear(self) -> None:
        self.ready.clear()
        self.compiled.clear()
        self._compiled_from.clear()

    def check_in_step(self) -> None:
        if self.broken is not None:
            message = (
                f"a blocking call was broken off on rank {self._rank} by {self.broken}; its messages may still arrive"
            )
            raise RanksDisagree(MPI.ERR_OTHER, f"{message}: go on with a new Communicator")

    def free(self) -> None:
        for entry in self.bound.values():
            program_of(entry).free()
        self.bound.clear()
        self._clear()


def _reshape_like(buffer: np.ndarray, array: np.ndarray) -> np.ndarray:
    return buffer.view(np.uint8).view(array.dtype).reshape(array.shape)


def _final_reduction(
    calls: tuple[Callable[[], object], ...], store: np.ndarray | None
) -> Callable[[np.ndarray], object] | None:
    """Last call of a program as a function of its output, if it is a ufunc that writes exactly `store`; else None."""
    last = calls[-1] if calls else None
    if store is None or not isinstance(last, partial) or not isinstance(last.func, np.ufunc) or len(last.args) != 3:
        return None
    left, right, out = last.args
    if (_address(out), out.nbytes, out.dtype) != (_address(store), store.nbytes, store.dtype):
        return None
    return partial(last.func, left.reshape(store.shape), right.reshape(store.shape))

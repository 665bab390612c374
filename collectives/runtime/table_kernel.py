"""The compiled interpreter of program tables: one function that runs any program of messages within a node."""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

import ctypes
import time
from collections.abc import Callable
from functools import cache
from platform import machine
from threading import Lock
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from collectives.runtime import program_table as table
from collectives.transport import copy_speed, mailbox
from quant.kernels.jit import compiler

_compile = compiler(table, mailbox, copy_speed)

WORD = ir.IntType(64)
# ------------------------------------------------------------------------------------------ memory


class ArrayHandle(types.Opaque):
    """Numba type of a NumPy array that is passed as it is: nothing is checked, converted or counted."""

    def __init__(self) -> None:
        super().__init__(name="ArrayHandle")


HANDLE = ArrayHandle()


@register_model(ArrayHandle)
class _HandleModel(models.OpaqueModel):
    pass


@unbox(ArrayHandle)
def _unbox(_, obj, context):
    return NativeValue(obj)


def _pointer(builder, address):
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic
def _object(_, array):
    """Address of an array object."""
    return types.int64(HANDLE), lambda context, builder, signature, args: builder.ptrtoint(args[0], WORD)


@intrinsic
def _word(_, address):
    """Load the word at an address."""
    return types.int64(types.int64), lambda context, builder, signature, args: builder.load(_pointer(builder, args[0]))


@intrinsic
def _set_word(_, address, value):
    def generate(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _load(_, address):
    """Load a flag; all later loads are at least as new (acquire)."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(_, address, value):
    """Store a flag; all earlier stores are visible to a reader of it (release)."""

    def generate(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _copy(_, target, source, nbytes):
    def generate(context, builder, signature, args):
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _relax(_):
    """Hint to the processor that this is a spin loop (`pause` on x86)."""

    def generate(context, builder, signature, args):
        if machine().lower() in ("x86_64", "amd64"):
            hint = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _reduce(_, kernel, left, right, out, nbytes):
    """Call the reduction kernel at address `kernel`."""
    arguments = (types.int64,) * 4

    def generate(context, builder, signature, args):
        convention = context.call_conv
        function = convention.get_function_type(types.int64, arguments)
        pointer = builder.inttoptr(args[0], function.as_pointer())
        _, result = convention.call_function(builder, pointer, types.int64, arguments, args[1:])
        return result

    return types.int64(types.int64, *arguments), generate


_READS = hasattr(ctypes.CDLL(None), "process_vm_readv")

if _READS:
    _readv = types.ExternalFunction("process_vm_readv", types.int64(types.int32, *(types.int64,) * 5))
else:

    @_compile
    def _readv(pid, here, here_count, there, there_count, flags):
        return -1


_yield_core = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_MONOTONIC = time.CLOCK_MONOTONIC


@_compile
def _read(pid, into, origin, nbytes, vector):
    """Copy `nbytes` from address `origin` of process `pid` to `into`; False if the system refuses. See `VECTOR`."""
    while nbytes > 0:
        _set_word(vector, into)
        _set_word(vector + 8, nbytes)
        _set_word(vector + 16, origin)
        _set_word(vector + 24, nbytes)
        done = _readv(types.int32(pid), vector, 1, vector + 16, 1, 0)
        if done <= 0:
            return False
        into += done
        origin += done
        nbytes -= done
    return True


# ------------------------------------------------------------------------------------------ operations


@_compile
def _at(t, word):
    return _word(t + 8 * word)


@_compile
def _set(t, word, value):
    _set_word(t + 8 * word, value)


@_compile
def _address(t, piece, operand):
    """Address of an operand of a piece."""
    return _at(t, table.BASES + _word(piece + 8 * operand)) + _word(piece + 8 * operand + 8)


@_compile
def _apply(t, operation, piece, incoming, start, nbytes):
    """Copy or reduce `nbytes` of incoming data at an address into a piece, from its byte `start` on."""
    out, kernel = _address(t, piece, table.OUT) + start, _at(operation, table.KERNEL)
    if kernel == 0:
        _copy(out, incoming, nbytes)
        return
    mine = _address(t, piece, table.LEFT) + start
    if _at(operation, table.MINE_FIRST):
        _reduce(kernel, mine, incoming, out, nbytes)
    else:
        _reduce(kernel, incoming, mine, out, nbytes)


@_compile
def _is_shared(numbers, address, nbytes):
    """True if the peer has mapped this memory of ours."""
    for index in range(_at(numbers, mailbox.OUR_SEGMENTS)):
        segment = mailbox.OUR_SEGMENTS + 1 + 2 * index
        if _at(numbers, segment) <= address and address + nbytes <= _at(numbers, segment + 1):
            return True
    return False


@_compile
def _mapped(numbers, address, nbytes):
    """Address here of memory of the peer that this rank has mapped; 0 if it has not."""
    for index in range(_at(numbers, mailbox.PEER_SEGMENTS)):
        segment = mailbox.PEER_SEGMENTS + 1 + 3 * index
        base = _at(numbers, segment)
        if base <= address and address + nbytes <= _at(numbers, segment + 1):
            return _at(numbers, segment + 2) + address - base
    return 0


@_compile
def _goes_by_address(t, operation, numbers):
    """True if a message is to be read where it is: too long to be copied, or in memory that the peer has mapped."""
    if _at(operation, table.BY_ADDRESS_LABEL) == 0:
        return False
    nbytes = _at(operation, table.BYTES)
    if nbytes > _at(numbers, mailbox.COPIED_BYTES):
        return nbytes > _at(numbers, mailbox.CELL_BYTES) or (_at(numbers, mailbox.SENT) + 1) % mailbox.PROBE_EVERY != 0
    for index in range(_at(operation, table.PIECE_COUNT)):
        piece = _at(operation, table.PIECES) + 8 * table.PIECE_WORDS * index
        if not _is_shared(numbers, _address(t, piece, table.LEFT), _word(piece)):
            return False
    return True


@_compile
def _now(t):
    """Nanoseconds of a clock that never goes back."""
    clock = t + 8 * table.VECTOR
    _clock_gettime(types.int32(_MONOTONIC), clock)
    return _word(clock) * 1_000_000_000 + _word(clock + 8)


@_compile
def _judge(numbers, nbytes, duration):
    """Expect copies into cells to be slow, or not to be, after a few of another duration than expected."""
    is_far = _at(numbers, mailbox.COPIED_BYTES) < _at(numbers, mailbox.CELL_BYTES)
    is_slow = duration * copy_speed.NBYTES > nbytes * _at(numbers, mailbox.SLOW_NS)
    contradictions = 0 if is_slow == is_far else _at(numbers, mailbox.CONTRADICTIONS) + 1
    if contradictions == mailbox.CHANGES:
        contradictions = 0
        copied = _at(numbers, mailbox.CELL_BYTES)
        _set(numbers, mailbox.COPIED_BYTES, min(copied, mailbox.FAR_COPIED) if is_slow else copied)
    _set(numbers, mailbox.CONTRADICTIONS, contradictions)


@_compile
def _eager_buffer(numbers, nbytes, slot, shorts, cells):
    """Address of the data of an eager message that does not fit beside its flag."""
    short = _at(numbers, mailbox.SHORT_BYTES)
    return _at(numbers, shorts) + slot * short if nbytes <= short else _at(numbers, cells + slot % mailbox.CELLS)


@_compile
def _send(t, operation):
    numbers, nbytes = _at(operation, table.EDGE), _at(operation, table.BYTES)
    by_address = _goes_by_address(t, operation, numbers)
    number = _at(numbers, mailbox.SENT) + 1
    is_short = nbytes <= _at(numbers, mailbox.SHORT_BYTES)
    room = mailbox.SLOTS if nbytes <= mailbox.INLINE or is_short or by_address else mailbox.CELLS
    if number - _at(numbers, mailbox.ACKED) > room:
        _set(numbers, mailbox.ACKED, _load(_at(numbers, mailbox.THEIR_ACK)))
        if number - _at(numbers, mailbox.ACKED) > room:
            return False
    _set(numbers, mailbox.SENT, number)
    slot = number & mailbox.MASK
    flag = _at(numbers, mailbox.OUTBOX) + slot * mailbox.LINE
    pieces, count = _at(operation, table.PIECES), _at(operation, table.PIECE_COUNT)
    if by_address:
        for index in range(count):
            piece = pieces + 8 * table.PIECE_WORDS * index
            _set_word(flag + 8 + 16 * index, _address(t, piece, table.LEFT))
            _set_word(flag + 16 + 16 * index, _word(piece))
        _set(operation, table.NUMBER, number)
        _store(flag, number * mailbox.KIND + _at(operation, table.BY_ADDRESS_LABEL))
        return True
    data = flag + 8
    if nbytes > mailbox.INLINE:
        data = _eager_buffer(numbers, nbytes, slot, mailbox.SHORT_OUT, mailbox.CELLS_OUT)
        _set_word(flag + 8, nbytes)
    start = _now(t) if nbytes > mailbox.FAR_COPIED else 0
    for index in range(count):
        piece = pieces + 8 * table.PIECE_WORDS * index
        _copy(data, _address(t, piece, table.LEFT), _word(piece))
        data += _word(piece)
    if start:
        _judge(numbers, nbytes, _now(t) - start)
    _set(operation, table.NUMBER, 0)  # nothing has to be acknowledged
    _store(flag, number * mailbox.KIND + _at(operation, table.LABEL))
    return True


@_compile
def _receive_eager(t, operation, data):
    pieces = _at(operation, table.PIECES)
    for index in range(_at(operation, table.PIECE_COUNT)):
        piece = pieces + 8 * table.PIECE_WORDS * index
        _apply(t, operation, piece, data, 0, _word(piece))
        data += _word(piece)


@_compile
def _receive_run(t, operation, piece, origin, start, nbytes):
    """Receive `nbytes` from the peer's address `origin` into a piece, from its byte `start` on; False if unreadable."""
    numbers = _at(operation, table.EDGE)
    here = _mapped(numbers, origin, nbytes)
    if here:
        _apply(t, operation, piece, here, start, nbytes)
        return True
    pid, vector = _at(numbers, mailbox.PID), t + 8 * table.VECTOR
    out = _address(t, piece, table.OUT) + start
    if _at(operation, table.KERNEL) == 0:
        return _read(pid, out, origin, nbytes, vector)
    spare = _at(t, table.READ_BUFFER)
    while nbytes > 0:
        step = min(nbytes, _at(t, table.READ_BUFFER_BYTES))
        if not _read(pid, spare, origin, step, vector):
            return False
        _apply(t, operation, piece, spare, start, step)
        origin += step
        start += step
        nbytes -= step
    return True


@_compile
def _receive_by_address(t, operation, flag, addresses):
    """Receive a message whose slot has this many (address, bytes) pairs."""
    piece, used, run, read = _at(operation, table.PIECES), 0, 0, 0
    left = _at(operation, table.BYTES)
    while left > 0:
        length = min(_word(piece) - used, _word(flag + 16 + 16 * run) - read)
        if not _receive_run(t, operation, piece, _word(flag + 8 + 16 * run) + read, used, length):
            return table.UNREADABLE
        used += length
        read += length
        left -= length
        if used == _word(piece):
            piece, used = piece + 8 * table.PIECE_WORDS, 0
        if read == _word(flag + 16 + 16 * run):
            run, read = run + 1, 0
    return table.DONE


@_compile
def _receive(t, operation):
    numbers, nbytes = _at(operation, table.EDGE), _at(operation, table.BYTES)
    number = _at(numbers, mailbox.RECEIVED) + 1
    slot = number & mailbox.MASK
    flag = _at(numbers, mailbox.INBOX) + slot * mailbox.LINE
    found = _load(flag) - number * mailbox.KIND
    if found < 0:
        return table.WAITING
    if found == _at(operation, table.LABEL):
        if nbytes <= mailbox.INLINE:
            _receive_eager(t, operation, flag + 8)
        elif _word(flag + 8) == nbytes:
            _receive_eager(t, operation, _eager_buffer(numbers, nbytes, slot, mailbox.SHORT_IN, mailbox.CELLS_IN))
        else:
            return table.MISMATCH
    else:
        addresses, total = found - _at(operation, table.BY_ADDRESS_LABEL), 0
        if addresses < 1 or addresses > mailbox.ADDRESSES:
            return table.MISMATCH
        for index in range(addresses):
            total += _word(flag + 16 + 16 * index)
        if total != nbytes:
            return table.MISMATCH
        result = _receive_by_address(t, operation, flag, addresses)
        if result != table.DONE:
            return result
    _set(numbers, mailbox.RECEIVED, number)
    _store(_at(numbers, mailbox.MY_ACK), number)  # the slot has been read when the peer sees it free
    return table.DONE


@_compile
def _compute(t, operation):
    pieces = _at(operation, table.PIECES)
    for index in range(_at(operation, table.PIECE_COUNT)):
        piece = pieces + 8 * table.PIECE_WORDS * index
        left, out = _address(t, piece, table.LEFT), _address(t, piece, table.OUT)
        if _at(operation, table.KERNEL):
            _reduce(_at(operation, table.KERNEL), left, _address(t, piece, table.RIGHT), out, _word(piece))
        elif left != out:
            _copy(out, left, _word(piece))


@_compile
def _acknowledged(operation):
    sent = _at(operation, table.DEPENDENCY)
    number, numbers = _at(sent, table.NUMBER), _at(sent, table.EDGE)
    if _at(numbers, mailbox.ACKED) < number:
        _set(numbers, mailbox.ACKED, _load(_at(numbers, mailbox.THEIR_ACK)))
    return _at(numbers, mailbox.ACKED) >= number


@_compile
def _attempt(t, operation):
    """Run one operation as far as possible: a result of the kernel, `DONE` or `WAITING` or an error."""
    kind = _at(operation, table.KIND)
    if kind == table.SEND_MESSAGE:
        return table.DONE if _send(t, operation) else table.WAITING
    if kind == table.RECEIVE_MESSAGE:
        return _receive(t, operation)
    if kind == table.LOCAL_WORK:
        _compute(t, operation)
        return table.DONE
    if kind == table.WAIT_STREAM:
        stream = _at(operation, table.DEPENDENCY)
        done = _at(stream, table.POSITION) - _at(stream, table.FIRST) >= _at(operation, table.NUMBER)
        return table.DONE if done else table.WAITING
    return table.DONE if _acknowledged(operation) else table.WAITING


# ------------------------------------------------------------------------------------------ rounds


@_compile
def _pass(t, first, stop):
    """Run the streams of a round once as far as possible: DONE, WAITING after progress, -1 without, or an error."""
    moved, waiting, result = False, False, table.DONE
    operations = _at(t, table.OPERATIONS_AT)
    stream = _at(t, table.STREAMS_AT) + 8 * table.STREAM_WORDS * first
    for _ in range(first, stop):
        position, end = _at(stream, table.POSITION), _at(stream, table.STOP)
        while position < end:
            result = _attempt(t, operations + 8 * table.OPERATION_WORDS * position)
            if result != table.DONE:
                break
            position += 1
            moved = True
        _set(stream, table.POSITION, position)
        if position < end:
            if result != table.WAITING:
                _set(t, table.FAILED, position)
                return result
            waiting = True
        stream += 8 * table.STREAM_WORDS
    if not waiting:
        return table.DONE
    return table.WAITING if moved else -1


@_compile
def _advance(t, spins):
    rounds, at = _at(t, table.ROUNDS), _at(t, table.ROUND)
    while at < rounds:
        entry = _at(t, table.ROUNDS_AT) + 8 * at
        first, stop = _word(entry), _word(entry + 8)
        result, left = _pass(t, first, stop), spins
        while result != table.DONE:
            if result > table.WAITING:
                return result
            if result == -1:
                left -= 1
                if left < 0:
                    return table.WAITING
                if _at(t, table.SHARED_CORES):
                    _yield_core()
                else:
                    _relax()
            result = _pass(t, first, stop)
        stream = _at(t, table.STREAMS_AT) + 8 * table.STREAM_WORDS * first
        for _ in range(first, stop):
            _set(stream, table.POSITION, _at(stream, table.FIRST))
            stream += 8 * table.STREAM_WORDS
        at += 1
        _set(t, table.ROUND, at)
    _set(t, table.ROUND, 0)
    return table.DONE


DATA, FLAGS = 16, 64
"""Offsets in NumPy's array object (PyArrayObject): the pointer to the data, and the flags."""

DENSE, ALIGNED, WRITEABLE = 0x3, 0x100, 0x400
"""Flags of such an object; dense: C- or Fortran-contiguous."""


@_compile
def _fits(array, t, expected):
    """True if an array object is dense, aligned, and writeable if necessary; all else is in its cache key."""
    flags = _word(array + FLAGS)
    if not flags & DENSE or not flags & ALIGNED:
        return False
    return flags & WRITEABLE != 0 or _at(t, expected + table.WRITTEN) == 0


def _run(send, recv, t, spins):
    s, r = _object(send), _object(recv)
    if not _fits(s, t, table.SEND_ARRAY) or not _fits(r, t, table.RECV_ARRAY):
        return table.OTHER_ARRAYS
    source = _word(s + DATA) + _at(t, table.SEND_ARRAY + table.OFFSET)
    target = _word(r + DATA) + _at(t, table.RECV_ARRAY + table.OFFSET)
    sent, received = _at(t, table.SEND_ARRAY + table.NBYTES), _at(t, table.RECV_ARRAY + table.NBYTES)
    if sent and received and source < target + received and target < source + sent:
        return table.OTHER_ARRAYS  # they overlap, which the Python code reports as an error
    _set(t, table.BASES + _at(t, table.SEND_ARRAY + table.MEMORY), source)
    _set(t, table.BASES + _at(t, table.RECV_ARRAY + table.MEMORY), target)
    return _advance(t, spins)


_compiling = Lock()
"""Held while functions are compiled: two threads would write the same files."""


@cache
def functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """Compile, or load, the functions ``run(sendbuf, recvbuf, table, spins)`` and ``advance(table, spins)``.

    `run` runs a program on these arrays from its start, and `advance` goes on with one, or starts it on the memory that
    its table names. Both return a result of `program_table`, after at most `spins` polls without progress.
    """
    with _compiling:
        return (
            _entry(_compile(_run), (HANDLE, HANDLE, types.int64, types.int64)),
            _entry(_advance, (types.int64, types.int64)),
        )


def _entry(dispatcher: Any, signature: tuple[Any, ...]) -> Callable[..., int]:
    """The function for one signature as Python calls it, without the selection by types that a dispatcher makes."""
    dispatcher.compile(signature)
    return dispatcher.overloads[signature].entry_point

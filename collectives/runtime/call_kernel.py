"""Compiled entry points of calls: find the program of a call by its arguments, and run it on the call's arrays.

Objects are read at their addresses as CPython and NumPy lay them out, without Python's attributes, tuples and
dictionaries.
"""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Any, NamedTuple

from numba import types

from collectives.runtime import kernel_memory, network_kernel, request_kernel, table_kernel
from collectives.runtime import program_table as table
from collectives.runtime.kernel_memory import (
    DATA,
    FLAGS,
    HANDLE,
    ITEM_TYPE,
    LENGTHS,
    LIST_ITEMS,
    NDIM,
    SIZE,
    TUPLE_ITEMS,
    TYPE,
    bindable,
    copy_bytes,
    load_word,
    new_number,
    object_address,
    set_word_at,
    sleep_us,
    word_at,
)
from collectives.runtime.network_kernel import acquire_gil, release_gil
from collectives.runtime.table_kernel import advance
from quant.kernels.jit import compiler

_compile = compiler(table, kernel_memory, network_kernel, table_kernel, request_kernel)
_compile_released = compiler(table, kernel_memory, table_kernel, nogil=True)

NAP_US = 20
"""Microseconds of a sleep between two attempts of the progress thread."""

DENSE, ALIGNED, WRITEABLE = 0x3, 0x100, 0x400
"""Flags of an array object; dense: C- or Fortran-contiguous."""


@_compile
def _advance(t, spins):
    """`advance`, without the interpreter's lock (GIL) if messages over MPI are in the program."""
    if not word_at(t, table.USES_MPI):
        return advance(t, spins)
    thread = release_gil()
    result = advance(t, spins)
    acquire_gil(thread)
    return result


@_compile
def _fits(array, t, expected):
    """True if an array object is dense, aligned, and writeable if necessary."""
    flags = load_word(array + FLAGS)
    if not flags & DENSE or not flags & ALIGNED:
        return False
    return flags & WRITEABLE != 0 or word_at(t, expected + table.WRITTEN) == 0


@_compile
def _run_on(s, r, t):
    """Run a program on two array objects of the shapes and dtypes of the call that was compiled."""
    if not _fits(s, t, table.SEND_ARRAY) or not _fits(r, t, table.RECV_ARRAY):
        return table.REFUSED
    source = load_word(s + DATA) + word_at(t, table.SEND_ARRAY + table.OFFSET)
    target = load_word(r + DATA) + word_at(t, table.RECV_ARRAY + table.OFFSET)
    sent, received = word_at(t, table.SEND_ARRAY + table.NBYTES), word_at(t, table.RECV_ARRAY + table.NBYTES)
    if sent and received and source < target + received and target < source + sent:
        return table.REFUSED  # they overlap, which the Python code reports as an error
    set_word_at(t, table.BASES + word_at(t, table.SEND_ARRAY + table.MEMORY), source)
    set_word_at(t, table.BASES + word_at(t, table.RECV_ARRAY + table.MEMORY), target)
    set_word_at(t, table.STARTED_RUN, 1)
    return table.WAITING if word_at(t, table.DEFERRED) else _advance(t, word_at(t, table.CALL_POLLS))


@_compile
def _is_like(array, check):
    """True if an array object has the dtype, the number of dimensions and the number of bytes that a check expects."""
    dimensions = load_word(array + NDIM) & 0xFFFF
    if load_word(array + ITEM_TYPE) != word_at(check, table.DTYPE) or dimensions != word_at(check, table.DIMENSIONS):
        return False
    nbytes, lengths = word_at(check, table.ITEM_BYTES), load_word(array + LENGTHS)
    for index in range(dimensions):
        nbytes *= word_at(lengths, index)
    return nbytes == word_at(check, table.ARRAY_BYTES)


@_compile
def _argument(arguments, check):
    """Address of the object that a check is about: an argument, or an item of an argument's lists and tuples."""
    found = word_at(arguments, word_at(check, table.ARGUMENT))
    for level in range(word_at(check, table.DEPTH)):
        index, is_list = word_at(check, table.PATH + 2 * level), word_at(check, table.PATH + 2 * level + 1)
        found = word_at(load_word(found + LIST_ITEMS) if is_list else found + TUPLE_ITEMS, index)
    return found


@_compile
def _agrees(arguments, checks, count, arrays):
    """True if all checks of the arguments hold; stores the addresses of the two array objects at `arrays`."""
    for _ in range(count):
        found, kind, value = _argument(arguments, checks), word_at(checks, table.CHECK), word_at(checks, table.VALUE)
        if kind == table.IS_OBJECT:
            if found != value:
                return False
        elif load_word(found + TYPE) != value:
            return False
        elif kind == table.IS_SEQUENCE:
            if load_word(found + SIZE) != word_at(checks, table.ITEM_COUNT):
                return False
        else:
            if not _is_like(found, checks):
                return False
            for array in range(2):
                if word_at(checks, table.ARRAY) & 1 << array:
                    set_word_at(arrays, array, found)
        checks += 8 * table.CHECK_WORDS
    return True


def _call(calls, arguments, count):
    c = load_word(calls + DATA)
    channels, arrays, entry = word_at(c, table.CHANNELS), c + 8 * table.ARRAYS, c + 8 * table.ENTRIES
    started = word_at(channels, table.STARTED)
    channel = started & (word_at(channels, table.CHANNEL_COUNT) - 1)  # a division would take longer
    entries = word_at(c, table.ENTRY_COUNT) if word_at(channels, table.HELD + channel) == 0 else 0
    for index in range(entries):
        t = word_at(entry, table.TABLE)
        set_word_at(arrays, 0, word_at(entry, table.NO_ARRAY))
        set_word_at(arrays, 1, word_at(entry, table.NO_ARRAY))
        if word_at(entry, table.CHANNEL) == channel and _agrees(
            arguments, word_at(entry, table.CHECKS), word_at(entry, table.CHECK_COUNT), arrays
        ):
            result = _run_on(word_at(arrays, 0), word_at(arrays, 1), t)
            if result != table.REFUSED:
                set_word_at(channels, table.STARTED, started + 1)
                return new_number(result + (table.RESULT + 1) * index if result else result)
        entry += 8 * table.ENTRY_WORDS
    return new_number(table.REFUSED)


def _run(send, recv, t):
    return _run_on(object_address(send), object_address(recv), t)


def _copy(target, source, nbytes):
    copy_bytes(target, source, nbytes)


def _advance_patiently(t, spins, naps):
    result = advance(t, spins)
    for _ in range(naps):
        if result != table.WAITING:
            break
        sleep_us(types.int32(NAP_US))
        result = advance(t, spins)
    return result


_compiling = RLock()
"""Held while functions are compiled: two threads would write the same files."""


class Functions(NamedTuple):
    """Compiled functions. Each returns a result of `program_table`, after at most `spins` polls without progress, or as
    many as the table of the program says."""

    call: Callable[[Any], Callable[..., int]]
    """``call(calls)(sendbuf, recvbuf, op, root, algorithm, segments)`` starts the program of a call, if `calls` has it:
    words as in `program_table`. It returns the result and, unless that is `DONE`, in the bits above `RESULT` the
    entry."""

    run: Callable[..., int]
    """``run(sendbuf, recvbuf, table)`` starts a program on these arrays."""

    advance: Callable[..., int]
    """``advance(table, spins)`` goes on with a program, or starts it on the memory that its table names."""

    copy: Callable[[int, int, int], None]
    """``copy(target, source, nbytes)`` copies memory, with less overhead than `ctypes.memmove`."""

    advance_patiently: Callable[..., int]
    """``advance_patiently(table, spins, naps)`` is `advance` with up to `naps` sleeps of `NAP_US` while it waits.

    It releases the interpreter's lock (GIL)."""

    start: Callable[[Any], Callable[..., int]]
    """``start(numbers)(request)`` starts a program for its persistent request, with the table as an array.

    `REFUSED` if that is left to Python; `WAITING` if the request is active, and the progress thread must be woken."""

    activate: Callable[[Any], Callable[..., int]]
    """``activate(numbers)(request)`` makes the request of a program active; else as `start`."""

    end: Callable[[Any], Callable[..., int]]
    """``end(numbers)(request)`` advances an active request; at the end of the program it becomes inactive. An idle
    persistent request is at its end. With a second argument it polls, if no other request is active."""

    take_back: Callable[[Any], Callable[..., int]]
    """``take_back(numbers)(request)`` leaves a request to Python code; `WAITING` if it is active, `DONE` if it is a
    persistent one that is idle, `REFUSED` if Python code manages it already."""

    take_handle: Callable[[Any], Callable[..., int]]
    """``take_handle(handles)(request)`` gives a request a complete MPI handle that was kept; `REFUSED` if none was."""

    keep_handle: Callable[[Any], Callable[..., int]]
    """``keep_handle(handles)(request)`` keeps the complete MPI handle of a request, which becomes null; `REFUSED` if
    that is null already, or too many are kept."""


@cache
def functions() -> Functions:
    """Compile the functions, or load them from disk."""
    with _compiling:
        return Functions(
            bindable(_compile(_call)),
            _entry(_compile(_run), (HANDLE, HANDLE, types.int64)),
            _entry(_advance, (types.int64, types.int64)),
            _entry(_compile(_copy), (types.int64, types.int64, types.int64)),
            _entry(_compile_released(_advance_patiently), (types.int64, types.int64, types.int64)),
            bindable(_compile(request_kernel.start)),
            bindable(_compile(request_kernel.activate)),
            bindable(_compile(request_kernel.end)),
            bindable(_compile(request_kernel.take_back)),
            bindable(_compile(request_kernel.take_handle)),
            bindable(_compile(request_kernel.keep_handle)),
        )


def _entry(dispatcher: Any, signature: tuple[Any, ...]) -> Callable[..., int]:
    """The function for one signature as Python calls it, without the selection by types that a dispatcher makes."""
    dispatcher.compile(signature)
    return dispatcher.overloads[signature].entry_point

"""Compiled start, progress and end of requests, in place of the same steps in Python.

A request is *managed* by compiled code while its program's table names it (`REQUEST`), or permits starts (`STARTABLE`).
These functions hold the interpreter's lock (GIL) throughout, so that each is one step for all other threads: they need
no lock of their own, and leave `active_requests` as Python code expects it. They are called as `kernel_memory.bindable`
describes, on the table as an array, with the request as their first argument.
"""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

from numba import types

from collectives.runtime import kernel_memory, table_kernel
from collectives.runtime import program_table as table
from collectives.runtime.kernel_memory import (
    DATA,
    LIST_ITEMS,
    SIZE,
    copy_bytes,
    load_word,
    new_number,
    set_word_at,
    word_at,
)
from collectives.runtime.table_kernel import advance
from quant.kernels.jit import compiler

_compile = compiler(table, kernel_memory, table_kernel)

_append = types.ExternalFunction("PyList_Append", types.int32(types.int64, types.int64))
_set_slice = types.ExternalFunction("PyList_SetSlice", types.int32(types.int64, types.int64, types.int64, types.int64))

_compare = types.ExternalFunction("memcmp", types.int32(types.int64, types.int64, types.int64))


@_compile
def _address(numbers):
    """Address of a table, given as an array."""
    return load_word(numbers + DATA)


@_compile
def _active_requests(t):
    return word_at(word_at(t, table.PROGRESS), table.ACTIVE_REQUESTS)


@_compile
def _count_attempt(t):
    words = word_at(t, table.PROGRESS)
    set_word_at(words, table.ATTEMPTS, word_at(words, table.ATTEMPTS) + 1)


@_compile
def _activate(t, request):
    """Make a request active; `DONE`, or `WAITING` if no progress thread is awake."""
    _count_attempt(t)
    set_word_at(t, table.REQUEST, request)
    _append(_active_requests(t), request)
    return table.DONE if word_at(word_at(t, table.PROGRESS), table.HAS_THREAD) else table.WAITING


@_compile
def _deactivate(t):
    requests, request = _active_requests(t), word_at(t, table.REQUEST)
    set_word_at(t, table.REQUEST, 0)
    for index in range(load_word(requests + SIZE)):
        if word_at(load_word(requests + LIST_ITEMS), index) == request:
            _set_slice(requests, index, index + 1, 0)
            break


@_compile
def _is_idle(t):
    return word_at(t, table.STARTABLE) != 0 and word_at(t, table.REQUEST) == 0


def start(numbers, arguments, count):
    t, result = _address(numbers), table.REFUSED
    if _is_idle(t):
        set_word_at(t, table.STARTED_RUN, 1)
        result = advance(t, 0)
        if result != table.DONE:
            result = _activate(t, load_word(arguments))
    return new_number(result)


def activate(numbers, arguments, count):
    return new_number(_activate(_address(numbers), load_word(arguments)))


def end(numbers, arguments, count):
    t, patient = _address(numbers), count > 1
    if word_at(t, table.REQUEST) != load_word(arguments):
        return new_number(table.DONE if _is_idle(t) else table.REFUSED)
    if patient:
        _count_attempt(t)
    polls = word_at(t, table.POLLS) if patient and load_word(_active_requests(t) + SIZE) == 1 else 0
    result = advance(t, polls)
    if result == table.DONE:
        _deactivate(t)
    return new_number(result)


def take_back(numbers, arguments, count):
    t = _address(numbers)
    is_active, is_idle = word_at(t, table.REQUEST) == load_word(arguments), _is_idle(t)
    if not (is_active or is_idle):
        return new_number(table.REFUSED)
    set_word_at(t, table.REQUEST, 0)
    set_word_at(t, table.STARTABLE, 0)
    return new_number(table.WAITING if is_active else table.DONE)


def take_handle(handles, arguments, count):
    words = _address(handles)
    left = word_at(words, table.HANDLES_KEPT) - 1
    if left < 0:
        return new_number(table.REFUSED)
    handle = load_word(arguments) + word_at(words, table.HANDLE_AT)
    copy_bytes(handle, words + 8 * (table.HANDLES + left), word_at(words, table.HANDLE_BYTES))
    set_word_at(words, table.HANDLES_KEPT, left)
    return new_number(table.DONE)


def keep_handle(handles, arguments, count):
    words = _address(handles)
    kept, nbytes = word_at(words, table.HANDLES_KEPT), word_at(words, table.HANDLE_BYTES)
    null = word_at(words, table.NULL_HANDLE)
    handle = load_word(arguments) + word_at(words, table.HANDLE_AT)
    if kept == table.MAX_HANDLES or _compare(handle, null, nbytes) == 0:
        return new_number(table.REFUSED)
    copy_bytes(words + 8 * (table.HANDLES + kept), handle, nbytes)
    copy_bytes(handle, null, nbytes)
    set_word_at(words, table.HANDLES_KEPT, kept + 1)
    return new_number(table.DONE)

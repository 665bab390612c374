"""The compiled functions of `compiled`: needs numba."""

# mypy: ignore-errors
# What numba makes of these functions has other types than Python sees.

from __future__ import annotations

from collections.abc import Callable
from platform import machine
from threading import Lock

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic

from collectives.transport import compiled_exchange as places
from collectives.transport import mailbox
from collectives.transport.compiled_exchange import (
    COPIED,
    DONE,
    ELSEWHERE,
    FROM,
    INTO,
    INTO_COUNT,
    INTO_LABEL,
    LATE,
    MINE,
    MINE_FIRST,
    NO,
    ONE,
    OPERATION,
    OUT,
    OUT_COUNT,
    OUT_LABEL,
    RECV_BYTES,
    SEEN,
    SEND_BYTES,
    TO,
    TOLD_LABEL,
    UNTAKEN,
)
from collectives.transport.mailbox import (
    ACKED,
    AWAKE,
    CELL_BYTES,
    CELLS,
    CELLS_IN,
    CELLS_OUT,
    GOT,
    INBOX,
    INLINE,
    KIND,
    LINE,
    MASK,
    MY_ACK,
    OUTBOX,
    SEEN_SEGMENTS,
    SENT,
    SHOWN,
    SLOTS,
    THEIR_ACK,
    TOLD,
)
from quant.kernels.jit import compiler

_compile = compiler(places, mailbox)


@intrinsic
def _load(_, address):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(_, address, value):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _pointer(_, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _relax(_):
    def generate(context, builder, signature, arguments):
        if machine().lower() in ("x86_64", "amd64"):
            hint = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@_compile
def _end(sendbuf, recvbuf, numbers, plan):
    number, count = numbers[GOT] + 1, plan[INTO_COUNT]
    nbytes = count * recvbuf.itemsize
    slot = number & MASK
    at = numbers[INBOX] + slot * LINE
    flag = _load(at)
    if flag < number * KIND:
        return LATE
    data = at + 8 if nbytes <= INLINE else numbers[CELLS_IN + slot % CELLS]
    if flag != number * KIND + plan[INTO_LABEL]:
        data, told = 0, _load(at + 8)
        if flag != number * KIND + plan[TOLD_LABEL] or _load(at + 16) != nbytes:
            return ELSEWHERE
        for index in range(numbers[SEEN_SEGMENTS]):
            segment = SEEN_SEGMENTS + 1 + 3 * index
            if numbers[segment] <= told and told + nbytes <= numbers[segment + 1]:
                data = numbers[segment + 2] + told - numbers[segment]
        if not data:
            return ELSEWHERE
    elif nbytes > INLINE and _load(at + 8) != nbytes:
        return ELSEWHERE
    numbers[GOT] = number
    came = carray(_pointer(data), (count,), recvbuf.dtype)
    out = recvbuf[plan[INTO] : plan[INTO] + count]
    operation = plan[OPERATION]
    if operation == 0:
        for i in range(count):
            out[i] = came[i]
    else:
        mine = sendbuf[plan[MINE] : plan[MINE] + count]
        left, right = (mine, came) if plan[MINE_FIRST] else (came, mine)
        if operation == 1:
            for i in range(count):
                out[i] = left[i] + right[i]
        elif operation == 2:
            for i in range(count):
                out[i] = left[i] * right[i]
        elif operation == 3:  # of equals NumPy takes the second, which tells zeros apart
            for i in range(count):
                out[i] = left[i] if left[i] > right[i] or left[i] != left[i] else right[i]
        else:
            for i in range(count):
                out[i] = left[i] if left[i] < right[i] or left[i] != left[i] else right[i]
    _store(numbers[MY_ACK], number)
    return DONE


@_compile
def _shown(address, nbytes, numbers):
    for index in range(numbers[SHOWN]):
        segment = SHOWN + 1 + 2 * index
        if numbers[segment] <= address and address + nbytes <= numbers[segment + 1]:
            return True
    return False


def _begin(sendbuf, recvbuf, numbers, plan):
    size, length = sendbuf.size * sendbuf.itemsize, recvbuf.size * recvbuf.itemsize
    if size != plan[SEND_BYTES] or length != plan[RECV_BYTES]:
        return NO
    address, target, tells = sendbuf.ctypes.data, recvbuf.ctypes.data, False
    if not plan[ONE] and address < target + length and target < address + size:
        return NO  # they overlap, which is refused with an error
    if plan[OUT_COUNT]:
        leaving = sendbuf[plan[OUT] : plan[OUT] + plan[OUT_COUNT]]
        nbytes = leaving.size * leaving.itemsize
        address += plan[OUT] * leaving.itemsize
        tells = nbytes >= SEEN and _shown(address, nbytes, numbers) and not (plan[ONE] and plan[INTO_COUNT])
        if not tells and nbytes > numbers[CELL_BYTES]:
            return NO
        number = numbers[SENT] + 1
        taken = number - (SLOTS if nbytes <= INLINE else CELLS)
        if numbers[ACKED] < taken:
            numbers[ACKED] = _load(numbers[THEIR_ACK])
            if numbers[ACKED] < taken:
                return NO
        numbers[SENT] = number
        slot = number & MASK
        at = numbers[OUTBOX] + slot * LINE
        if tells:
            numbers[TOLD] = number
            _store(at + 8, address)
            _store(at + 16, nbytes)
            _store(at, number * KIND + plan[TOLD_LABEL])
        else:
            data = at + 8 if nbytes <= INLINE else numbers[CELLS_OUT + slot % CELLS]
            cell = carray(_pointer(data), (leaving.size,), sendbuf.dtype)
            for i in range(leaving.size):
                cell[i] = leaving[i]
            if nbytes > INLINE:
                _store(at + 8, nbytes)
            _store(at, number * KIND + plan[OUT_LABEL])
    if plan[COPIED]:
        mine = sendbuf[plan[FROM] : plan[FROM] + plan[COPIED]]
        home = recvbuf[plan[TO] : plan[TO] + plan[COPIED]]
        for i in range(mine.size):
            home[i] = mine[i]
    looks = numbers[AWAKE]
    if plan[INTO_COUNT]:
        number = numbers[GOT] + 1
        at = numbers[INBOX] + (number & MASK) * LINE
        while _load(at) < number * KIND:
            _relax()
            looks -= 1
            if looks < 0:
                return LATE
        said = _end(sendbuf, recvbuf, numbers, plan)
        if said != DONE:
            return said
    if tells:
        while _load(numbers[THEIR_ACK]) < numbers[TOLD]:
            _relax()
            looks -= 1
            if looks < 0:
                return UNTAKEN
        numbers[ACKED] = numbers[TOLD]
    return DONE


_one_at_a_time = Lock()
"""Held while functions are compiled: two threads would write the same files."""


def compiled(dtype: np.dtype) -> tuple[Callable[..., int], Callable[..., int]]:
    """(begin, end) for arrays of the dtype: see `compiled.swap`.

    Each dtype has functions of its own, which are never changed: another thread may be calling those of another dtype.
    """
    array, numbers = types.Array(from_dtype(dtype), 1, "C"), types.Array(types.int64, 1, "C")
    signature = (array, array, numbers, numbers)
    with _one_at_a_time:
        begin, end = _compile(_begin), _compile(_end.py_func)
        for function in (begin, end):
            function.compile(signature)
            function.disable_compile()
        return begin, end

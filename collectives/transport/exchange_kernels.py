"""Numba kernels of the compiled exchange; imported by `compiled_exchange` on first use."""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

from collections.abc import Callable
from platform import machine
from threading import Lock

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic

from collectives.transport import compiled_exchange as plans
from collectives.transport import mailbox
from quant.kernels.jit import compiler

_compile = compiler(plans, mailbox)


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
    number, count = numbers[mailbox.RECEIVED] + 1, plan[plans.INTO_COUNT]
    nbytes = count * recvbuf.itemsize
    slot = number & mailbox.MASK
    at = numbers[mailbox.INBOX] + slot * mailbox.LINE
    flag = _load(at)  # acquire: the message below is at least as new as its flag
    if flag < number * mailbox.KIND:
        return plans.LATE
    data = at + 8 if nbytes <= mailbox.INLINE else numbers[mailbox.CELLS_IN + slot % mailbox.CELLS]
    if flag != number * mailbox.KIND + plan[plans.INTO_LABEL]:
        data, origin = 0, _load(at + 8)
        if flag != number * mailbox.KIND + plan[plans.ADDRESS_LABEL] or _load(at + 16) != nbytes:
            return plans.ELSEWHERE
        for index in range(numbers[mailbox.PEER_SEGMENTS]):
            segment = mailbox.PEER_SEGMENTS + 1 + 3 * index
            if numbers[segment] <= origin and origin + nbytes <= numbers[segment + 1]:
                data = numbers[segment + 2] + origin - numbers[segment]
        if not data:
            return plans.ELSEWHERE
    elif nbytes > mailbox.INLINE and _load(at + 8) != nbytes:
        return plans.ELSEWHERE
    numbers[mailbox.RECEIVED] = number
    incoming = carray(_pointer(data), (count,), recvbuf.dtype)
    out = recvbuf[plan[plans.INTO] : plan[plans.INTO] + count]
    operation = plan[plans.OPERATION]
    if operation == 0:
        for i in range(count):
            out[i] = incoming[i]
    else:
        mine = sendbuf[plan[plans.MINE] : plan[plans.MINE] + count]
        left, right = (mine, incoming) if plan[plans.MINE_FIRST] else (incoming, mine)
        if operation == 1:
            for i in range(count):
                out[i] = left[i] + right[i]
        elif operation == 2:
            for i in range(count):
                out[i] = left[i] * right[i]
        elif operation == 3:  # NumPy returns the second of equals (which differ for signed zeros), and the first NaN
            for i in range(count):
                out[i] = left[i] if left[i] > right[i] or left[i] != left[i] else right[i]
        else:
            for i in range(count):
                out[i] = left[i] if left[i] < right[i] or left[i] != left[i] else right[i]
    _store(numbers[mailbox.MY_ACK], number)  # release: the slot has been read when the peer sees it free
    return plans.DONE


@_compile
def _is_shared(address, nbytes, numbers):
    for index in range(numbers[mailbox.OUR_SEGMENTS]):
        segment = mailbox.OUR_SEGMENTS + 1 + 2 * index
        if numbers[segment] <= address and address + nbytes <= numbers[segment + 1]:
            return True
    return False


@_compile
def _spin(address, wanted, spins):
    """Poll the word at `address` until it reaches `wanted`; return the polls left of `spins`, or -1 if it gave up."""
    while _load(address) < wanted:
        _relax()
        spins -= 1
        if spins < 0:
            break
    return spins


def _begin(sendbuf, recvbuf, numbers, plan):
    size, length = sendbuf.size * sendbuf.itemsize, recvbuf.size * recvbuf.itemsize
    if size != plan[plans.SEND_BYTES] or length != plan[plans.RECV_BYTES]:
        return plans.NO
    address, target, by_address = sendbuf.ctypes.data, recvbuf.ctypes.data, False
    if not plan[plans.ONE] and address < target + length and target < address + size:
        return plans.NO  # they overlap, which the Python code reports as an error
    if plan[plans.OUT_COUNT]:
        leaving = sendbuf[plan[plans.OUT] : plan[plans.OUT] + plan[plans.OUT_COUNT]]
        nbytes = leaving.size * leaving.itemsize
        address += plan[plans.OUT] * leaving.itemsize
        long = nbytes >= plans.RENDEZVOUS_BYTES and not (plan[plans.ONE] and plan[plans.INTO_COUNT])
        by_address = long and _is_shared(address, nbytes, numbers)
        if not by_address and nbytes > numbers[mailbox.CELL_BYTES]:
            return plans.NO
        number = numbers[mailbox.SENT] + 1
        taken = number - (mailbox.SLOTS if nbytes <= mailbox.INLINE else mailbox.CELLS)
        if numbers[mailbox.ACKED] < taken:
            numbers[mailbox.ACKED] = _load(numbers[mailbox.THEIR_ACK])
            if numbers[mailbox.ACKED] < taken:
                return plans.NO
        numbers[mailbox.SENT] = number
        slot = number & mailbox.MASK
        at = numbers[mailbox.OUTBOX] + slot * mailbox.LINE
        if by_address:
            numbers[mailbox.BY_ADDRESS] = number
            _store(at + 8, address)
            _store(at + 16, nbytes)
            _store(at, number * mailbox.KIND + plan[plans.ADDRESS_LABEL])
        else:
            data = at + 8 if nbytes <= mailbox.INLINE else numbers[mailbox.CELLS_OUT + slot % mailbox.CELLS]
            cell = carray(_pointer(data), (leaving.size,), sendbuf.dtype)
            for i in range(leaving.size):
                cell[i] = leaving[i]
            if nbytes > mailbox.INLINE:
                _store(at + 8, nbytes)
            _store(at, number * mailbox.KIND + plan[plans.OUT_LABEL])  # release: the data is visible before the flag
    if plan[plans.COPIED]:
        mine = sendbuf[plan[plans.FROM] : plan[plans.FROM] + plan[plans.COPIED]]
        home = recvbuf[plan[plans.TO] : plan[plans.TO] + plan[plans.COPIED]]
        for i in range(mine.size):
            home[i] = mine[i]
    spins = numbers[mailbox.SPIN_BUDGET]
    if plan[plans.INTO_COUNT]:
        number = numbers[mailbox.RECEIVED] + 1
        at = numbers[mailbox.INBOX] + (number & mailbox.MASK) * mailbox.LINE
        spins = _spin(at, number * mailbox.KIND, spins)
        if spins < 0:
            return plans.LATE
        result = _end(sendbuf, recvbuf, numbers, plan)
        if result != plans.DONE:
            return result
    if by_address:
        if _spin(numbers[mailbox.THEIR_ACK], numbers[mailbox.BY_ADDRESS], spins) < 0:
            return plans.UNTAKEN
        numbers[mailbox.ACKED] = numbers[mailbox.BY_ADDRESS]
    return plans.DONE


_compiling = Lock()
"""Held while functions are compiled: two threads would write the same files."""


def compiled(dtype: np.dtype) -> tuple[Callable[..., int], Callable[..., int]]:
    """Compile the functions (begin, end) for 1-D arrays of `dtype`; see `compiled_exchange.swap`.

    Each dtype has functions of its own, as another thread may be calling those of another dtype meanwhile.
    """
    array, numbers = types.Array(from_dtype(dtype), 1, "C"), types.Array(types.int64, 1, "C")
    signature = (array, array, numbers, numbers)
    with _compiling:
        begin, end = _compile(_begin), _compile(_end.py_func)
        for function in (begin, end):
            function.compile(signature)
            function.disable_compile()
        return begin, end

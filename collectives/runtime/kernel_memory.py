"""Memory accesses of compiled code: words, flags and copies at addresses of this process or another one."""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

import ctypes
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba import types
from numba.core import cgutils
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from collectives.transport.copy_speed import IS_X86
from quant.kernels.jit import compiler

_compile = compiler()

WORD = ir.IntType(64)

TYPE, SIZE, LIST_ITEMS, TUPLE_ITEMS = 8, 16, 24, tuple.__basicsize__
"""Offsets in Python's objects: the type; in lists and tuples the length; in a list the pointer to the items, in a tuple
the items."""

DATA, NDIM, LENGTHS, ITEM_TYPE, FLAGS = 16, 24, 32, 56, 64
"""Offsets in NumPy's array object (PyArrayObject): the pointer to the data, the number of dimensions, the pointer to
their lengths, the dtype object, and the flags."""


class ObjectHandle(types.Opaque):
    """Numba type of a Python object that is passed as it is: nothing is checked, converted or counted."""

    def __init__(self) -> None:
        super().__init__(name="ObjectHandle")


HANDLE = ObjectHandle()


@register_model(ObjectHandle)
class _HandleModel(models.OpaqueModel):
    pass


@unbox(ObjectHandle)
def _unbox(_, obj, context):
    return NativeValue(obj)


new_number = types.ExternalFunction("PyLong_FromLong", types.int64(types.int64))
"""Address of a new reference to a Python int."""


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


_FASTCALL = 0x80

_new_method = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)

_definitions: list[tuple[_MethodDefinition, Any]] = []  # methods refer to them, and to the code


def bindable(dispatcher: Any) -> Callable[[Any], Callable[..., int]]:
    """Compile ``function(owner, arguments, count)``; return a function that binds it to an owner.

    Python calls the method with the addresses of the owner and of an array of `count` objects, as it calls its own
    functions in C (METH_FASTCALL). Nothing is converted, unlike at an entry point of numba.
    """
    signature = (types.int64,) * 3
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    definition = _MethodDefinition(dispatcher.py_func.__name__.encode(), address, _FASTCALL, None)
    _definitions.append((definition, compiled))
    return lambda owner: _new_method(ctypes.addressof(definition), owner, None)


def _pointer(builder, address):
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic
def object_address(_, handle):
    """Address of an object."""
    return types.int64(HANDLE), lambda context, builder, signature, args: builder.ptrtoint(args[0], WORD)


@intrinsic
def load_word(_, address):
    """Load the word at an address."""
    return types.int64(types.int64), lambda context, builder, signature, args: builder.load(_pointer(builder, args[0]))


@intrinsic
def store_word(_, address, value):
    def generate(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_compile
def word_at(address, index):
    """Load a word of an array of words."""
    return load_word(address + 8 * index)


@_compile
def set_word_at(address, index, value):
    """Store a word of an array of words."""
    store_word(address + 8 * index, value)


@intrinsic
def load_acquire(_, address):
    """Load a flag; all later loads are at least as new (acquire)."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(_, address, value):
    """Store a flag; all earlier stores are visible to a reader of it (release)."""

    def generate(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def replace_word(_, address, expected, value):
    """Store a word that other processes write too, if it is the expected one; True if so (compare and swap)."""

    def generate(context, builder, signature, args):
        address, expected, value = args
        outcome = builder.cmpxchg(_pointer(builder, address), expected, value, "acq_rel", "acquire")
        return builder.extract_value(outcome, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _copy_bytes(_, target, source, nbytes):
    """Copy memory by the C library."""

    def generate(context, builder, signature, args):
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_BLOCK = ir.VectorType(WORD, 4)
BLOCK_BYTES = 32

LONG_COPY = 1 << 11
"""Bytes from which a copy is long."""

LOOPS_LONG_COPIES = get_host_cpu_name().startswith("znver")
"""True on processors of AMD, on which the C library may copy by an instruction (`rep movsb`) that takes 12 times as
long if the target is some bytes after the source, modulo the size of a page, and longer out of another core's cache.

Elsewhere that instruction takes the least time: it writes lines without reading them first."""

STREAMED = 1 << 22
"""Bytes from which such a loop stores past the caches, which would hardly keep the data: 1.6 times as fast."""


def _block_copy(past_caches):
    """Compiled copy of a block to an aligned address; past the caches: by a store that leaves the data in none."""

    @intrinsic
    def copy(_, target, source):
        def generate(context, builder, signature, args):
            target, source = (builder.inttoptr(address, _BLOCK.as_pointer()) for address in args)
            store = builder.store(builder.load(source, align=1), target, align=BLOCK_BYTES)
            if past_caches:
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return copy


_copy_block, _stream_block = _block_copy(False), _block_copy(True)


@_compile
def _copy_blocks(target, source, nbytes, past_caches):
    head = min(-target % BLOCK_BYTES, nbytes)
    _copy_bytes(target, source, head)
    end = head + (nbytes - head) // BLOCK_BYTES * BLOCK_BYTES
    for start in range(head, end, BLOCK_BYTES):
        if past_caches:
            _stream_block(target + start, source + start)
        else:
            _copy_block(target + start, source + start)
    _copy_bytes(target + end, source + end, nbytes - end)


def _processor_hint(name):
    """Compiled function that executes an instruction without operands of x86; nothing on other processors."""

    @intrinsic
    def execute(_):
        def generate(context, builder, signature, args):
            if IS_X86:
                hint = ir.FunctionType(ir.VoidType(), [])
                builder.call(cgutils.get_or_insert_function(builder.module, hint, name), [])
            return context.get_dummy_value()

        return types.void(), generate

    return execute


relax = _processor_hint("llvm.x86.sse2.pause")
"""Hint to the processor that this is a spin loop."""

_finish_streams = _processor_hint("llvm.x86.sse.sfence")

_finish_stores = _processor_hint("llvm.x86.sse2.mfence")


@intrinsic
def _cycle_count(_):
    def generate(context, builder, signature, args):
        counter = ir.FunctionType(WORD, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, counter, "llvm.readcyclecounter"), [])

    return types.int64(), generate


@_compile
def cycles():
    """Clock of the processor in cycles, after all earlier stores; only on x86."""
    _finish_stores()
    return _cycle_count()


@_compile
def stream_bytes(target, source, nbytes):
    """Copy memory past the caches: no line of the target is read, or taken from another core's cache, first."""
    if not IS_X86:
        _copy_bytes(target, source, nbytes)
        return
    _copy_blocks(target, source, nbytes, True)
    _finish_streams()  # such stores are not ordered before the flag that follows


@_compile
def copy_bytes(target, source, nbytes):
    """Copy memory."""
    if LOOPS_LONG_COPIES and nbytes >= STREAMED:
        stream_bytes(target, source, nbytes)
    elif LOOPS_LONG_COPIES and nbytes >= LONG_COPY:
        _copy_blocks(target, source, nbytes, False)
    else:
        _copy_bytes(target, source, nbytes)


@intrinsic
def reduce_bytes(_, kernel, left, right, out, nbytes):
    """Call the reduction kernel at address `kernel`."""
    arguments = (types.int64,) * 4

    def generate(context, builder, signature, args):
        convention = context.call_conv
        function = convention.get_function_type(types.int64, arguments)
        pointer = builder.inttoptr(args[0], function.as_pointer())
        _, result = convention.call_function(builder, pointer, types.int64, arguments, args[1:])
        return result

    return types.int64(types.int64, *arguments), generate


def _system_call(name):
    """Compiled function of a system call of cross-memory attach; one that fails if the C library lacks it."""
    if hasattr(ctypes.CDLL(None), name):
        return types.ExternalFunction(name, types.int64(types.int32, *(types.int64,) * 5))

    @_compile
    def missing(pid, here, here_count, there, there_count, flags):
        return -1

    return missing


_readv, _writev = _system_call("process_vm_readv"), _system_call("process_vm_writev")

yield_core = types.ExternalFunction("sched_yield", types.int32())

sleep_us = types.ExternalFunction("usleep", types.int32(types.int32))


@_compile
def _copy_process(writes, pid, ours, theirs, nbytes, vector):
    """Copy between memory of this process and that of process `pid`; False if the system refuses."""
    while nbytes > 0:
        store_word(vector, ours)
        store_word(vector + 8, nbytes)
        store_word(vector + 16, theirs)
        store_word(vector + 24, nbytes)
        if writes:
            done = _writev(types.int32(pid), vector, 1, vector + 16, 1, 0)
        else:
            done = _readv(types.int32(pid), vector, 1, vector + 16, 1, 0)
        if done <= 0:
            return False
        ours += done
        theirs += done
        nbytes -= done
    return True


@_compile
def read_process(pid, into, origin, nbytes, vector):
    """Copy `nbytes` from address `origin` of process `pid` to `into`; False if the system refuses.

    `vector` is the address of four words to use.
    """
    return _copy_process(False, pid, into, origin, nbytes, vector)


@_compile
def write_process(pid, source, target, nbytes, vector):
    """Copy `nbytes` from `source` to address `target` of process `pid`; as `read_process`."""
    return _copy_process(True, pid, source, target, nbytes, vector)

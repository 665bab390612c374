"""A stand-in for CuPy, as much of it as Chorus and its GPU tests use, on a GPU made of host memory and good manners.

It is stricter than a GPU where a mistake could pass unseen there:

- nothing that was put on a stream happens until someone waits for that stream, or asks it again and again;
- device arrays refuse the buffer protocol and ``__array__``, and with `GPU.private` (the default when imported by
  tests) device addresses are no addresses of this process: whoever hands one to MPI or NumPy fails at once;
- asynchronous copies take pinned memory only, kernels the arrays of the current device only.

With ``GPU.private = False`` (or STANDIN_PRIVATE=0 in the environment) a real MPI can reach device memory, as a
CUDA-aware one could. `GPU.log` tells who waited for which stream.
``PYTHONPATH=tests/standin`` puts this in place of CuPy.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
import threading
import types
import weakref
from collections import defaultdict, deque
from functools import partial

import numpy as np

__version__ = "stand-in"

HIDDEN = 1 << 62  # beyond what any process can map


class _Gpu:
    """Memory by address, streams of work by number, and a log."""

    def __init__(self):
        self.lock = threading.RLock()
        self.private = os.environ.get("STANDIN_PRIVATE", "1") != "0"
        self.memory = {}  # address -> (weak reference to the block's bytes, device)
        self.pinned = []  # weak references
        self.jobs = defaultdict(deque)  # stream -> (work, the ranges that it touches)
        self.begun = defaultdict(int)
        self.ended = defaultdict(int)
        self.fused = []  # names of kernels that were made of several operations
        self.log = []  # ("wait" | "query" | "to_host" | "to_device" | "kernel", stream, bytes)
        self._next = HIDDEN

    def allocate(self, nbytes, device):
        with self.lock:
            block = np.full(max(nbytes, 1), 0xA5, np.uint8)
            address = self._next if self.private else block.ctypes.data
            self._next += nbytes + 4096
            self.memory[address] = weakref.ref(block), device
            self.memory = {at: entry for at, entry in self.memory.items() if entry[0]() is not None}
            return address, block

    def find(self, address, nbytes):
        """(bytes, device) of what lies there; a segmentation fault, as an exception, if nothing does."""
        with self.lock:
            for start, (block, device) in self.memory.items():
                whole = block()
                if whole is not None and start <= address and address + nbytes <= start + whole.nbytes:
                    return whole[address - start :][:nbytes], device
        raise RuntimeError(f"{nbytes} bytes at {address:#x} are not on this device")

    def at(self, address, nbytes):
        return self.find(address, nbytes)[0]

    def put(self, stream, work, ranges, note):
        """Put work on a stream; it reads and writes the (address, bytes) of `ranges`."""
        with self.lock:
            self.jobs[stream].append((work, ranges))
            self.begun[stream] += 1
            self.log.append(note)

    def run(self, stream, until):
        """Do what is on the stream, up to the job of that number."""
        with self.lock:
            while self.ended[stream] < until:
                work, _ = self.jobs[stream].popleft()
                self.ended[stream] += 1
                work()

    def touched(self, address, nbytes):
        """Streams that hold work on that memory which was not done yet."""
        with self.lock:
            return [
                stream
                for stream, jobs in self.jobs.items()
                if any(a < address + nbytes and address < a + n for _, ranges in jobs for a, n in ranges)
            ]


GPU = _Gpu()


# ------------------------------------------------------------------------------------------ streams and devices

_here = threading.local()


def _stack(name, first):
    if not hasattr(_here, name):
        setattr(_here, name, [first])
    return getattr(_here, name)


class _BaseStream:
    def __init__(self, ptr):
        self.ptr = ptr
        self.number = 0 if ptr == 1 else ptr  # the legacy default stream has two names

    def __eq__(self, other):
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def __enter__(self):
        _stack("streams", Stream.null).append(self)
        return self

    def __exit__(self, *_):
        _here.streams.pop()

    def synchronize(self):
        GPU.log.append(("wait", self.number, 0))
        GPU.run(self.number, GPU.begun[self.number])

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        at = event.at
        GPU.put(self.number, lambda: GPU.run(*at), [], ("wait_event", self.number, at[0]))


class Stream(_BaseStream):
    _count = 16

    def __init__(self, null=False, non_blocking=False):
        Stream._count += 0 if null else 1
        super().__init__(0 if null else Stream._count)


Stream.null = Stream(null=True)


class ExternalStream(_BaseStream):
    pass


def get_current_stream():
    return _stack("streams", Stream.null)[-1]


class Event:
    def __init__(self, block=False, disable_timing=False):
        self.at = (0, 0)

    def record(self, stream):
        self.at = stream.number, GPU.begun[stream.number]

    @property
    def done(self):
        """Whether it is reached; whoever asks makes the GPU go one step on."""
        stream, until = self.at
        GPU.log.append(("query", stream, 0))
        if GPU.ended[stream] >= until:
            return True
        GPU.run(stream, GPU.ended[stream] + 1)
        return False

    def synchronize(self):
        GPU.log.append(("wait", self.at[0], 0))
        GPU.run(*self.at)


class Device:
    def __init__(self, device=None):
        self.id = _stack("devices", 0)[-1] if device is None else device

    def __enter__(self):
        _stack("devices", 0).append(self.id)
        return self

    def __exit__(self, *_):
        _here.devices.pop()


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.keep = ptr, (GPU.at(ptr, size).size == size, owner)


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


class _Owned:
    def __init__(self, nbytes):
        self.ptr, self.block = GPU.allocate(nbytes, Device().id)


def alloc_pinned_memory(nbytes):
    memory = np.full(nbytes, 0xAA, np.uint8)
    with GPU.lock:
        GPU.pinned = [ref for ref in GPU.pinned if ref() is not None] + [weakref.ref(memory)]
    return memory


class CUDARuntimeError(RuntimeError):
    pass


def _memcpy_async(target, source, nbytes, direction, stream):
    there, here = (source, target) if direction == runtime.memcpyDeviceToHost else (target, source)
    pinned = [memory for memory in [ref() for ref in GPU.pinned] if memory is not None]
    if not any(at.ctypes.data <= here and here + nbytes <= at.ctypes.data + at.nbytes for at in pinned):
        raise RuntimeError("an asynchronous copy needs pinned memory")
    device = GPU.at(there, nbytes)

    def work():
        if direction == runtime.memcpyDeviceToHost:
            ctypes.memmove(here, device.ctypes.data, nbytes)
        else:
            ctypes.memmove(device.ctypes.data, here, nbytes)

    number = 0 if stream == 1 else stream
    kind = "to_host" if direction == runtime.memcpyDeviceToHost else "to_device"
    GPU.put(number, work, [(target, nbytes), (source, nbytes)], (kind, number, nbytes))


runtime = types.SimpleNamespace(
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    memcpyAsync=_memcpy_async,
    CUDARuntimeError=CUDARuntimeError,
    getDeviceCount=lambda: 1,
    getDeviceProperties=lambda device: {"name": b"stand-in for a GPU"},
    pointerGetAttributes=lambda pointer: types.SimpleNamespace(device=GPU.find(pointer, 0)[1]),
)
cuda = types.SimpleNamespace(
    Device=Device,
    Event=Event,
    ExternalStream=ExternalStream,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    UnownedMemory=UnownedMemory,
    alloc_pinned_memory=alloc_pinned_memory,
    get_current_stream=get_current_stream,
    runtime=runtime,
)


# ------------------------------------------------------------------------------------------ arrays


class ndarray:
    """An array on the device. Everything that is done with it is put on the current stream."""

    def __init__(self, shape, dtype=float, memptr=None, strides=None):
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "biufc" or self.dtype.itemsize > 16 or self.dtype == np.longdouble:
            raise TypeError(f"cupy has no dtype {self.dtype}")
        self.strides = strides if strides is not None else np.empty(self.shape, self.dtype).strides
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.data = MemoryPointer(_Owned(self.nbytes), 0) if memptr is None else memptr
        self.device = Device(GPU.find(self.data.ptr, 0)[1])

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion of device memory to a NumPy array")

    def __buffer__(self, flags):
        raise TypeError("device memory has no buffer")

    def __len__(self):
        return self.shape[0]

    @property
    def _range(self):
        return self.data.ptr, self._reach

    @property
    def _reach(self):
        if not self.size:
            return 0
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides)) + self.dtype.itemsize

    def _seen(self):
        """What the device sees."""
        return np.ndarray(self.shape, self.dtype, GPU.at(*self._range), 0, self.strides)

    @property
    def __cuda_array_interface__(self):
        dense = self.strides == np.empty(self.shape, self.dtype).strides
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": None if dense else self.strides,
            "stream": get_current_stream().ptr or 1,
        }

    def __dlpack_device__(self):
        return 2, self.device.id

    def __dlpack__(self, *, stream=None, max_version=None, copy=None):
        if stream not in (None, -1) and ExternalStream(stream) != get_current_stream():
            ExternalStream(stream).wait_event(get_current_stream().record())
        capsule = self._seen().__dlpack__(max_version=(1, 0), copy=False)
        from collectives.buffers import dlpack

        tensor = dlpack._Versioned.from_address(dlpack._pointer(capsule, b"dltensor_versioned")).tensor
        tensor.device.device_type, tensor.data = 2, self.data.ptr
        return capsule

    def __getitem__(self, key):
        if _by_arrays(key):
            return _at_once(lambda whole, *key: whole[key], self, *(key if isinstance(key, tuple) else (key,)))
        return self._view(self._seen()[key if key is ... or isinstance(key, tuple) else (key, ...)])

    def __setitem__(self, key, value):
        if _by_arrays(key):
            _at_once(np.ndarray.__setitem__, self, key, value)
        else:
            _kernel("copy", lambda x: x, [value], self[key])

    def copy(self):
        made = ndarray(self.shape, self.dtype)
        made[...] = self
        return made

    def get(self):
        """The values, once all on the current stream is done."""
        stream = get_current_stream()
        GPU.run(stream.number, GPU.begun[stream.number])
        return self._seen().copy()

    @property
    def base(self):
        return getattr(self.data.mem, "owner", None)

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def T(self):
        return self.transpose()

    @property
    def flags(self):
        return types.SimpleNamespace(c_contiguous=self._seen().flags.c_contiguous)

    def _view(self, part):
        """A part of what `_seen` gives, as an array on the same memory."""
        offset = part.ctypes.data - self._seen().ctypes.data if part.size else 0
        return ndarray(part.shape, part.dtype, MemoryPointer(_At(self.data, offset, self), 0), part.strides)

    def transpose(self, *axes):
        return self._view(self._seen().transpose(*axes))

    def swapaxes(self, one, other):
        return self._view(self._seen().swapaxes(one, other))

    def view(self, dtype):
        return self._view(self._seen().view(dtype))

    def reshape(self, *shape):
        seen = self._seen().reshape(*shape)
        return self._view(seen) if np.may_share_memory(seen, self._seen()) else _at_once(np.reshape, self, seen.shape)

    def astype(self, dtype, copy=True):
        return self if self.dtype == dtype and not copy else _at_once(np.ndarray.astype, self, dtype)

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __iter__(self):
        return (self[number] for number in range(len(self)))


def _by_arrays(key):
    """Whether an index picks elements by their numbers, which makes a copy."""
    return any(isinstance(part, ndarray) for part in (key if isinstance(key, tuple) else (key,)))


class _At:
    """A part of another array's memory, which it keeps."""

    def __init__(self, base, offset, owner=None):
        self.base, self.ptr, self.owner = base, base.ptr + offset, owner


def _kernel(name, function, operands, out):
    if isinstance(out, np.ndarray) or any(isinstance(operand, np.ndarray) and operand.ndim for operand in operands):
        raise TypeError("a kernel takes no NumPy arrays")
    arrays = [operand for operand in [*operands, out] if isinstance(operand, ndarray)]
    if any(array.device.id != Device().id for array in arrays):
        raise ValueError("array device must be same as the current device")
    stream = get_current_stream().number
    if len(operands) > 1:  # as CuPy does
        own = [isinstance(x, ndarray) and x is not out and x.data.ptr == out.data.ptr and x.size for x in operands]
        if any(own):
            GPU.log.append(("hidden copy", stream, out.nbytes))
    seen = [operand._seen() if isinstance(operand, ndarray) else operand for operand in operands]
    target = out._seen()

    def work():
        target[...] = function(*seen)

    GPU.put(stream, work, [array._range for array in arrays], ("kernel", stream, out.nbytes))
    return out


def _ufunc(name):
    function = getattr(np, name)

    def ufunc(left, right, out=None):
        if isinstance(left, _Traced) or isinstance(right, _Traced):
            return _taken_down(function, left, right, out=out)
        return _kernel(name, function, [left, right], ndarray(left.shape, left.dtype) if out is None else out)

    ufunc.__name__ = name
    return ufunc


add, multiply, maximum, minimum = map(_ufunc, ("add", "multiply", "maximum", "minimum"))
logical_and, logical_or, logical_xor = map(_ufunc, ("logical_and", "logical_or", "logical_xor"))
bitwise_and, bitwise_or, bitwise_xor = map(_ufunc, ("bitwise_and", "bitwise_or", "bitwise_xor"))


def _on_host(value):
    """Arrays of the device, also in tuples and lists, as what the device sees; arrays of NumPy are refused."""
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("a kernel takes no NumPy arrays")
    if isinstance(value, tuple | list):
        return type(value)(map(_on_host, value))
    return value._seen() if isinstance(value, ndarray) else value


def _at_once(function, *arguments, out=None, **options):
    """NumPy's function on what the device sees, when all before it on the stream is done."""
    stream = get_current_stream().number
    GPU.run(stream, GPU.begun[stream])
    seen = {} if out is None else {"out": _on_host(out)}
    result = function(*_on_host(arguments), **_on_host_options(options), **seen)
    GPU.log.append(("kernel", stream, getattr(result, "nbytes", 0)))
    if out is not None:
        return out
    if isinstance(result, tuple | list):
        return type(result)(map(asarray, result))
    return None if result is None else asarray(result)


def _on_host_options(options):
    return {name: _on_host(value) for name, value in options.items()}


def _operator(name):
    def method(self, *others):
        return _at_once(getattr(np.ndarray, name), self, *others)

    def in_place(self, other):
        return _at_once(getattr(np, PLAIN[name]), self, other, out=self)

    return in_place if name in PLAIN else method


PLAIN = {
    "__iadd__": "add",
    "__isub__": "subtract",
    "__imul__": "multiply",
    "__itruediv__": "true_divide",
    "__ilshift__": "left_shift",
    "__irshift__": "right_shift",
    "__iand__": "bitwise_and",
}
OPERATORS = [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "mod",
    "matmul",
    "neg",
    "abs",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]
for _name in [*(f"__{name}__" for name in OPERATORS), *PLAIN]:
    setattr(ndarray, _name, _operator(_name))
ndarray.__hash__ = object.__hash__


def _method(name):
    return lambda self, *arguments, **options: _at_once(getattr(np, name), self, *arguments, **options)


for _name in ("sum", "mean", "max", "min", "argmax", "any", "all", "cumsum"):
    setattr(ndarray, _name, _method(_name))

FUNCTIONS = frozenset(
    [
        "absolute",
        "arange",
        "argmin",
        "argsort",
        "ascontiguousarray",
        "bincount",
        "clip",
        "concatenate",
        "copysign",
        "cos",
        "divide",
        "empty_like",
        "exp",
        "flatnonzero",
        "floor",
        "isfinite",
        "isinf",
        "log",
        "log1p",
        "matmul",
        "ones",
        "packbits",
        "pad",
        "repeat",
        "rint",
        "sqrt",
        "square",
        "stack",
        "subtract",
        "take_along_axis",
        "tanh",
        "unpackbits",
        "where",
        "zeros_like",
    ]
)
"""Of NumPy's, which CuPy has too, under the same names and with these arguments."""
TYPES = frozenset(
    [
        "bool_",
        "float16",
        "float32",
        "float64",
        "int32",
        "int64",
        "int8",
        "newaxis",
        "uint16",
        "uint32",
        "uint64",
        "uint8",
    ]
)


FUSED = frozenset(["absolute", "clip", "copysign", "exp", "log", "sqrt", "square", "subtract", "tanh", "where"])
"""Of these, what CuPy can make a part of a kernel."""


def _taken_down_or_done(name, *arguments, **options):
    if not any(isinstance(value, _Traced) for value in (*arguments, *options.values())):
        return _at_once(getattr(np, name), *arguments, **options)
    if name not in FUSED:
        raise TypeError(f"CuPy does not fuse {name}")
    return _taken_down(getattr(np, name), *arguments, **options)


def __getattr__(name):
    if name in TYPES:
        return getattr(np, name)
    if name in FUNCTIONS:
        return partial(_taken_down_or_done, name)
    raise AttributeError(f"the stand-in for CuPy has no {name}")


class _Traced:
    """What a function that is fused gets in place of an array or a number: no more than what CuPy's can do."""

    __hash__ = None

    def __init__(self, value):
        self.value = value

    @property
    def dtype(self):
        return np.asarray(self.value).dtype

    @property
    def ndim(self):
        return np.ndim(self.value)

    def astype(self, dtype, copy=True):
        return self if self.dtype == dtype and not copy else _Traced(np.asarray(self.value).astype(dtype))

    def __setitem__(self, key, value):
        if key is not ...:
            raise ValueError("a fused function sets all of an array, by [...]")
        np.copyto(self.value, value.value, casting="same_kind")

    def __bool__(self):
        raise TypeError("a fused function does not know values")


def _taken_down(function, *arguments, out=None):
    given = [value.value if isinstance(value, _Traced) else value for value in arguments]
    if any(isinstance(value, np.ndarray) and value.ndim for value in arguments):
        raise TypeError("a kernel takes no NumPy arrays")
    if out is None:
        return _Traced(function(*given))
    function(*given, out=out.value)
    return out


def _traced_operator(name):
    def method(self, *others):
        return _taken_down(lambda x, *rest: getattr(np.asarray(x), name)(*rest), self, *others)

    def in_place(self, other):
        return _taken_down(getattr(np, PLAIN[name]), self, other, out=self)

    return in_place if name in PLAIN else method


for _name in [*(f"__{name}__" for name in OPERATORS if name not in ("abs", "matmul")), *PLAIN]:
    setattr(_Traced, _name, _traced_operator(_name))


def fuse(*, kernel_name):
    """A function of arrays and numbers as one kernel."""

    def decorate(function):
        def fused(*arguments):
            if not all(isinstance(value, ndarray | np.generic | int | float) for value in arguments):
                raise TypeError(f"{kernel_name}: a kernel takes arrays of the device, and numbers")
            arrays = [value for value in arguments if isinstance(value, ndarray)]
            traced = [_Traced(value._seen() if isinstance(value, ndarray) else value) for value in arguments]
            stream = get_current_stream().number
            GPU.fused.append(kernel_name)
            GPU.put(
                stream, lambda: function(*traced), [one._range for one in arrays], ("kernel", stream, arrays[0].nbytes)
            )

        return fused

    return decorate


_SHIM = """
#include <cmath>
#include <cstring>
#include <algorithm>
using std::max;
#define __device__ static inline
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline int __float_as_int(float a) { int b; std::memcpy(&b, &a, 4); return b; }
static inline float __int_as_float(int a) { float b; std::memcpy(&b, &a, 4); return b; }
"""
_C_TYPES = {"float32": "float", "int32": "int", "uint32": "unsigned int", "uint8": "unsigned char"}


@functools.cache
def _compiled(source):
    """A library from C++, by the compiler of this machine."""
    folder = tempfile.mkdtemp(prefix="standin-")
    path = os.path.join(folder, "kernel.cpp")
    with open(path, "w") as file:
        file.write(source)
    options = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", f"{path}.so", path]
    subprocess.run(["g++", *options], check=True, capture_output=True, text=True)
    return ctypes.CDLL(f"{path}.so")


class ElementwiseKernel:
    """CUDA source for one element, run on the host for all of them; arrays and scalars are broadcast as CuPy does."""

    def __init__(self, in_params, out_params, operation, name="kernel", preamble=""):
        def parsed(text):
            return [tuple(part.split()) for part in text.split(",")]

        self.takes, self.gives = parsed(in_params), parsed(out_params)
        every = [*self.takes, *self.gives]
        arguments = ", ".join(f"{_C_TYPES[kind]} *all_{label}" for kind, label in every)
        before = "".join(f"{_C_TYPES[kind]} {label} = all_{label}[i];" for kind, label in every)
        after = "".join(f"all_{label}[i] = {label};" for _, label in self.gives)
        loop = f"for (long long i = 0; i < n; i++) {{ {before} {{ {operation} }} {after} }}"
        self.run = _compiled(f'{_SHIM}{preamble}extern "C" void {name}(long long n, {arguments}) {{ {loop} }}')[name]

    def __call__(self, *arguments):
        out = arguments[len(self.takes) :]
        if len(arguments) != len(self.takes) + len(self.gives):
            raise TypeError("the stand-in wants all results handed over")
        if any(isinstance(x, np.ndarray) and x.ndim for x in arguments):
            raise TypeError("a kernel takes no NumPy arrays")

        def work(*seen):
            types = [np.dtype(kind) for kind, _ in [*self.takes, *self.gives]]
            for value, dtype in zip(seen, types):
                if np.asarray(value).dtype != dtype:
                    raise TypeError(f"{np.asarray(value).dtype}, where the kernel has {dtype}")
            shape = np.broadcast_shapes(*(np.shape(value) for value in seen))
            dense = [np.array(np.broadcast_to(value, shape), dtype, order="C") for value, dtype in zip(seen, types)]
            self.run(ctypes.c_longlong(dense[0].size), *(ctypes.c_void_p(array.ctypes.data) for array in dense))
            for target, result in zip(seen[len(self.takes) :], dense[len(self.takes) :]):
                target[...] = result

        _at_once(work, *arguments)
        return out[0] if len(out) == 1 else out


def empty(shape, dtype=float):
    return ndarray(shape, dtype)


def full(shape, value, dtype=float):
    made = ndarray(shape, dtype)
    made[...] = value
    return made


def zeros(shape, dtype=float):
    return full(shape, 0, dtype)


def asarray(values):
    """A copy of host memory, on the device when this returns; an array of the device as it is."""
    if isinstance(values, ndarray):
        return values
    values = np.asarray(values)
    made = ndarray(values.shape, values.dtype)
    made._seen()[...] = values
    return made


def asnumpy(array):
    return array.get() if isinstance(array, ndarray) else np.asarray(array)

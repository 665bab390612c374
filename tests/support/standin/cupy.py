"""A stand-in for CuPy, as much of it as Chorus and its GPU tests use, on a GPU made of host memory and good manners.

It is stricter than a GPU where a mistake could pass unseen there:

- nothing that was put on a stream happens until someone waits for that stream, or asks it again and again;
- device arrays refuse the buffer protocol and ``__array__``, and with `GPU.private` (the default when imported by
  tests) device addresses are no addresses of this process: whoever hands one to MPI or NumPy fails at once;
- asynchronous copies take pinned memory only, kernels the arrays of the current device only;
- what a kernel writes to another device's memory arrives when the kernel makes a fence for the system, or ends, and
  then in any order.

With ``GPU.private = False`` (or STANDIN_PRIVATE=0 in the environment) a real MPI can reach device memory, as a
CUDA-aware one could. STANDIN_ENGINE=SEED in the environment starts an `Engine`, which processes that share a GPU need.
`GPU.log` tells who waited for which stream. ``PYTHONPATH=tests/standin`` puts this in place of CuPy.
"""

import bisect
import ctypes
import itertools
import math
import os
import random
import threading
import time
import types
import weakref
from collections import defaultdict, deque
from functools import cache, cached_property, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import ml_dtypes
import numpy as np


def _beside(name):
    """A module beside this file, which may be a package's or a module of its own."""
    spec = spec_from_file_location(f"standin_{name}", Path(__file__).with_name(f"{name}.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


interprocess, raw_kernels = _beside("interprocess"), _beside("raw_kernels")

__version__ = "stand-in"

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN = 1 << 62  # beyond what any process can map


class _Gpu:
    """Memory by address, streams of work by number, and a log."""

    def __init__(self):
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # work was put on a stream, or has ended
        self.private = os.environ.get("STANDIN_PRIVATE", "1") != "0"
        self.memory = {}  # address -> (weak reference to the block's bytes, device)
        self._addresses = []  # of `memory`, sorted; also of blocks that were freed since the last tidying
        self._tidy_at = 64  # blocks
        self.pinned = []  # weak references
        self.registered = {}  # bytes by address
        self.pageable = False  # copies take other host memory too, and are then waited for
        self.jobs = defaultdict(deque)  # stream -> (work, the ranges that it touches)
        self.begun = defaultdict(int)
        self.ended = defaultdict(int)
        self.launched = []  # names of raw kernels
        self.shared = {}  # files of shared memory by first address: what was exported, or opened
        self.opened = {}  # by handle: [address, number of times it was opened]
        self.events = weakref.WeakValueDictionary()  # by number
        self.opened_events = []
        self.asynchronous_pool = False
        self.devices, self.device = 1, 0  # how many there are, and the one that is current at first
        self.refused = set()  # pairs of devices without access to each other
        self.total, self.limit = 1 << 40, 0
        self.turns = interprocess.Turns(os.environ.get("STANDIN_GPU"))
        self.engine = None
        self.log = []  # ("wait" | "query" | "to_host" | "to_device" | "kernel", stream, bytes)
        self._next = HIDDEN

    def used(self):
        """Bytes of arrays in memory of the pool."""
        blocks = [block() for block, _ in self.memory.values()]
        return sum(block.nbytes for block in blocks if block is not None)

    def allocate(self, nbytes, device):
        with self.lock:
            if self.limit and self.used() + nbytes > self.limit:
                raise OutOfMemoryError(nbytes, self.used(), self.limit)
            block = np.full(max(nbytes, 1), 0xA5, np.uint8)
            address = self._next if self.private else block.ctypes.data
            self._next += -(-nbytes // 512) * 512 + 4096
            self.place(address, block, device)
            return address, block

    def place(self, address, block, device):
        """Let a block of bytes be memory of the device at an address; blocks may overlap."""
        with self.lock:
            if address not in self.memory:
                bisect.insort(self._addresses, address)
            self.memory[address] = weakref.ref(block), device
            if len(self.memory) >= self._tidy_at:
                self.memory = {at: entry for at, entry in self.memory.items() if entry[0]() is not None}
                self._addresses = sorted(self.memory)
                self._tidy_at = 64 + 2 * len(self.memory)

    def adopt(self, shared, device):
        """Give shared memory an address on the device."""
        with self.lock:
            address = self._next if self.private else shared.bytes.ctypes.data
            self._next += -(-shared.nbytes // 512) * 512 + 4096
            self.shared[address] = shared, device
            return address

    def find(self, address, nbytes):
        """(bytes, device) of what lies there; a segmentation fault, as an exception, if nothing does."""
        with self.lock:
            for start, (shared, device) in self.shared.items():
                if start <= address and address + nbytes <= start + shared.nbytes:
                    shared.check()
                    return shared.bytes[address - start :][:nbytes], device
            for number in range(bisect.bisect_right(self._addresses, address) - 1, -1, -1):
                start = self._addresses[number]
                block, device = self.memory[start]
                whole = block()
                if whole is not None and address + nbytes <= start + whole.nbytes:
                    return whole[address - start :][:nbytes], device
        raise RuntimeError(f"{nbytes} bytes at {address:#x} are not on this device")

    def around(self, address):
        """(bytes, device) of the memory that begins there, or else ends there."""
        try:
            return self.find(address, 1)
        except RuntimeError:
            return self.find(address, 0)

    def reaches(self, device, other):
        return (min(device, other), max(device, other)) not in self.refused

    def is_pinned(self, address, nbytes):
        pinned = [memory for memory in [ref() for ref in self.pinned] if memory is not None]
        ranges = [(at.ctypes.data, at.nbytes) for at in pinned] + list(self.registered.items())
        return any(start <= address and address + nbytes <= start + length for start, length in ranges)

    def check(self, view):
        """Raise if a view is of shared memory that was freed, or closed here, since."""
        at = view.ctypes.data
        for shared, _ in list(self.shared.values()):
            if shared.bytes.ctypes.data <= at <= shared.bytes.ctypes.data + shared.nbytes:
                shared.check()

    def at(self, address, nbytes):
        return self.find(address, nbytes)[0]

    def put(self, stream, work, ranges, note, ready=None):
        """Put work on a stream; it reads and writes the (address, bytes) of `ranges`, and waits until `ready`."""
        with self.lock:
            self.jobs[stream].append((work, ranges, ready, note[0]))
            self.begun[stream] += 1
            self.log.append(note)
            self.changed.notify_all()

    def run(self, stream, until):
        """Do what is on the stream, up to the job of that number."""
        while self.ended[stream] < until:
            if self.engine is not None and threading.current_thread() is not self.engine.thread:
                self.engine.check()
                with self.changed:
                    if self.ended[stream] < until:
                        self.changed.wait(1e-3)
            elif not self.step(stream):
                time.sleep(1e-5)

    def step(self, stream):
        """Do the next job of a stream; False if that has none, or waits for another process."""
        with self.lock:
            if not self.jobs[stream]:
                return False
            work, _, ready, kind = self.jobs[stream][0]
            if ready is not None and not ready():
                return False
            self.jobs[stream].popleft()
            try:
                if kind == "kernel":
                    with self.turns.held():
                        work()
                else:
                    work()
            finally:
                self.ended[stream] += 1
                self.changed.notify_all()
            return True

    def touched(self, address, nbytes):
        """Streams that hold work on that memory which was not done yet."""
        with self.lock:
            return [
                stream
                for stream, jobs in self.jobs.items()
                if any(a < address + nbytes and address < a + n for _, ranges, *_ in jobs for a, n in ranges)
            ]


class Engine:
    """The GPU at work by itself: a thread that does the streams' jobs in a random order of `seed`, with delays.

    Hosts only wait for it. An error of a job is raised to the next host that waits.
    """

    def __init__(self, gpu, seed, delay=1e-3):
        self._gpu, self._random, self._delay = gpu, random.Random(seed), delay
        self._error, self._ends = None, False
        self.thread = threading.Thread(target=self._work, daemon=True)
        gpu.engine = self
        self.thread.start()

    def _work(self):
        while not self._ends:
            with self._gpu.changed:
                streams = [stream for stream, jobs in self._gpu.jobs.items() if jobs]
                if not streams:
                    self._gpu.changed.wait(1e-3)
                    continue
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * self._delay)
            try:
                if not self._gpu.step(self._random.choice(streams)):
                    time.sleep(1e-5)
            except BaseException as error:
                self._error = error

    def check(self):
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def stop(self):
        self._ends = True
        self.thread.join()
        self._gpu.engine = None
        self.check()


GPU = _Gpu()
if "STANDIN_ENGINE" in os.environ:
    Engine(GPU, int(os.environ["STANDIN_ENGINE"]))


# ------------------------------------------------------------------------------------------ streams and devices

_here = threading.local()


def _stack(name, first):
    if not hasattr(_here, name):
        setattr(_here, name, [first])
    return getattr(_here, name)


_non_blocking = set()
"""Numbers of the streams that the default one does not wait for."""


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

    @property
    def done(self):
        """Whether all work has ended, with that of blocking streams for the default one.

        Whoever asks makes the GPU go one step on.
        """
        GPU.log.append(("query", self.number, 0))
        streams = [self.number] if self.number else [one for one in list(GPU.begun) if one not in _non_blocking]
        busy = [stream for stream in streams if GPU.ended[stream] < GPU.begun[stream]]
        if busy and GPU.engine is None:
            GPU.step(busy[0])
        elif busy:
            GPU.engine.check()
        return not busy

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        if event.shared is not None:
            GPU.put(self.number, lambda: None, [], ("wait_event", self.number, 0), event.shared.awaited())
            return
        at = event.at
        GPU.put(self.number, lambda: None, [], ("wait_event", self.number, at[0]), lambda: _reached(*at, self.number))


def _reached(stream, until, waiting):
    """Whether a stream has come that far; without an engine, it goes there now."""
    if GPU.engine is None and stream != waiting:
        GPU.run(stream, until)
    return GPU.ended[stream] >= until or stream == waiting


class Stream(_BaseStream):
    _count = 16

    def __init__(self, null=False, non_blocking=False):
        Stream._count += 0 if null else 1
        super().__init__(0 if null else Stream._count)
        if non_blocking:
            _non_blocking.add(self.number)


Stream.null = Stream(null=True)


class ExternalStream(_BaseStream):
    pass


def get_current_stream(device_id=-1):
    return _stack("streams", Stream.null)[-1]


class Event:
    _count = 1 << 20

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        if interprocess and not disable_timing:
            raise CUDARuntimeError("cudaErrorInvalidValue: events between processes take no times")
        self.at = (0, 0)
        self.shared = _interprocess_event() if interprocess else None
        Event._count += 1
        self.ptr = Event._count
        GPU.events[self.ptr] = self

    def record(self, stream=None):
        stream = get_current_stream() if stream is None else stream
        if self.shared is not None:
            GPU.put(stream.number, self.shared.record(), [], ("record", stream.number, 0))
        self.at = stream.number, GPU.begun[stream.number]

    @property
    def _is_opened(self):
        """Whether it is another process's."""
        return self.shared is not None and self.at == (0, 0)

    @property
    def done(self):
        """Whether it is reached; whoever asks makes the GPU go one step on."""
        stream, until = self.at
        GPU.log.append(("query", stream, 0))
        if self._is_opened:
            return self.shared.awaited()()
        if GPU.ended[stream] >= until:
            return True
        if GPU.engine is None:
            GPU.step(stream)
        else:
            GPU.engine.check()
        return False

    def synchronize(self):
        GPU.log.append(("wait", self.at[0], 0))
        if self._is_opened:
            reached = self.shared.awaited()
            while not reached():
                time.sleep(1e-5)
        GPU.run(*self.at)


def _current_device():
    device = _stack("devices", None)[-1]
    return GPU.device if device is None else device


class Device:
    cublas_handle = 77

    def __init__(self, device=None):
        if device is not None and not 0 <= device < GPU.devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.id = _current_device() if device is None else device

    def __enter__(self):
        _stack("devices", None).append(self.id)
        return self

    def __exit__(self, *_):
        _here.devices.pop()


class Memory:
    """Memory of cudaMalloc, past the pool; other processes can open it."""

    def __init__(self, size):
        self.size, self.device_id = size, Device().id
        shared = interprocess.Shared(size, self.device_id)
        shared.bytes[: 1 << 20] = 0xA5
        self.ptr = GPU.adopt(shared, self.device_id)
        weakref.finalize(self, _free_shared, GPU, self.ptr)


def _free_shared(gpu, address):
    shared, _ = gpu.shared.pop(address)
    shared.free()


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.keep = ptr, (GPU.at(ptr, size).size == size, owner)


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    @property
    def device_id(self):
        return GPU.find(self.ptr, 0)[1]

    def memset_async(self, value, size, stream=None):
        number = (get_current_stream() if stream is None else stream).number
        GPU.put(number, lambda: _fill(GPU.at(self.ptr, size), value), [(self.ptr, size)], ("memset", number, size))


def _fill(block, value):
    """Fill a block of bytes; of a long one 2 MiB at each end, as the project only waits for it."""
    block[: 1 << 21] = value
    block[-(1 << 21) :] = value


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


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        text = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
        super().__init__(f"{text}, limit set to: {limit:,} bytes)." if limit else f"{text}).")


class MemoryPool:
    """The pool of all arrays, which keeps nothing that is freed."""

    def used_bytes(self):
        return GPU.used()

    def total_bytes(self):
        return GPU.used()

    def free_all_blocks(self, stream=None):
        GPU.log.append(("free blocks", 0, 0))

    def get_limit(self):
        return GPU.limit

    def set_limit(self, size=None, fraction=None):
        GPU.limit = size


_pool = MemoryPool()


def get_default_memory_pool():
    return _pool


def _memcpy_async(target, source, nbytes, direction, stream):
    number = 0 if stream == 1 else stream
    ranges = [(target, nbytes), (source, nbytes)]
    if direction in (runtime.memcpyDefault, runtime.memcpyDeviceToDevice):
        ends = [GPU.find(at, nbytes) for at in (target, source)]
        if not GPU.reaches(*(device for _, device in ends)):
            raise CUDARuntimeError("cudaErrorInvalidValue: no access between these devices")
        copy = partial(np.copyto, *(view for view, _ in ends))

        def checked():
            for view, _ in ends:
                GPU.check(view)
            copy()

        GPU.put(number, checked, ranges, ("copy", number, nbytes))
        return
    there, here = (source, target) if direction == runtime.memcpyDeviceToHost else (target, source)
    is_pinned = GPU.is_pinned(here, nbytes)
    if not is_pinned and not GPU.pageable:
        raise RuntimeError("an asynchronous copy needs pinned memory")
    device = GPU.at(there, nbytes)

    def work():
        if direction == runtime.memcpyDeviceToHost:
            ctypes.memmove(here, device.ctypes.data, nbytes)
        else:
            ctypes.memmove(device.ctypes.data, here, nbytes)

    kind = "to_host" if direction == runtime.memcpyDeviceToHost else "to_device"
    GPU.put(number, work, ranges, (kind, number, nbytes))
    if not is_pinned:
        GPU.run(number, GPU.begun[number])


def _exported(pointer):
    """Shared memory that holds an address of the device; the handle is that of the whole allocation, as CUDA's is."""
    for start, (shared, _) in GPU.shared.items():
        if start <= pointer < start + shared.nbytes and shared.pid == os.getpid():
            return shared.handle
    reason = "memory of an asynchronous pool" if GPU.asynchronous_pool else "not memory of cudaMalloc"
    raise CUDARuntimeError(f"cudaErrorInvalidValue: invalid argument ({reason})")


def _open_memory(handle, flags=1):
    if handle not in GPU.opened:
        shared = _refused(interprocess.Shared.open, handle)
        if not GPU.reaches(Device().id, shared.device):
            raise CUDARuntimeError("cudaErrorPeerAccessUnsupported: peer access is not supported between two devices")
        GPU.opened[handle] = [GPU.adopt(shared, shared.device), 0]
    GPU.opened[handle][1] += 1
    return GPU.opened[handle][0]


def _close_memory(pointer):
    handle = next((handle for handle, (address, _) in GPU.opened.items() if address == pointer), None)
    if handle is None:
        raise CUDARuntimeError("cudaErrorInvalidValue: this memory was not opened")
    if GPU.shared[pointer][0].words[interprocess.FREED]:
        raise CUDARuntimeError("memory of another process is closed after that has freed it")
    GPU.opened[handle][1] -= 1
    if not GPU.opened[handle][1]:
        _free_shared(GPU, GPU.opened.pop(handle)[0])


def _refused(call, *arguments):
    try:
        return call(*arguments)
    except interprocess.Refused as error:
        raise CUDARuntimeError(str(error)) from None


def _interprocess_event():
    return interprocess.SharedEvent()


def _event_handle(event):
    shared = GPU.events[event].shared
    if shared is None:
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: the event is not for other processes")
    return shared.shared.handle


def _open_event(handle):
    event = Event(disable_timing=True)
    event.shared = interprocess.SharedEvent(_refused(interprocess.Shared.open, handle))
    GPU.opened_events.append(event)
    return event.ptr


def _stream_of(pointer):
    return ExternalStream(pointer)


def _host_register(address, nbytes, flags):
    if flags not in (0, 1) or any(a < address + nbytes and address < a + n for a, n in GPU.registered.items()):
        raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered: part or all of the memory is registered")
    GPU.registered[address] = nbytes


def _host_unregister(address):
    if GPU.registered.pop(address, None) is None:
        raise CUDARuntimeError("cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered region")


def _attribute(number, device):
    """Of the device: processors, and whether events between processes work, for which the GPU must work by itself."""
    return {16: 2, 125: int(GPU.engine is not None)}[number]


def _device_on(bus):
    for device in range(GPU.devices):
        if runtime.deviceGetPCIBusId(device) == bus:
            return device
    raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")


_ELEMENTS = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: BFLOAT16}
"""Dtypes by CUDA's numbers."""


def _gemm_strided(
    handle, transa, transb, m, n, k, alpha, a, atype, lda, stridea, b, btype, ldb, strideb, beta,
    c, ctype, ldc, stridec, batch_count, compute_type, algo,
):  # fmt: skip
    """Products of matrices by columns, as cuBLAS makes them: sums in float32, each rounded once."""
    assert compute_type == 68 and handle == Device.cublas_handle
    factors = [ctypes.c_float.from_address(at).value for at in (alpha, beta)]

    def stack(address, kind, rows, columns, leading, stride):
        assert leading >= rows
        dtype, reach = _ELEMENTS[kind], (batch_count - 1) * stride + (columns - 1) * leading + rows
        strides = (stride * dtype.itemsize, dtype.itemsize, leading * dtype.itemsize)
        flat = GPU.at(address, reach * dtype.itemsize).view(dtype)
        return np.lib.stride_tricks.as_strided(flat, (batch_count, rows, columns), strides)

    left = stack(a, atype, *((k, m) if transa else (m, k)), lda, stridea)
    right = stack(b, btype, *((n, k) if transb else (k, n)), ldb, strideb)
    out = stack(c, ctype, m, n, ldc, stridec)

    def work():
        one, other = (part.astype(np.float32) for part in (left, right))
        one, other = one.swapaxes(1, 2) if transa else one, other.swapaxes(1, 2) if transb else other
        before = factors[1] * out.astype(np.float32) if factors[1] else 0
        out[...] = (factors[0] * (one @ other) + before).astype(out.dtype)

    stream = get_current_stream().number
    GPU.put(stream, work, [(a, 1), (b, 1), (c, 1)], ("kernel", stream, out.nbytes))


def _gemm(
    handle, transa, transb, m, n, k, alpha, a, atype, lda, b, btype, ldb, beta, c, ctype, ldc, compute_type, algo
):
    begin, end = (handle, transa, transb, m, n, k, alpha), (compute_type, algo)
    _gemm_strided(*begin, a, atype, lda, 0, b, btype, ldb, 0, beta, c, ctype, ldc, 0, 1, *end)


cublas = types.SimpleNamespace(
    CUBLAS_OP_N=0,
    CUBLAS_OP_T=1,
    CUBLAS_COMPUTE_32F=68,
    CUBLAS_GEMM_DEFAULT=-1,
    gemmEx=_gemm,
    gemmStridedBatchedEx=_gemm_strided,
)


def _synchronize():
    for stream in list(GPU.begun):
        GPU.log.append(("wait", stream, 0))
        GPU.run(stream, GPU.begun[stream])


runtime = types.SimpleNamespace(
    deviceGetAttribute=_attribute,
    deviceCanAccessPeer=lambda device, peer: int(device != peer and GPU.reaches(device, peer)),
    deviceGetByPCIBusId=_device_on,
    deviceGetPCIBusId=lambda device: f"0000:{Device(device).id:02x}:00.0",
    deviceSynchronize=_synchronize,
    ipcGetMemHandle=_exported,
    ipcOpenMemHandle=_open_memory,
    ipcCloseMemHandle=_close_memory,
    ipcGetEventHandle=_event_handle,
    ipcOpenEventHandle=_open_event,
    eventRecord=lambda event, stream: GPU.events[event].record(_stream_of(stream)),
    eventQuery=lambda event: 0 if GPU.events[event].done else 600,
    eventSynchronize=lambda event: GPU.events[event].synchronize(),
    eventDestroy=lambda event: GPU.opened_events.remove(GPU.events.pop(event)),
    streamWaitEvent=lambda stream, event, flags=0: _stream_of(stream).wait_event(GPU.events[event]),
    hostRegister=_host_register,
    hostUnregister=_host_unregister,
    CUDA_R_32F=0,
    CUDA_R_16F=2,
    CUDA_R_16BF=14,
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    memcpyDeviceToDevice=3,
    memcpyDefault=4,
    memcpyAsync=_memcpy_async,
    CUDARuntimeError=CUDARuntimeError,
    getDeviceCount=lambda: GPU.devices,
    getDeviceProperties=lambda device: {"name": b"stand-in for an H100 GPU"},
    pointerGetAttributes=lambda pointer: types.SimpleNamespace(device=GPU.find(pointer, 0)[1], type=2),
)
cuda = types.SimpleNamespace(
    Device=Device,
    Event=Event,
    ExternalStream=ExternalStream,
    Memory=Memory,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    UnownedMemory=UnownedMemory,
    alloc_pinned_memory=alloc_pinned_memory,
    cublas=cublas,
    get_current_stream=get_current_stream,
    memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    runtime=runtime,
)


# ------------------------------------------------------------------------------------------ arrays


@cache
def _dense(shape, itemsize):
    """Strides of an array in C order, as NumPy's."""
    return np.empty(shape, f"V{itemsize}").strides


class ndarray:
    """An array on the device. Everything that is done with it is put on the current stream."""

    def __init__(self, shape, dtype=float, memptr=None, strides=None):
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        if (
            (self.dtype.kind not in "biufc" and self.dtype != BFLOAT16)
            or self.dtype.itemsize > 16
            or self.dtype == np.longdouble
        ):
            raise TypeError(f"cupy has no dtype {self.dtype}")
        self.strides = _dense(self.shape, self.dtype.itemsize) if strides is None else strides
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.data = MemoryPointer(_Owned(self.nbytes), 0) if memptr is None else memptr
        self.device = Device() if memptr is None else Device(GPU.find(self.data.ptr, 0)[1])
        if self.size and self.data.ptr % self.dtype.alignment:  # CUDA fails when a kernel accesses it
            raise CUDARuntimeError("cudaErrorMisalignedAddress: misaligned address")

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion of device memory to a NumPy array")

    def __buffer__(self, flags):
        raise TypeError("device memory has no buffer")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        """A universal function of NumPy: CuPy's of that name."""
        if method != "__call__":
            return NotImplemented
        if out is not None:
            (options["out"],) = out
        return _function(ufunc.__name__)(*inputs, **options)

    def __array_function__(self, function, types, arguments, options):
        """Any other function of NumPy, likewise."""
        return _function(function.__name__)(*arguments, **options)

    def __len__(self):
        return self.shape[0]

    @property
    def _range(self):
        return self.data.ptr, self._reach

    @cached_property
    def _reach(self):
        if not self.size:
            return 0
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides)) + self.dtype.itemsize

    def _seen(self):
        """What the device sees."""
        return np.ndarray(self.shape, self.dtype, GPU.at(*self._range), 0, self.strides)

    @property
    def __cuda_array_interface__(self):
        dense = self.strides == _dense(self.shape, self.itemsize)
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
        if _by_mask(key):
            GPU.log.append(("read", get_current_stream().number, 0))
        if _by_arrays(key):
            return _at_once(lambda whole, *key: whole[_wrapped(whole, key)], self, *_as_tuple(key))
        return self._view(lambda seen: seen[key if key is ... or isinstance(key, tuple) else (key, ...)])

    def __setitem__(self, key, value):
        if _by_arrays(key):
            _at_once(
                lambda whole, key, value: whole.__setitem__(_wrapped(whole, key), value), self, _as_tuple(key), value
            )
        else:
            _kernel("copy", lambda x: x, [value], self[key])

    def copy(self):
        made = ndarray(self.shape, self.dtype)
        made[...] = self
        return made

    def get(self):
        """The values, once all on the current stream is done."""
        stream = get_current_stream()
        GPU.log.append(("read", stream.number, self.nbytes))
        GPU.run(stream.number, GPU.begun[stream.number])
        return self._seen().copy()

    @property
    def base(self):
        return getattr(self.data.mem, "owner", None)

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def itemsize(self):
        return self.dtype.itemsize

    @property
    def T(self):
        return self.transpose()

    @property
    def flags(self):
        flags = self._seen().flags
        return types.SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous)

    def _view(self, part_of):
        """A part of what `_seen` gives, as an array on the same memory."""
        seen = self._seen()
        part = part_of(seen)
        offset = part.ctypes.data - seen.ctypes.data if part.size else 0
        return ndarray(part.shape, part.dtype, MemoryPointer(_At(self.data, offset, self), 0), part.strides)

    def transpose(self, *axes):
        return self._view(lambda seen: seen.transpose(*axes))

    def swapaxes(self, one, other):
        return self._view(lambda seen: seen.swapaxes(one, other))

    def view(self, dtype):
        return self._view(lambda seen: seen.view(dtype))

    def reshape(self, *shape):
        seen = self._seen()
        part = seen.reshape(*shape)
        if np.may_share_memory(part, seen):
            return self._view(lambda _: part)
        return _at_once(np.reshape, self, part.shape)

    def astype(self, dtype, copy=True):
        return self if self.dtype == dtype and not copy else _at_once(np.ndarray.astype, self, dtype)

    def sort(self):
        _at_once(np.ndarray.sort, self)

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


def _as_tuple(key):
    return key if isinstance(key, tuple) else (key,)


def _wrapped(whole, key):
    """An index whose numbers are within the lengths of the axes: CuPy wraps those that are not, without an error."""
    if any(
        part is None or part is Ellipsis or np.asarray(part).dtype == bool for part in key if type(part) is not slice
    ):
        return key
    pairs = zip(key, whole.shape)
    return tuple(part.astype(np.int64) % n if isinstance(part, np.ndarray) and n else part for part, n in pairs)


def _by_mask(key):
    """Whether the length of the result depends on values, which the host waits for."""
    parts = key if isinstance(key, tuple) else (key,)
    return any(isinstance(part, ndarray) and part.dtype == bool for part in parts)


def _function(name):
    return globals()[name] if name in globals() else __getattr__(name)


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


for _name in ("sum", "mean", "max", "min", "argmax", "any", "all", "cumsum", "take"):
    setattr(ndarray, _name, _method(_name))

FUNCTIONS = frozenset(
    [
        "absolute",
        "arange",
        "argmin",
        "argpartition",
        "argsort",
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


READS = frozenset(["bincount", "flatnonzero", "nonzero"])
"""Functions whose results have lengths that depend on values: the host waits for these."""


def _done(name, *arguments, **options):
    if name in READS:
        GPU.log.append(("read", get_current_stream().number, 0))
    return _at_once(getattr(np, name), *arguments, **options)


def __getattr__(name):
    if name in TYPES:
        return getattr(np, name)
    if name in FUNCTIONS:
        return partial(_done, name)
    raise AttributeError(f"the stand-in for CuPy has no {name}")


_SHIM = """
#include <cmath>
#include <cstring>
"""
_C_TYPES = {
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "int64": "long long",
    "uint32": "unsigned int",
    "uint8": "unsigned char",
}


class ElementwiseKernel:
    """CUDA source for one element, run on the host for all of them; arrays and scalars are broadcast as CuPy does."""

    def __init__(self, in_params, out_params, operation, name="kernel", preamble="", options=()):
        def parsed(text):
            return [tuple(part.split()) for part in text.split(",")]

        self.texts = in_params, out_params, operation, name, preamble, *options
        self.takes, self.gives = parsed(in_params), parsed(out_params)
        self.raw = [kind[0] == "raw" for kind in self.takes]  # arrays that the source indexes itself
        self.takes = [tuple(part[-2:]) for part in self.takes]
        every = [*self.takes, *self.gives]
        names = [f"{'' if raw else 'all_'}{label}" for (_, label), raw in zip(every, self._is_raw())]
        arguments = ", ".join(f"{_C_TYPES[kind]} *{name}" for (kind, _), name in zip(every, names))
        before = "".join(
            f"{_C_TYPES[kind]} {label} = {name}[i];" for (kind, label), name in zip(every, names) if name != label
        )
        after = "".join(f"all_{label}[i] = {label};" for _, label in self.gives)
        loop = f"for (long long i = 0; i < n; i++) {{ {before} {{ {operation} }} {after} }}"
        whole = f'{_SHIM}{preamble}extern "C" void {name}(long long n, {arguments}) {{ {loop} }}'
        self.run = raw_kernels.library(whole, "-std=c++14")[name]

    def _is_raw(self):
        return [*self.raw, *(False for _ in self.gives)]

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
            shape = np.broadcast_shapes(*(np.shape(value) for value, raw in zip(seen, self._is_raw()) if not raw))
            dense = [
                np.array(value if raw else np.broadcast_to(value, shape), dtype, order="C")
                for value, dtype, raw in zip(seen, types, self._is_raw())
            ]
            self.run(ctypes.c_longlong(math.prod(shape)), *(ctypes.c_void_p(array.ctypes.data) for array in dense))
            for target, result in zip(seen[len(self.takes) :], dense[len(self.takes) :]):
                target[...] = result

        _at_once(work, *arguments)
        return out[0] if len(out) == 1 else out


class RawKernel:
    """CUDA source of a kernel, run on the host; in structures, 64-bit words that are addresses of the device count."""

    def __init__(self, code, name, options=()):
        self.code, self.name = code, name

    @cached_property
    def kernel(self):
        """The function that is loaded on the device, until it has no references any more."""
        return _Function(RawKernel(self.code, self.name))

    def __call__(self, grid, block, args, *, shared_mem=0):
        self.put(grid, block, args, get_current_stream().number)

    def put(self, grid, block, args, stream):
        device = Device().id
        given = [_on_this_process(value, device) for value in args]
        arrays = [value for value in args if isinstance(value, ndarray)]
        seen = [array._seen() for array in arrays]  # keeps memory that is freed in stream order
        seen += [view for _, views in given for view in views.values()]

        def work():
            for view in seen:
                GPU.check(view)
            foreign = _ForeignMemory(device)
            arguments = [foreign.shown(value, views) for value, views in given]
            raw_kernels.run(self.code, self.name, grid, block, arguments, foreign.arrive)
            foreign.arrive(ends=True)

        GPU.launched.append(self.name)
        nbytes = arrays[0].nbytes if arrays else 0
        GPU.put(stream, work, [array._range for array in arrays], ("kernel", stream, nbytes))


class _Function:
    def __init__(self, kernel):
        self.raw, self.ptr = kernel, next(_function_numbers)
        LOADED[self.ptr] = self


_function_numbers = itertools.count(1 << 40)

LOADED = weakref.WeakValueDictionary()
"""Functions by their numbers, which `driver.launchKernel` takes."""


def _launch_kernel(f, gx, gy, gz, bx, by, bz, shared_mem_bytes, stream, kernel_params, extra):
    if not _context():
        raise CUDARuntimeError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
    if f not in LOADED:
        raise CUDARuntimeError("CUDA_ERROR_INVALID_HANDLE: the function was unloaded")
    kernel = LOADED[f].raw
    kinds = raw_kernels.parameter_types(kernel.code, kernel.name)
    addresses = (ctypes.c_uint64 * len(kinds)).from_address(kernel_params)
    values = [np.frombuffer(ctypes.string_at(at, kind.itemsize), kind)[0] for at, kind in zip(addresses, kinds)]
    kernel.put((gx, gy), (bx,), values, _stream_of(stream).number)


def _context():
    """0 in a thread that has not called CUDA's runtime, in which the driver runs nothing."""
    return int(getattr(_here, "context", 0) or threading.current_thread() is threading.main_thread())


def _memory_info():
    _here.context = 1
    return GPU.total - GPU.used(), GPU.total


runtime.memGetInfo = _memory_info
cuda.driver = types.SimpleNamespace(launchKernel=_launch_kernel, ctxGetCurrent=_context)


def _on_this_process(value, device):
    """A kernel's argument with addresses of this process in place of the device's, and views of memory by their place.

    Arrays and structures have addresses; others are numbers.
    """
    if isinstance(value, ndarray):
        if value.device.id != device:
            raise ValueError("array device must be same as the current device")
        return np.array(value._seen().ctypes.data, np.uint64), {}
    if isinstance(value, int | float):
        return np.array(value, np.int64 if isinstance(value, int) else np.float64), {}
    value, views = np.frombuffer(bytearray(value.tobytes()), value.dtype).reshape(()), {}  # a copy
    for name in value.dtype.names or ():
        words = value[name].reshape(-1)
        for number in np.flatnonzero(words) if words.dtype == np.uint64 else ():
            address = int(words[number])
            if GPU.is_pinned(address, 8):
                continue
            view, owner = GPU.around(address)
            if not GPU.reaches(device, owner):
                raise CUDARuntimeError("cudaErrorIllegalAddress: memory of a device without access")
            views[name, number] = view
            words[number] = view.ctypes.data
    return value, views


class _ForeignMemory:
    """What a kernel sees of memory of other processes' devices: copies, whose changes arrive at fences and the end."""

    WINDOW = 1 << 14
    """Bytes that the kernel may write from an address on."""

    def __init__(self, device):
        self._device, self._windows = device, []

    def shown(self, value, views):
        """A kernel's argument with the addresses of such copies in place of those of other devices' memory."""
        value = value.copy()
        for (name, number), view in views.items():
            for shared, device in list(GPU.shared.values()):
                offset = view.ctypes.data - shared.bytes.ctypes.data
                if shared.pid != os.getpid() and 0 <= offset < shared.nbytes and device != self._device:
                    there = shared.bytes[offset:][: self.WINDOW]
                    copy = there.copy()
                    self._windows.append((there, copy, copy.copy()))
                    value[name].reshape(-1)[number] = copy.ctypes.data
        return value

    def arrive(self, ends=False):
        """Let changes arrive; those without a fence in any order, and not at once."""
        for there, copy, before in self._windows:
            changed = np.flatnonzero(copy != before)
            if len(changed) == 0:
                continue
            halves = np.array_split(changed, 2) if ends and len(changed) > 8 else [changed]
            for half in halves if random.random() < 0.5 else halves[::-1]:
                there[half] = copy[half]
                time.sleep(2e-3 if len(halves) > 1 else 0)
            before[...] = copy


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


def ascontiguousarray(array):
    """A dense array as it is, wherever its memory begins."""
    return array if array.flags.c_contiguous else _at_once(np.ascontiguousarray, array)


def asnumpy(array):
    return array.get() if isinstance(array, ndarray) else np.asarray(array)

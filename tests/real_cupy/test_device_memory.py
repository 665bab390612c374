"""Names of CuPy that the stand-in has, and the project's access to device memory, with CuPy on host memory."""

import inspect
import re

import gpu_probe
import numpy as np
import pytest
from mpi4py import MPI
from support.fakes import Foreign, NoInterface
from support.fakes import cupy as standin

from collectives.buffers import staging
from collectives.buffers.arguments import vector
from collectives.runtime.arguments import call
from collectives.runtime.binding import call_binding
from collectives.transport.gpu.device_copies import DeviceCopies
from collectives.transport.gpu.exported_memory import GRAIN, HANDLE, ExportedMemory
from collectives.transport.wire import Iovec

CUDA_CLASSES = ("Device", "Event", "ExternalStream", "MemoryPointer", "Stream", "UnownedMemory")
MEMBERS = {
    "": {name for name, value in vars(standin).items() if getattr(value, "__module__", "") == standin.__name__}
    - {*vars(standin.cuda), *vars(standin.cuda.memory), "CUDARuntimeError", "Engine", "GPU", "MemoryPool"},
    "ndarray": set(vars(standin.ndarray)),
    "cuda": set(vars(standin.cuda)),
    "cuda.runtime": set(vars(standin.runtime)),
    "cuda.memory": set(vars(standin.cuda.memory)),
    "cuda.cublas": set(vars(standin.cublas)),
    "cuda.MemoryPool": set(vars(standin.MemoryPool)),
    **{f"cuda.{name}": set(dir(getattr(standin.cuda, name))) for name in CUDA_CLASSES},
}
"""Names of the stand-in by the class or module that they belong to."""

ATTRIBUTES = ("data", "device", "dtype", "nbytes", "shape", "size", "strides")


def found(cupy, path):
    for name in filter(None, path.split(".")):
        cupy = getattr(cupy, name)
    return cupy


@pytest.mark.parametrize("owner", MEMBERS)
def test_names(cupy, owner):
    """All that the stand-in offers, and so all that the project can use, is there."""
    names = {name for name in MEMBERS[owner] if not name.startswith("_")} - {"at"}
    if owner == "":
        names |= standin.FUNCTIONS | standin.TYPES | {"ndarray", "ElementwiseKernel"}
    if owner == "ndarray":
        names |= {*ATTRIBUTES, *standin.PLAIN, *(f"__{name}__" for name in standin.OPERATORS)}
    assert not {name for name in names if not hasattr(found(cupy, owner), name)}


def test_pool_and_its_error(cupy):
    """The pool has the arguments that are used, and the error is Python's for memory."""
    pool = cupy.get_default_memory_pool()
    before = pool.get_limit()
    pool.set_limit(size=1 << 30)
    assert pool.get_limit() == 1 << 30 and pool.total_bytes() >= pool.used_bytes() >= 0
    pool.set_limit(size=before)
    pool.free_all_blocks()
    error = cupy.cuda.memory.OutOfMemoryError(10, 20, 30)
    assert isinstance(error, MemoryError) and str(error) == str(standin.OutOfMemoryError(10, 20, 30))
    assert isinstance(cupy.cuda.Device().cublas_handle, int)


def test_constants(cupy):
    for name in ("CUDA_R_16F", "CUDA_R_16BF", "CUDA_R_32F"):
        assert getattr(cupy.cuda.runtime, name) == getattr(standin.runtime, name)
    for name in vars(standin.cublas):
        if name.isupper() or name.startswith("CUBLAS"):
            assert getattr(cupy.cuda.cublas, name) == getattr(standin.cublas, name)
    for name in ("memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice", "memcpyDefault"):
        assert getattr(cupy.cuda.runtime, name) == getattr(standin.runtime, name)
    assert {"device", "type"} <= set(dir(cupy.cuda.runtime.PointerAttributes))
    assert isinstance(cupy.cuda.Event().ptr, int) and isinstance(cupy.cuda.Stream.null.ptr, int)
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)


def parameters(function):
    """(required parameters, all of them) of a function or class, of which compiled ones describe only in their text."""
    text = (function.__doc__ or "").partition("\n")[0]
    if re.match(r"\w+\(", text):
        given = [part for part in text[text.index("(") + 1 : text.rindex(")")].split(",") if part.strip(" *")]
        return sum("=" not in part for part in given), len(given)
    given = [part for part in inspect.signature(function).parameters.values() if part.kind != part.VAR_KEYWORD]
    return sum(part.default is part.empty for part in given), len(given)


@pytest.mark.parametrize(
    "name",
    [*(f"{one}.{name}" for one in ("runtime", "cublas") for name in vars(getattr(standin, one))), *vars(standin.cuda)],
)
def test_parameters(cupy, name):
    """What the stand-in takes, CuPy takes: no fewer arguments, and no more."""
    ours, theirs = found(standin.cuda, name), found(cupy.cuda, name)
    if not callable(ours) or name == "runtime.CUDARuntimeError":
        pytest.skip("no function")
    (least, most), (required, total) = parameters(ours), parameters(theirs)
    assert required <= least and most <= total, (name, theirs.__doc__)


def test_copies(cupy):
    x = np.arange(300, dtype="u1")
    source, target, host = cupy.asarray(x), cupy.zeros(300, "u1"), np.zeros(300, "u1")
    copies, at = DeviceCopies(cupy, 0), source.data.ptr
    event = copies.to_host(host.ctypes.data, [Iovec(at + 100, 200), Iovec(at, 0), Iovec(at, 100)])
    assert event.done
    copies.recycle(event)
    assert copies.to_device([Iovec(target.data.ptr, 300)], host.ctypes.data) is event
    np.testing.assert_array_equal(target.get(), np.roll(x, -100))
    copies.finish()


def test_probes(cupy):
    """The probes of scripts/gpu_check that need no second rank."""
    bench = gpu_probe.Bench(MPI.COMM_WORLD, cupy, 1 << 16, [])
    results = [gpu_probe.probe(bench, name, run) for name, run in gpu_probe.PROBES.items()]
    errors = [result for result in results if "error" in result]
    assert not [result for result in errors if "ValueError: " not in result["error"]]  # of values, which are undefined


@pytest.fixture(params=[lambda x: x, Foreign, NoInterface], ids=["CuPy's own", "interface", "DLPack"])
def shown(request):
    """An array of CuPy as itself, or as another library would show it."""
    return request.param


def test_staging(cupy, shown):
    x = np.arange(12, dtype="f4")
    array = cupy.asarray(x)
    with cupy.cuda.Stream(non_blocking=True):
        staged = staging.stage(vector(shown(array), "x"), load=True, store=True)
        staged.load()
        np.testing.assert_array_equal(staged.host.view("f4"), x)
        staged.host.view("f4")[:] += 1
        staged.store()
    np.testing.assert_array_equal(array.get(), x + 1)


def test_views_and_scratch(cupy, shown):
    array = cupy.asarray(np.arange(6, dtype="i4"))
    memory = staging.DeviceMemory(shown(array))
    assert memory.number == 0 and memory.holds(array)
    view = memory.view(array.data.ptr + 4, 3, np.dtype("i4"))
    np.testing.assert_array_equal(view.get(), [1, 2, 3])
    assert memory.view(0, 0, np.dtype("i4")).size == 0 and memory.empty(5, np.dtype("f8")).shape == (5,)
    memory.follow(array, array)
    memory.mark()
    memory.ended.wait()
    assert memory.ended.test()
    done = []
    memory.working(lambda: done.append(cupy.cuda.get_current_stream()))()
    with memory.capture()():
        assert done == [cupy.cuda.get_current_stream()]


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i4", "u8", "f2", "f4", "f8"])
def test_reductions_are_accepted(cupy, op, dtype):
    """CuPy has a kernel for every operation and dtype that the project takes to the device."""
    if (op[0] == "B" and dtype[0] in "f?") or (op[0] == "L" and dtype[0] == "f"):
        pytest.skip("not defined for these")
    x, y = cupy.asarray(np.ones(4, dtype)), cupy.asarray(np.ones(4, dtype))
    device_call = call_binding.as_device_call(call.allreduce(x, y, getattr(MPI, op), 0, 2))
    assert device_call is not None
    device_call[0].combine.bind(x, y, cupy.asarray(np.ones(4, dtype)))()


def test_exported_memory(cupy, monkeypatch):
    """Blocks, arrays on them, handles and events, with functions of CuPy that take and return what CUDA's do."""
    runtime = cupy.cuda.runtime
    monkeypatch.setattr(runtime, "ipcGetMemHandle", lambda pointer: b"m" * HANDLE)
    monkeypatch.setattr(runtime, "ipcGetEventHandle", lambda event: b"e" * HANDLE)
    monkeypatch.setattr(runtime, "ipcOpenMemHandle", lambda handle: 4096)
    monkeypatch.setattr(runtime, "ipcCloseMemHandle", lambda pointer: None)
    exported = ExportedMemory(cupy, 0)
    block = exported.allocate(1000)
    array = exported.array(block, (2, 3), np.dtype("f4"))
    assert array.shape == (2, 3) and array.data.ptr == block.address and block.nbytes == GRAIN
    assert (
        exported.find(array[1].data.ptr, 12) == (b"m" * HANDLE, 12) and exported.find(block.address, GRAIN + 1) is None
    )
    del array
    assert exported.unused() == [block] and exported.unused() == []
    exported.release([block])
    assert exported.open(b"x") == exported.open(b"x") == 4096
    exported.close()
    assert exported.new_event()[1] == b"e" * HANDLE

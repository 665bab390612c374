"""Measure what Chorus needs of a GPU: copies, pinned shared memory, memory and events that processes share.

    mpiexec -n 2 python tests/studies/gpu_probe.py [--bytes 256M] [--json FILE]

Every line is one probe, made by all ranks together: its figure on the slowest rank, or an error and its likely cause.
Without a probe's ability Chorus stages GPU arrays in host memory; an error here is no error of Chorus.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.size_arguments import parse_size
from collectives.cli import launcher
from collectives.cli.launcher import ProgramParser, say

REPEATS = 5
TOKEN = 4096
"""Bytes that a rank reads of its neighbour's memory."""

CAUSES = {
    "libnvrtc": "NVRTC, which builds CuPy's kernels, is not installed: pip install 'cupy-cuda13x[ctk]'",
    "cuda_fp16": "CUDA's headers are not installed: pip install 'cupy-cuda13x[ctk]', or set CUDA_PATH",
    "cannot open source file": "CUDA's headers are not installed: pip install 'cupy-cuda13x[ctk]', or set CUDA_PATH",
    "headers": "CUDA's headers are not installed: pip install 'cupy-cuda13x[ctk]', or set CUDA_PATH",
    "libcublas": "cuBLAS is not installed: pip install nvidia-cublas",
    "CUBLAS_STATUS": "cuBLAS refuses a product: another version than CuPy's, or no memory left on the GPU",
    "InvalidSource": "NVRTC is newer than the driver: install that of the driver's CUDA",
    "UnsupportedPtx": "NVRTC is newer than the driver: install that of the driver's CUDA",
    "DevicesUnavailable": "another program has the GPU for itself (compute mode), or runs under MPS",
    "InsufficientDriver": "the driver is older than the CUDA of this CuPy; install the CuPy of an older CUDA",
    "OutOfMemory": "no memory left on the GPU; end other programs, or start fewer ranks",
    "MemoryAllocation": "no memory left on the GPU; end other programs, or start fewer ranks",
    "InvalidValue": "memory of another kind than cudaMalloc's, or a container that hides its neighbours' processes",
    "PeerAccess": "these GPUs cannot access each other's memory: see nvidia-smi topo -p2p r",
    "NotSupported": "the system has no CUDA IPC: WSL, MIG, or a virtual GPU",
    "InvalidResourceHandle": "the other process ended, or has freed what it exported",
    "HostMemoryAlreadyRegistered": "another library has pinned the same memory",
    "NotPermitted": "the limit of locked memory is too low (ulimit -l)",
    "IllegalAddress": "a defect of Chorus: a kernel used memory that is not its own",
    "TimeoutError": "a rank waited for another one, which had failed or was stopped",
}
"""Likely causes by a part of an error's text."""


class Figure(NamedTuple):
    """Result of a probe on one rank; ``unit`` is one of `RATES`, where less is worse, a time, or "" for a text."""

    value: float | str
    unit: str = ""


RATES = ("GB/s", "TFLOP/s")


class Bench(NamedTuple):
    """All ranks, CuPy, the length of a long copy in bytes, and objects that live until all ranks have ended a probe."""

    world: MPI.Intracomm
    cupy: Any
    nbytes: int
    exported: list[Any]

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of a call and the end of its work on the device, on this rank."""

        def once() -> float:
            start = time.perf_counter()
            call()
            self.cupy.cuda.get_current_stream().synchronize()
            return time.perf_counter() - start

        once()
        return max(statistics.median(once() for _ in range(REPEATS)), 1e-9)

    def handles(self, handle: Callable[[], bytes]) -> list[bytes]:
        """Handles of all ranks; RuntimeError on all of them if one has none. Collective."""
        try:
            mine, error = handle(), ""
        except (RuntimeError, MemoryError) as refused:
            mine, error = b"", str(refused)
        everyone = self.world.allgather((mine, error))
        for rank, (_, found) in enumerate(everyone):
            if found:
                raise RuntimeError(f"rank {rank} has no handle: {found}")
        return [one for one, _ in everyone]

    def rate(self, call: Callable[[], object], nbytes: int) -> Figure:
        return Figure(nbytes / self.seconds(call) / 1e9, "GB/s")


def _device(bench: Bench) -> Figure:
    runtime = bench.cupy.cuda.runtime
    name = runtime.getDeviceProperties(bench.cupy.cuda.Device().id)["name"].decode()
    return Figure(f"{name}, CuPy {bench.cupy.__version__}")


def _transfer(bench: Bench) -> Figure:
    with_all = Communicator(bench.world)
    try:
        return Figure(with_all.device_transfer)
    finally:
        with_all.close()


def _kernel(bench: Bench) -> Figure:
    """Seconds to build a kernel, which needs NVRTC and CUDA's headers, and to launch it first."""
    start = time.perf_counter()
    double = bench.cupy.ElementwiseKernel("float32 x", "float32 y", "y = 2 * x;", f"probe_{time.time_ns()}")
    out = bench.cupy.zeros(3, np.float32)
    double(bench.cupy.asarray(np.arange(3, dtype=np.float32)), out)
    half = bench.cupy.asarray(np.arange(3, dtype=np.float16))
    if (out.get() != [0, 2, 4]).any() or ((half + half).get() != [0, 2, 4]).any():
        raise ValueError("wrong results of a kernel")
    return Figure(time.perf_counter() - start, "s")


def _product(bench: Bench, name: str) -> Figure:
    """TFLOP/s of products of matrices, which need cuBLAS."""
    side = math.isqrt(bench.nbytes // 16)
    a, b = (bench.cupy.full((side, side), value, np.dtype(name)) for value in (1, 0.5))
    out = a @ b
    if float(out.max()) != side / 2:
        raise ValueError(f"expected {side / 2}, found {float(out.max())}")
    spent = bench.seconds(partial(bench.cupy.matmul, a, b, out=out))
    return Figure(2 * side**3 / spent / 1e12, "TFLOP/s")


def _free_memory(bench: Bench) -> Figure:
    """Memory of the GPU that is free, with the contexts of all ranks."""
    free, total = bench.cupy.cuda.runtime.memGetInfo()
    return Figure(f"{free / 1e9:.1f} of {total / 1e9:.1f} GB")


def _on_device(bench: Bench) -> Figure:
    source = bench.cupy.zeros(bench.nbytes, np.uint8)
    target = bench.cupy.empty(bench.nbytes, np.uint8)

    def copy() -> None:
        target[...] = source

    return bench.rate(copy, 2 * bench.nbytes)  # read and written


def _between(bench: Bench, host: np.ndarray, to_host: bool) -> Figure:
    """Rate of copies between a device and pinned host memory."""
    runtime, stream = bench.cupy.cuda.runtime, bench.cupy.cuda.get_current_stream()
    array = bench.cupy.zeros(host.nbytes, np.uint8)
    here, there = MPI.Get_address(host), int(array.data.ptr)
    ends = (here, there) if to_host else (there, here)
    kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
    return bench.rate(partial(runtime.memcpyAsync, *ends, host.nbytes, kind, stream.ptr), host.nbytes)


def _pinned(bench: Bench, to_host: bool) -> Figure:
    memory = bench.cupy.cuda.alloc_pinned_memory(bench.nbytes)
    return _between(bench, np.frombuffer(memory, np.uint8, bench.nbytes), to_host)


def _alone(probe: Callable[[Bench], Figure], bench: Bench) -> Figure:
    """Run a probe on rank 0, while the other ranks wait."""
    found, error = None, ""
    if bench.world.Get_rank() == 0:
        try:
            found = probe(bench)
        except Exception as refused:  # raised on all ranks, which wait for the result
            error = f"{type(refused).__name__}: {refused}"
    found, error = bench.world.bcast((found, error))
    if found is None:
        raise RuntimeError(error)
    return Figure(*found)


def _registered(bench: Bench) -> Figure:
    """Rate of copies to memory of the node's shared heap, which CUDA pins afterwards."""
    runtime = bench.cupy.cuda.runtime
    comm = Communicator(bench.world, gpu="staged")
    shared = comm.empty(bench.nbytes, np.uint8)
    runtime.hostRegister(MPI.Get_address(shared), shared.nbytes, 1)
    try:
        return _between(bench, shared, True)
    finally:
        runtime.hostUnregister(MPI.Get_address(shared))
        del shared
        comm.close()


def _launch(bench: Bench) -> Figure:
    array = bench.cupy.zeros(1, np.float32)

    def add() -> None:
        bench.cupy.add(array, array, out=array)

    return Figure(bench.seconds(add) * 1e6, "us")


def _array_of(bench: Bench, memory: Any, nbytes: int) -> Any:
    return bench.cupy.ndarray((nbytes,), np.uint8, bench.cupy.cuda.MemoryPointer(memory, 0))


def _exported(bench: Bench) -> Figure:
    """Read the neighbour's device memory through its handle; the rate of a copy from there."""
    world, cupy, runtime = bench.world, bench.cupy, bench.cupy.cuda.runtime
    rank, size = world.Get_rank(), world.Get_size()

    def export() -> bytes:
        mine = _array_of(bench, cupy.cuda.Memory(bench.nbytes), bench.nbytes)
        mine[...] = rank % 251
        cupy.cuda.get_current_stream().synchronize()
        bench.exported.append(mine)
        handle: bytes = runtime.ipcGetMemHandle(int(mine.data.ptr))
        return handle

    left, device = (rank - 1) % size, cupy.cuda.Device().id
    handles = bench.handles(export)
    opened = runtime.ipcOpenMemHandle(handles[left])
    theirs = _array_of(bench, cupy.cuda.UnownedMemory(opened, bench.nbytes, None, device), bench.nbytes)
    if (theirs[:TOKEN].get() != left % 251).any():
        raise ValueError(f"expected the value of rank {left}, found {theirs[:TOKEN].get()}")
    found = bench.rate(theirs.copy, 2 * bench.nbytes)
    runtime.ipcCloseMemHandle(opened)
    return found


def _event(bench: Bench) -> Figure:
    """Seconds until a stream goes on that waits for an event of the neighbour, recorded before."""
    world, cupy, runtime = bench.world, bench.cupy, bench.cupy.cuda.runtime

    def export() -> bytes:
        event = cupy.cuda.Event(disable_timing=True, interprocess=True)
        event.record()
        cupy.cuda.get_current_stream().synchronize()
        bench.exported.append(event)
        handle: bytes = runtime.ipcGetEventHandle(event.ptr)
        return handle

    handles = bench.handles(export)
    opened = runtime.ipcOpenEventHandle(handles[(world.Get_rank() - 1) % world.Get_size()])
    stream = cupy.cuda.get_current_stream()
    return Figure(bench.seconds(partial(runtime.streamWaitEvent, stream.ptr, opened)) * 1e6, "us")


PROBES: dict[str, Callable[[Bench], Figure]] = {
    "device": _device,
    "free memory": _free_memory,
    "build of a kernel": _kernel,
    "product of matrices, float32": partial(_product, name="float32"),
    "product of matrices, float16": partial(_product, name="float16"),
    "product of matrices, bfloat16": partial(_product, name="bfloat16"),
    "transfer of GPU arrays": _transfer,
    "kernel launch and wait": _launch,
    "copy on the device": _on_device,
    "device to pinned memory, one rank": partial(_alone, partial(_pinned, to_host=True)),
    "device to pinned memory, all ranks": partial(_pinned, to_host=True),
    "pinned memory to device, all ranks": partial(_pinned, to_host=False),
    "device to shared memory, pinned": _registered,
}
BETWEEN_PROCESSES = {"copy from the neighbour's device memory": _exported, "wait for the neighbour's event": _event}
"""Probes for two ranks and more."""


def cause_of(error: str) -> str:
    """Likely cause of an error of CUDA, or an empty text."""
    return next((cause for part, cause in CAUSES.items() if part in error), "")


def probe(bench: Bench, name: str, call: Callable[[Bench], Figure]) -> dict[str, Any]:
    """Run a probe on all ranks; the slowest rank's figure, or the first error. Collective."""
    try:
        found, error = call(bench), ""
    except Exception as refused:  # of CUDA, of the compiler, of libraries that are not installed
        found, error = Figure(""), f"{type(refused).__name__}: {refused}"
    results = bench.world.allgather((*found, error))
    bench.exported.clear()
    errors = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(results) if error]
    if errors:
        return {"probe": name, "error": errors[0], "cause": cause_of(errors[0])}
    values, unit = [value for value, _, _ in results], found.unit
    worst = min(values) if unit in RATES else max(values) if unit else values[0]
    return {"probe": name, "value": worst, "unit": unit}


def line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['probe']:42} {result['error']}" + (f" ({result['cause']})" if result["cause"] else "")
    value = result["value"]
    return f"{result['probe']:42} " + (f"{value:10.2f} {result['unit']}" if result["unit"] else str(value))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all probes, print them and write the JSON file; 0 also if some failed."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--bytes", type=parse_size, default="256M", help="length of the long copies (256M)")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args(arguments)
    bench = Bench(MPI.COMM_WORLD, import_module("cupy"), args.bytes, [])
    probes = {**PROBES, **(BETWEEN_PROCESSES if bench.world.Get_size() > 1 else {})}
    results: list[dict[str, Any]] = []
    for name, call in probes.items():  # written at once, as the next one may not return
        results.append(probe(bench, name, call))
        say(line(results[-1]))
        if args.json and bench.world.Get_rank() == 0:
            args.json.write_text(json.dumps({"ranks": bench.world.Get_size(), "probes": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    launcher.run(main)

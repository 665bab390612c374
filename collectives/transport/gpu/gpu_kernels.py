"""CUDA kernels of collectives among ranks that share a GPU: one launch reads all inputs and writes all outputs.

There are two: `copy_pieces` moves blocks of bytes, `reduce_vectors` combines the vectors of all ranks in rank order
and writes totals, or prefixes, to any of them. Each element is loaded from all ranks before its results are stored, so
that a result may replace an input. Accesses are of 16 bytes where the addresses allow it. Elements are rounded after
every addition, like in NumPy. The tables of addresses are arguments of the kernels, in the GPU's constant memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

MOST_RANKS = 8
"""Ranks that one launch combines."""

MOST_PIECES = 128
"""Blocks that one launch copies: their table takes 3 of the 4 KiB that a kernel's arguments may have."""

PACK = 16
"""Bytes of an access to memory, the most that a thread can load at once."""

THREADS = 256
BLOCKS_PER_PROCESSOR = 8
"""Threads of a block, and blocks of a processor: 2048 threads, as many as it holds."""

PROCESSORS = 16
"""CUDA's cudaDevAttrMultiProcessorCount."""

TOTAL, INCLUSIVE, EXCLUSIVE = range(3)
"""Results of `reduce_vectors` for rank r: of all ranks, of those up to r, or of those before r."""

COPY = (
    f"#define PIECES {MOST_PIECES}\n#define THREADS {THREADS}\n"
    + """struct Pieces { unsigned long long from[PIECES], to[PIECES]; long long nbytes[PIECES]; };
struct alignas(16) Pack { unsigned int words[4]; };

extern "C" __global__ void __launch_bounds__(THREADS) copy_pieces(const __grid_constant__ Pieces pieces) {
    const long long nbytes = pieces.nbytes[blockIdx.y];
    const char *from = (const char *)pieces.from[blockIdx.y];
    char *to = (char *)pieces.to[blockIdx.y];
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const bool aligned = ((unsigned long long)from | (unsigned long long)to) % sizeof(Pack) == 0;
    const long long packs = aligned ? nbytes / (long long)sizeof(Pack) : 0;
    for (long long i = first; i < packs; i += step) ((Pack *)to)[i] = ((const Pack *)from)[i];
    for (long long i = packs * (long long)sizeof(Pack) + first; i < nbytes; i += step) to[i] = from[i];
}
"""
)

REDUCE = (
    f"#define MOST_RANKS {MOST_RANKS}\n#define THREADS {THREADS}\n"
    + """struct Vectors {
    unsigned long long in[MOST_RANKS], out[MOST_RANKS];
    long long first[MOST_RANKS], last[MOST_RANKS];
};
struct alignas(sizeof(T) * WIDTH) Pack { T values[WIDTH]; };

// Packs [begin, end) of all vectors. `out` of a rank takes the elements [first, last), whose bounds are whole packs.
extern "C" __global__ void __launch_bounds__(THREADS)
reduce_vectors(const __grid_constant__ Vectors v, long long begin, long long end, int way) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = begin + (long long)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step) {
        Pack x[RANKS];
        #pragma unroll
        for (int rank = 0; rank < RANKS; rank++) x[rank] = ((const Pack *)v.in[rank])[i];
        #pragma unroll
        for (int rank = 1; rank < RANKS; rank++)
            #pragma unroll
            for (int k = 0; k < WIDTH; k++)
                x[rank].values[k] = combine(x[rank - 1].values[k], x[rank].values[k]);
        #pragma unroll
        for (int rank = 0; rank < RANKS; rank++) {
            const long long at = i * WIDTH;
            if (at < v.first[rank] || at >= v.last[rank]) continue;
            Pack *out = (Pack *)v.out[rank] + (i - v.first[rank] / WIDTH);
            *out = way == 0 ? x[RANKS - 1] : way == 1 ? x[rank] : x[rank ? rank - 1 : 0];
        }
    }
}
"""
)

HALF = """
struct half { unsigned short bits; };
#ifdef __CUDACC_RTC__
__device__ inline float wide(half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline half narrow(float y) { half x; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(y)); return x; }
#else
inline float wide(half x) { _Float16 y; __builtin_memcpy(&y, &x, 2); return (float)y; }
inline half narrow(float y) { _Float16 z = (_Float16)y; half x; __builtin_memcpy(&x, &z, 2); return x; }
#endif
"""

BFLOAT = """
struct bfloat { unsigned short bits; };
__device__ inline float wide(bfloat x) {
    union { unsigned int bits; float value; } y;
    y.bits = (unsigned int)x.bits << 16;
    return y.value;
}
__device__ inline bfloat narrow(float value) {  // to the nearest, ties to even; a NaN stays one
    union { unsigned int bits; float value; } y;
    y.value = value;
    bfloat x;
    x.bits = value != value ? (y.bits >> 16) | 64 : (y.bits + 0x7FFF + ((y.bits >> 16) & 1)) >> 16;
    return x;
}
"""

ARITHMETIC = {"SUM": "{a} + {b}", "PROD": "{a} * {b}"}
SELECTION = {"MAX": "{a} >= {b} || {a} != {a} ? a : b", "MIN": "{a} <= {b} || {a} != {a} ? a : b"}
LOGIC = {"LAND": "a && b", "LOR": "a || b", "LXOR": "!a != !b", "BAND": "a & b", "BOR": "a | b", "BXOR": "a ^ b"}
"""C expressions of the operations on elements a and b with the values {a} and {b}. MAX and MIN of a NaN are a NaN."""

OF_BOOLS = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PROD": "LAND", "MIN": "LAND", "BAND": "LAND", "BXOR": "LXOR"}

_SIGNED = {1: "signed char", 2: "short", 4: "int", 8: "long long"}
_UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_FLOATS = {4: "float", 8: "double"}
_NARROW = {"float16": ("half", HALF), "bfloat16": ("bfloat", BFLOAT)}


class ReductionType(NamedTuple):
    """Element type of a reduction kernel: C type, bytes, expression of the sum, C code before it, numbers in one."""

    name: str
    nbytes: int
    expression: str
    preamble: str = ""
    parts: int = 1


def reduction_type(op: str, dtype: np.dtype[Any]) -> ReductionType | None:
    """Form of an operation on elements of a dtype in the kernel, or None if it has none.

    >>> reduction_type("MAX", np.dtype("f4"))
    ReductionType(name='float', nbytes=4, expression='a >= b || a != a ? a : b', preamble='', parts=1)
    """
    size, numbers = dtype.itemsize, {**ARITHMETIC, **SELECTION}
    plain = {name: text.format(a="a", b="b") for name, text in numbers.items()} | LOGIC
    if op not in plain:
        return None
    if dtype.name in _NARROW and op in numbers:  # computed in single precision, and rounded
        value = numbers[op].format(a="wide(a)", b="wide(b)")
        name, preamble = _NARROW[dtype.name]
        return ReductionType(name, size, f"narrow({value})" if op in ARITHMETIC else value, preamble)
    if dtype.kind == "b":
        return ReductionType("unsigned char", 1, plain[OF_BOOLS.get(op, op)])
    if dtype.kind == "f" and size in _FLOATS and op in numbers:
        return ReductionType(_FLOATS[size], size, plain[op])
    if dtype.kind == "c" and size // 2 in _FLOATS and op == "SUM":  # two numbers, each of them added by itself
        return ReductionType(_FLOATS[size // 2], size // 2, plain[op], parts=2)
    if dtype.kind in "iu":  # overflow of signed integers is undefined in C
        names = _UNSIGNED if dtype.kind == "u" or op in ARITHMETIC else _SIGNED
        return ReductionType(names[size], size, plain[op])
    return None


def widest(kind: ReductionType) -> int:
    """Most elements of an access: eight, as more of one byte each would take too many registers."""
    return min(PACK // kind.nbytes, 8)


def reduction_source(kind: ReductionType, ranks: int, width: int) -> str:
    """CUDA source of `reduce_vectors` for elements of a kind, a number of ranks, and elements per access."""
    return (
        f"{kind.preamble}\ntypedef {kind.name} T;\n#define RANKS {ranks}\n#define WIDTH {width}\n"
        f"__device__ inline T combine(T a, T b) {{ return {kind.expression}; }}\n{REDUCE}"
    )


class Copied(NamedTuple):
    """Bytes to be copied on the device: from one address to another."""

    source: int
    target: int
    nbytes: int


class Reduced(NamedTuple):
    """Part of a reduction that one rank's memory takes: elements [first, last) of the results, at an address."""

    target: int
    first: int
    last: int


NOTHING = Reduced(0, 0, 0)
PIECES = np.dtype([("from", "u8", MOST_PIECES), ("to", "u8", MOST_PIECES), ("nbytes", "i8", MOST_PIECES)])
VECTORS = np.dtype(
    [("in", "u8", MOST_RANKS), ("out", "u8", MOST_RANKS), ("first", "i8", MOST_RANKS), ("last", "i8", MOST_RANKS)]
)
"""The kernels' tables of addresses, `Pieces` and `Vectors`."""

OPTIONS = ("--std=c++17",)


class KernelLaunch:
    """A kernel on a device of CuPy, with its grid and arguments: numbers and structures of NumPy.

    CuPy's own launch converts the arguments each time. That takes longer than the launch in CUDA's driver.
    """

    def __init__(
        self, cupy: ModuleType, device: Any, kernel: Any, grid: tuple[int, int], arguments: Sequence[Any]
    ) -> None:
        self._values = [np.array(value) for value in arguments]
        self._addresses = np.array([MPI.Get_address(value) for value in self._values], np.uint64)
        with device:
            self._function = kernel.kernel  # CUDA unloads it with the last reference
        self._cuda, self._grid = cupy.cuda, (self._function.ptr, *grid, 1, THREADS, 1, 1)
        self._parameters = MPI.Get_address(self._addresses)

    def put(self, stream: int) -> None:
        """Put the kernel on a stream (CUDA's number) of its device. That device must be the current one."""
        if not self._cuda.driver.ctxGetCurrent():
            self._cuda.runtime.memGetInfo()  # the first call of a thread makes the device's context current
        self._cuda.driver.launchKernel(*self._grid, 0, stream, self._parameters, 0)


class GpuKernels:
    """The kernels for one device. `cupy` is the array library. It builds each kernel at its first launch."""

    def __init__(self, cupy: ModuleType, device: int) -> None:
        self._cupy, self._device = cupy, cupy.cuda.Device(device)
        self._most_blocks = BLOCKS_PER_PROCESSOR * int(cupy.cuda.runtime.deviceGetAttribute(PROCESSORS, device))
        self._copy = cupy.RawKernel(COPY, "copy_pieces", options=OPTIONS)
        self._reductions: dict[tuple[ReductionType, int, int], Any] = {}

    def _blocks(self, threads: int) -> int:
        return max(1, min(-(-threads // THREADS), self._most_blocks))

    def copies(self, pieces: Sequence[Copied]) -> list[KernelLaunch]:
        """Launches that copy all pieces, none of which is written where another is read."""
        busy = [piece for piece in pieces if piece.nbytes and piece.source != piece.target]
        launches = []
        for start in range(0, len(busy), MOST_PIECES):
            part = busy[start : start + MOST_PIECES]
            table = np.zeros((), PIECES)
            for name, values in zip(("from", "to", "nbytes"), zip(*part, strict=True), strict=True):
                table[name][: len(part)] = values
            each = self._blocks(max(piece.nbytes for piece in part) // PACK)
            launches.append(self._bound(self._copy, (max(1, each // len(part)), len(part)), (table,)))
        return launches

    def reduction(
        self, kind: ReductionType, inputs: Sequence[int], count: int, outputs: Sequence[Reduced], way: int = TOTAL
    ) -> list[KernelLaunch]:
        """Launches that combine vectors of `count` elements, by rank. `outputs` by rank, `way` is e.g. `TOTAL`."""
        table, addresses, bounds = np.zeros((), VECTORS), [*inputs], [0]
        count *= kind.parts
        table["in"][: len(inputs)] = inputs
        for rank, (target, first, last) in enumerate(outputs):
            first, last = first * kind.parts, last * kind.parts
            table["out"][rank], table["first"][rank], table["last"][rank] = target, first, last
            if first < last:
                addresses.append(target)
                bounds += [first, 0 if last == count else last]
        width = widest(kind)
        if any(at % PACK for at in addresses) or any(bound % width for bound in bounds):
            width = 1
        packs = count // width
        ranges = [(width, 0, packs), (1, packs * width, count)]  # the last elements are less than a pack
        return [self._reduce(kind, len(inputs), table, way, *one) for one in ranges if one[1] < one[2]]

    def _reduce(
        self, kind: ReductionType, ranks: int, table: np.ndarray, way: int, width: int, begin: int, end: int
    ) -> KernelLaunch:
        key = kind, ranks, width
        if key not in self._reductions:
            source = reduction_source(kind, ranks, width)
            self._reductions[key] = self._cupy.RawKernel(source, "reduce_vectors", options=OPTIONS)
        arguments = table, np.int64(begin), np.int64(end), np.int32(way)
        return self._bound(self._reductions[key], (self._blocks(end - begin), 1), arguments)

    def _bound(self, kernel: Any, grid: tuple[int, int], arguments: Sequence[Any]) -> KernelLaunch:
        return KernelLaunch(self._cupy, self._device, kernel, grid, arguments)

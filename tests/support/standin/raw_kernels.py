"""CUDA source of whole kernels, compiled by g++ and run on the host, one block of the grid after the other.

The threads of a block are coroutines that change at barriers and shuffles; a kernel without any is run one thread after
the other. Threads that wait for each other in vain are an error. The clock counts nanoseconds. A fence for the system
calls the function that `run` is given.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import subprocess
from pathlib import Path

import numpy as np

SHIM = """
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#define __shared__ static
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
struct Three { unsigned int x, y, z; };
static Three blockIdx, threadIdx, blockDim, gridDim;
static void (*fence)();
static inline void __threadfence_system() { fence(); }
static inline long long clock64() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

enum State { RUNS, AT_SHUFFLE, AT_BARRIER, ENDED };
struct Thread { State state; int shuffles; jmp_buf here; };
static const int MOST = 1024, STACK = 1 << 18;
static Thread threads[MOST];
static jmp_buf scheduler;
static unsigned char slots[2][MOST][8];
static inline void pause_at(State state) {
    Thread &own = threads[threadIdx.x];
    own.state = state;
    if (!_setjmp(own.here)) _longjmp(scheduler, 1);
}
static inline void __syncthreads() { pause_at(AT_BARRIER); }
template <typename V> V shuffled(V value, unsigned int other) {
    const int turn = threads[threadIdx.x].shuffles++ % 2;
    memcpy(slots[turn][threadIdx.x], &value, sizeof(V));
    pause_at(AT_SHUFFLE);
    memcpy(&value, slots[turn][other], sizeof(V));
    return value;
}
template <typename V> V __shfl_xor_sync(unsigned int, V value, int lanes) {
    return shuffled(value, threadIdx.x ^ lanes);
}
template <typename V> V __shfl_down_sync(unsigned int, V value, int lanes) {
    return shuffled(value, threadIdx.x % 32 + lanes < 32 ? threadIdx.x + lanes : threadIdx.x);
}
"""

ALONE = """
static int run_block(void **all, unsigned int count) {{
    for (threadIdx.x = 0; threadIdx.x < count; threadIdx.x++) {name}({values});
    return 0;
}}
"""

TOGETHER = """
static void **given;
static void thread_body() {{
    void **all = given;
    {name}({values});
    threads[threadIdx.x].state = ENDED;
    _longjmp(scheduler, 1);
}}

// Threads [first, last) that all wait at the same place go on.
static bool go_on(unsigned int first, unsigned int last, State at) {{
    for (unsigned int i = first; i < last; i++) if (threads[i].state != at) return false;
    for (unsigned int i = first; i < last; i++) threads[i].state = RUNS;
    return true;
}}

static int run_block(void **all, unsigned int count) {{
    static char *stacks = (char *)malloc((size_t)MOST * STACK);
    static ucontext_t begin, back;
    given = all;
    for (unsigned int i = 0; i < count; i++) threads[i].state = RUNS, threads[i].shuffles = 0;
    volatile bool first = true;
    while (true) {{
        for (threadIdx.x = 0; threadIdx.x < count; threadIdx.x++) {{
            if (threads[threadIdx.x].state != RUNS || _setjmp(scheduler)) continue;
            if (!first) _longjmp(threads[threadIdx.x].here, 1);
            getcontext(&begin);
            begin.uc_stack.ss_sp = stacks + (size_t)threadIdx.x * STACK;
            begin.uc_stack.ss_size = STACK;
            begin.uc_link = 0;
            makecontext(&begin, thread_body, 0);
            setcontext(&begin);
        }}
        first = false;
        unsigned int ended = 0;
        for (unsigned int i = 0; i < count; i++) ended += threads[i].state == ENDED;
        if (ended == count) return 0;
        bool moved = go_on(0, count, AT_BARRIER);
        for (unsigned int i = 0; i < count; i += 32) moved |= go_on(i, i + 32 < count ? i + 32 : count, AT_SHUFFLE);
        if (!moved) return 1;
    }}
}}
"""

RUN = """
extern "C" int run_on_host(void **all, unsigned int x, unsigned int y, unsigned int count, void (*fenced)()) {{
    fence = fenced;
    gridDim = {{x, y, 1}}; blockDim = {{count, 1, 1}};
    for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++)
            if (run_block(all, count)) return 1;
    return 0;
}}
"""
MEETINGS = re.compile(r"__syncthreads|__shfl_")
FOLDER = Path(__file__).with_name("__pycache__")


@functools.cache
def library(source, *options):
    """Library of C++ source. It is compiled by the first process that needs it, and kept for others and later runs.

    The headers of C++14 take half as long as those of C++17.
    """
    command = ["g++", "-x", "c++", "-", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", *options]
    name = hashlib.sha256(repr((command, source)).encode()).hexdigest()[:32]
    path, unfinished = FOLDER / f"{name}.so", FOLDER / f"{name}.part"
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        with open(FOLDER / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                done = subprocess.run([*command, "-o", unfinished], input=source, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"g++: {done.stderr[:2000]}")
                os.replace(unfinished, path)
    return ctypes.CDLL(str(path))


def _parameters(source, name):
    """Types of a kernel's parameters, as in its source."""
    signature = re.search(rf"\b{name}\((.*?)\) {{", source, re.DOTALL).group(1)
    parts = signature.split(",")
    return [re.sub(r"const |__grid_constant__ ", "", part).strip().rsplit(None, 1)[0] for part in parts]


@functools.cache
def compiled(source, name):
    """Function of (pointers to the kernel's arguments, blocks in x and y, threads of a block)."""
    kinds = _parameters(source, name)
    values = ", ".join(f"*({kind} *)all[{number}]" for number, kind in enumerate(kinds))
    block = TOGETHER if MEETINGS.search(source) else ALONE
    text = SHIM + source + (block + RUN).format(name=name, values=values)
    return library(text, "-std=c++14", "-U_FORTIFY_SOURCE").run_on_host


NUMBERS = {"unsigned long long": "u8", "long long": "i8", "unsigned int": "u4", "int": "i4", "float": "f4"}


@functools.cache
def parameter_types(source, name):
    """NumPy's types of a kernel's parameters: numbers, and structures of numbers and of arrays of these."""
    for alias, text in re.findall(r"#define (\w+) (\w+)\n", source) + [
        found[::-1] for found in re.findall(r"typedef ([\w ]+?) (\w+);", source)
    ]:
        source = re.sub(rf"\b{alias}\b", text, source)

    def kind(text):
        if text in NUMBERS:
            return NUMBERS[text]
        (body,) = re.findall(rf"struct {text} {{(.*?)}};", source, re.DOTALL)
        fields = []
        for line in filter(None, map(str.strip, body.split(";"))):
            number = next(number for number in NUMBERS if line.startswith(f"{number} "))
            for field, count in re.findall(r"(\w+)(?:\[(\d+)\])?(?:, |$)", line.removeprefix(number).strip()):
                fields.append((field, NUMBERS[number], int(count or 1)))
        return np.dtype(fields, align=True)

    return [np.dtype(kind(text)) for text in _parameters(source, name)]


FENCE = ctypes.CFUNCTYPE(None)


def run(source, name, grid, threads, arguments, fence):
    """Run a kernel with arguments that are numbers or structures of NumPy, whose addresses are those of the host."""
    held = [np.array(value) for value in arguments]
    pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
    launch(source, name, (*grid, 1)[:2], threads[0], pointers, fence)


def launch(source, name, grid, threads, pointers, fence=lambda: None):
    """Run a kernel with `pointers` to its arguments, in `grid` blocks of so many threads."""
    counts = (ctypes.c_uint(count) for count in (*grid, threads))
    if compiled(source, name)(pointers, *counts, FENCE(fence)):
        raise RuntimeError(f"{name}: threads of a block wait for each other in vain")

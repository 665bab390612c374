"""CUDA source of whole kernels, compiled by g++ and run on the host, one thread of the grid after the other.

So what one thread of a block tells the others must come from an earlier one, or go to a later one. The clock counts
nanoseconds. A fence for the system calls the function that `run` is given.
"""

import ctypes
import functools
import os
import re
import subprocess
import tempfile

import numpy as np

SHIM = """
#include <time.h>
#define __shared__ static
#define __syncthreads()
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
struct Three { unsigned int x, y, z; };
static Three blockIdx, threadIdx, blockDim, gridDim;
static void (*fence)();
static inline void __threadfence_system() { fence(); }
static inline long long clock64() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
"""
RUN = """
extern "C" void run_on_host(void **all, unsigned int x, unsigned int y, unsigned int threads, void (*fenced)()) {{
    fence = fenced;
    gridDim = {{x, y, 1}}; blockDim = {{threads, 1, 1}};
    for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {name}({values});
}}
"""


@functools.cache
def compiled(source, name):
    """Function of (pointers to the kernel's arguments, blocks in x and y, threads of a block)."""
    signature = re.search(rf"\b{name}\((.*?)\) {{", source, re.DOTALL).group(1)
    kinds = [re.sub(r"const |__grid_constant__ ", "", part).strip().rsplit(None, 1)[0] for part in signature.split(",")]
    values = ", ".join(f"*({kind} *)all[{number}]" for number, kind in enumerate(kinds))
    folder = tempfile.mkdtemp(prefix="standin-")
    path = os.path.join(folder, "kernel.cpp")
    with open(path, "w") as file:
        file.write(SHIM + source + RUN.format(name=name, values=values))
    options = ["-O1", "-w", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-o", f"{path}.so", path]
    done = subprocess.run(["g++", *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[:2000]}")
    return ctypes.CDLL(f"{path}.so").run_on_host


FENCE = ctypes.CFUNCTYPE(None)


def run(source, name, grid, threads, arguments, fence):
    """Run a kernel with arguments that are numbers or structures of NumPy, whose addresses are those of the host."""
    held = [np.array(value) for value in arguments]
    pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
    counts = (ctypes.c_uint(count) for count in (*(*grid, 1)[:2], threads[0]))
    compiled(source, name)(pointers, *counts, FENCE(fence))

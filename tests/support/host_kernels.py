"""Elementwise CUDA kernels that CuPy generates, compiled by g++ and run on the host, one element after the other."""

import ctypes
import re
from functools import cache

from support.standin import raw_kernels
from support.standin.cupy import _SHIM

ARRAYS = """
#include <cstddef>
#include <cstdint>
#define __device__
#define __global__
#define __host__
typedef _Float16 float16;
struct Three { int x; };
static const Three blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
#define CUPY_FOR(i, n) for (ptrdiff_t i = 0; i < (n); i++)
template <int n> struct CIndexer_ {
    ptrdiff_t size_, shape_[n ? n : 1], index_[n ? n : 1];
    ptrdiff_t size() const { return size_; }
    const ptrdiff_t *get() const { return index_; }
    void set(ptrdiff_t i) {
        for (int dim = n - 1; dim >= 0; dim--) { index_[dim] = i % shape_[dim]; i /= shape_[dim]; }
    }
};
template <typename T, int n> struct CArray_ {
    T *data_; ptrdiff_t size_, shape_[n ? n : 1], strides_[n ? n : 1];
    ptrdiff_t size() const { return size_; }
    T &operator[](const ptrdiff_t *index) const {
        char *at = (char *)data_;
        for (int dim = 0; dim < n; dim++) at += strides_[dim] * index[dim];
        return *(T *)at;
    }
    T &operator[](ptrdiff_t index) const { return *(T *)((char *)data_ + strides_[n - 1] * index); }  // of a vector
};
template <typename T, int n, bool, bool> using CArray = CArray_<T, n>;
template <int n, bool> using CIndexer = CIndexer_<n>;
"""
"""CuPy's array and indexer, with the members of those that it passes to kernels (cupy/carray.cuh)."""

KERNEL = re.compile(r'extern "C" __global__ void (\w+)\((.*?)\) \{', re.DOTALL)


def is_elementwise(source):
    """True if the kernel is a loop over elements, without barriers."""
    return KERNEL.search(source) is not None and "CUPY_FOR" in source and "__syncthreads" not in source


@cache
def compiled(source):
    """Function of the address of the kernel's arguments, an array of pointers as `cuLaunchKernel` gets it."""
    name, parameters = KERNEL.search(source).groups()
    kinds = [part.rsplit(None, 1)[0] for part in re.split(r",\s*(?![^<]*>)", parameters)]
    kinds = [re.sub(r"^const (.*)&$|&$", r"\1", kind) for kind in kinds]
    values = ", ".join(f"*({kind} *)all[{number}]" for number, kind in enumerate(kinds))
    body = "\n".join(line for line in source.splitlines() if not line.strip().startswith("#include"))
    run = f'extern "C" void run_on_host(void **all) {{ {name}({values}); }}'
    text = f"{_SHIM}{ARRAYS}using namespace std;\n{body}\n{run}"
    function = raw_kernels.library(text, "-fexcess-precision=16").run_on_host
    function.argtypes, function.restype = [ctypes.c_size_t], None
    return function

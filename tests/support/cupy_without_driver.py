"""CuPy itself on a machine without a CUDA driver: host memory for the device's, and kernels compiled for both.

CuPy's modules call CUDA through functions that `cupy_backends.cuda.api.runtime` and `driver` export, as capsules that
other modules read when they are imported. `install` puts functions of this file into the capsules before that. Memory
is malloc's and copies happen at once. Kernels are built by NVRTC for `ARCHITECTURE`; elementwise and raw ones are then
run on the host if `run_kernels` is set, and all others are not run, so that their results are undefined. Shapes, dtypes
and every check of arguments are CuPy's own.

Only for a process of its own, in which CuPy was not imported before: a GPU is not reached in it.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from support import host_kernels
from support.standin import raw_kernels

ARCHITECTURE = 90
"""Compute capability of the device that CuPy sees, times ten."""

C_TYPES = {
    "PyObject *": ctypes.py_object,
    "int": ctypes.c_int,
    "intptr_t": ctypes.c_ssize_t,
    "size_t": ctypes.c_size_t,
    "unsigned int": ctypes.c_uint,
}
ATTRIBUTES = {1: 1024, 8: 49152, 10: 32, 16: 132, 39: 2048, 75: ARCHITECTURE // 10, 76: ARCHITECTURE % 10}
"""Device attributes by CUDA's numbers: threads per block, shared memory, warp, processors, threads, capability."""

SOURCES: dict[bytes, tuple[str, tuple[str, ...]]] = {}
"""CUDA source and options of the compiler, by the compiled code that CuPy loads."""

LAUNCHED: list[tuple[str, bytes]] = []
"""Name and compiled code of the kernels that were launched."""

FAILURES: list[Exception] = []
"""Errors of functions that compiled code has called, which it does not see."""

run_kernels = False
_kept = []  # callbacks and names of capsules, which live as long as the process
_modules: dict[int, bytes] = {}
_functions: dict[int, tuple[str, bytes]] = {}
_numbers = count(1000)


def install():
    """Import CuPy on host memory; return the module."""
    if "cupy" in sys.modules:
        raise RuntimeError("CuPy is imported already: it is bound to the driver of this machine, or to none")
    os.environ["CUPY_ACCELERATORS"] = ""  # kernels that CuPy generates, in place of compiled libraries
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    runtime = import_module("cupy_backends.cuda.api.runtime")
    driver = import_module("cupy_backends.cuda.api.driver")
    for module, table in ((runtime, _runtime()), (driver, _driver())):
        for name, function in table.items():
            _replace(module, name, function)
    runtime.pointerGetAttributes = lambda pointer: SimpleNamespace(
        device=0, type=2
    )  # which compiled modules do not call
    _load_stub_of_cublas()
    cupy = import_module("cupy")
    compiler = import_module("cupy.cuda.compiler")
    build = compiler._compile_using_nvrtc_no_warning

    def remember(source, options=(), *arguments, **others):
        code, mapping = build(source, options, *arguments, **others)
        SOURCES[code] = source, tuple(options)
        return code, mapping

    compiler._compile_using_nvrtc_no_warning = remember
    for name in ("argsort", "lexsort", "sort"):
        setattr(cupy.cuda.thrust, name, lambda *_: None)
    return cupy


PRODUCTS = """
static float loaded(const void *p, long at, int type) {
    if (type == 0) return ((const float *)p)[at];
    if (type == 2) return (float)((const _Float16 *)p)[at];
    union { unsigned int bits; float value; } x = { (unsigned int)((const unsigned short *)p)[at] << 16 };
    return x.value;
}
static void stored(void *p, long at, int type, float y) {
    union { float value; unsigned int bits; } x = { y };
    if (type == 0) ((float *)p)[at] = y;
    else if (type == 2) ((_Float16 *)p)[at] = (_Float16)y;
    else ((unsigned short *)p)[at] = (x.bits + 0x7FFF + (x.bits >> 16 & 1)) >> 16;
}
int cublasGemmStridedBatchedEx(void *handle, int ta, int tb, int m, int n, int k, const float *alpha, const void *a,
        int at, int lda, long long sa, const void *b, int bt, int ldb, long long sb, const float *beta, void *c, int ct,
        int ldc, long long sc, int count, int compute, int algo) {
    for (long z = 0; z < (compute == 68 ? count : 0); z++)
        for (long i = 0; i < m; i++)
            for (long j = 0; j < n; j++) {
                float sum = 0;
                for (long l = 0; l < k; l++)
                    sum += loaded(a, z * sa + (ta ? l + i * lda : i + l * lda), at)
                        * loaded(b, z * sb + (tb ? j + l * ldb : l + j * ldb), bt);
                stored(c, z * sc + i + j * ldc, ct, *alpha * sum);
            }
    return 0;
}
int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, const float *alpha, const void *a, int at, int lda,
        const void *b, int bt, int ldb, const float *beta, void *c, int ct, int ldc, int compute, int algo) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, at, lda, 0, b, bt, ldb, 0, beta, c, ct, ldc, 0, 1,
        compute, algo);
}
"""
"""Products of cuBLAS on host memory, for sums in float32 and a factor 0 of the earlier result."""


def _load_stub_of_cublas():
    """Load libraries in the place of cuBLAS, whose functions return success; only those of `PRODUCTS` compute."""
    binding = Path(find_spec("cupy_backends.cuda.libs.cublas").origin)
    symbols = subprocess.run(["nm", "-D", "-u", binding], check=True, capture_output=True, text=True).stdout
    sections = subprocess.run(["readelf", "-d", binding], check=True, capture_output=True, text=True).stdout
    others = sorted(set(re.findall(r"cublas\w+", symbols)) - {"cublasGemmEx", "cublasGemmStridedBatchedEx"})
    source = PRODUCTS + "".join(f"int {name}() {{ return 0; }}\n" for name in others)
    (needed,) = re.findall(r"\[(libcublas\.so\.\d+)\]", sections)
    with tempfile.TemporaryDirectory() as folder:
        for soname in (needed, needed.replace("cublas", "cublasLt")):
            library = f"{folder}/{soname}"
            Path(f"{library}.map").write_text(f"{soname} {{ global: *; }};")  # the version of its symbols
            command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", library]
            command.append(f"-Wl,-soname,{soname},--version-script={library}.map")
            subprocess.run(command, input=source, check=True, text=True)
            _kept.append(ctypes.CDLL(library, ctypes.RTLD_GLOBAL))


def _runtime():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    libc.calloc.restype, libc.calloc.argtypes = ctypes.c_size_t, [ctypes.c_size_t, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_size_t]
    libc.memmove.argtypes = [ctypes.c_size_t] * 3
    libc.memset.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t]

    def none(function=lambda *_: None):
        return lambda *arguments: (function(*arguments), None)[1]

    def copy(target, source, nbytes, *_):
        libc.memmove(target, source, nbytes)

    silent = "setDevice deviceSynchronize streamSynchronize streamWaitEvent streamDestroy eventRecord"
    silent += " eventSynchronize eventDestroy _ensure_context hostUnregister hostRegister"
    return {
        **{name: none() for name in silent.split()},
        "getDevice": lambda: 0,
        "getDeviceCount": lambda: 1,
        "memGetInfo": lambda: (1 << 34, 1 << 35),
        "deviceGetPCIBusId": lambda device: "0000:00:00.0",
        "getDeviceProperties": lambda device: {"name": b"host memory", "warpSize": 32},
        "deviceGetAttribute": lambda attribute, device: ATTRIBUTES.get(attribute, 1024),
        "runtimeGetVersion": lambda: 13000,
        "driverGetVersion": lambda: 13000,
        "malloc": lambda nbytes: libc.calloc(1, nbytes),
        "free": none(libc.free),
        "hostAlloc": lambda nbytes, flags: libc.malloc(nbytes),
        "freeHost": none(libc.free),
        "memcpy": none(copy),
        "memcpyAsync": none(copy),
        "memset": none(libc.memset),
        "memsetAsync": none(lambda address, value, nbytes, stream: libc.memset(address, value, nbytes)),
        "streamCreate": lambda: next(_numbers),
        "streamCreateWithFlags": lambda flags: next(_numbers),
        "streamIsCapturing": lambda stream: 0,
        "streamCreateWithPriority": lambda flags, priority: next(_numbers),
        "streamQuery": lambda stream: 0,
        "eventQuery": lambda event: 0,
        "eventCreate": lambda: next(_numbers),
        "eventCreateWithFlags": lambda flags: next(_numbers),
        "pointerGetMemoryType": lambda pointer: 0,
    }


def _driver():
    def function(module, name):
        number = next(_numbers)
        _functions[number] = name, _modules[module]
        return number

    def load(code):
        number = next(_numbers)
        _modules[number] = code
        return number

    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        name, code = _functions[function]
        LAUNCHED.append((name, code))
        source = SOURCES[code][0]
        if run_kernels and host_kernels.is_elementwise(source):
            host_kernels.compiled(source)(arguments)
        elif run_kernels and "cupy" not in source:
            raw_kernels.launch(source, name, (gx, gy), bx, ctypes.c_void_p(arguments))

    return {
        "ctxGetCurrent": lambda: 1,
        "moduleLoadData": load,
        "moduleUnload": lambda module: None,
        "moduleGetFunction": function,
        "funcGetAttribute": lambda attribute, function: 0,
        "launchKernel": launch,
    }


def _replace(module, name, function):
    """Put `function` in the place of the one that `module` exports, for Python and for compiled modules."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    signature = api.PyCapsule_GetName(module.__pyx_capi__[name])
    result, arguments = re.match(r"(.*?) ?\((.*)\)$", signature.decode()).groups()
    kinds = [argument.strip() for argument in arguments.split(",") if argument.strip() != "void"]
    own = [C_TYPES[kind] for kind in kinds if "__pyx" not in kind]
    added = [ctypes.c_int if "skip_dispatch" in kind else ctypes.c_void_p for kind in kinds if "__pyx" in kind]
    if kinds and kinds[0] == "int __pyx_skip_dispatch":
        own = []

    restype = C_TYPES["PyObject *" if result.startswith("PyObject") else result]

    def called(*given):
        try:
            return function(*given[: len(own)])
        except Exception as error:  # cannot pass through compiled code
            FAILURES.append(error)
            return None if restype is ctypes.py_object else 0

    callback = ctypes.PYFUNCTYPE(restype, *own, *added)(called)
    label = ctypes.create_string_buffer(signature)
    _kept.extend((callback, label))
    address = ctypes.cast(callback, ctypes.c_void_p).value
    module.__pyx_capi__[name] = api.PyCapsule_New(address, ctypes.cast(label, ctypes.c_char_p), None)

    def replacement(*given):
        return function(*given[: len(own)])

    replacement.__doc__ = getattr(module, name).__doc__ if hasattr(module, name) else None
    setattr(module, name, replacement)

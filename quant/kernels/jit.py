"""On-disk cache of numba-compiled functions, safe for ranks that start together.

Numba's own index file is read, changed and written by all processes: ranks that start together lose each other's
entries, or an entry can name the code of another. Here every version of a function (signature, processor, bytecode,
closed-over values) has a file named after all of these. Damaged or outdated files are rewritten. Of processes that
need the same version at the same time, one compiles it, and the others wait for its file.

Closed-over values must be numbers: their pickled bytes are part of the version, and those of compiled functions differ
between processes.

The first function given to numba fixes the processor's features, so modules import `njit` from here.
"""

# mypy: ignore-errors
# Numba's modules have no types.

import fcntl
import hashlib
import os
import pickle
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numba
from llvmlite import binding
from numba import njit as njit
from numba.core.caching import FunctionCache
from numba.core.codegen import get_host_cpu_features
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from quant.kernels.availability import has_compiler

if not has_compiler():
    raise ImportError("NUMBA_DISABLE_JIT turns the compiler of kernels off", name=__name__)


def use_widest_vectors() -> None:
    """Let numba compile to vectors of 512 bits on processors with AVX-512, unless NUMBA_CPU_FEATURES is set.

    LLVM prefers 256 bits on Intel's, as the first of them lowered their clock for more. Those with VBMI2 (Ice Lake and
    later) hardly do. Holds for all functions that numba compiles in this process.
    """
    with suppress(RuntimeError):  # LLVM does not know the features
        if numba.config.CPU_FEATURES is None and binding.get_host_cpu_features().get("avx512vbmi2"):
            numba.config.CPU_FEATURES = f"{get_host_cpu_features()},-prefer-256-bit"


use_widest_vectors()


class CompilationLock:
    """Lock of a version while a process compiles it; the system releases those of processes that end.

    After `PATIENCE` seconds, and on file systems without locks, the process goes on without it.
    """

    PATIENCE = 60.0

    def __init__(self, path: str):
        self._path = f"{path}.lock"
        self._file = open(self._path, "wb")  # noqa: SIM115
        end = time.monotonic() + self.PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                return

    def release(self) -> None:
        with suppress(OSError):  # another process has removed it
            os.unlink(self._path)
        self._file.close()


def is_trusted(status: os.stat_result) -> bool:
    """True for a file of this user or root that no other user may write: unpickling it runs what its writer chose.

    The folder does not matter: whoever may write there can remove a file or put their own in its place, but not change
    its owner.
    """
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class KernelCache(FunctionCache):
    """On-disk cache of one function's compiled versions, one file each; only those that `is_trusted` are read."""

    def __init__(self, function: Callable[..., Any], others: bytes):
        super().__init__(function)
        self._sources = others + repr((numba.__version__, self._impl.locator.get_source_stamp())).encode()
        self._locks: dict[str, CompilationLock] = {}

    def _path(self, signature: Any, codegen: Any) -> str:
        name = hashlib.sha256(repr(self._index_key(signature, codegen)).encode()).hexdigest()[:32]
        return os.path.join(self._cache_path, f"{self._impl.filename_base}.{name}.nbc")

    def _digest(self, code: bytes) -> bytes:
        return hashlib.sha256(self._sources + code).digest()

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Load the compile result for a signature from disk; None if there is none or it is outdated.

        None also locks the version until `save_overload`; numba calls both in one thread at a time.
        """
        rtsys.initialize(context)  # code from disk needs no more; a compilation loads what numba can compile
        path = self._path(signature, context.codegen())
        found = self._read(path, context)
        if found is None:
            with suppress(OSError):
                self._impl.locator.ensure_cache_path()
                if path not in self._locks:  # of a compilation that failed
                    self._locks[path] = CompilationLock(path)
                found = self._read(path, context)  # of the process that this one has waited for
        if found is not None and path in self._locks:
            self._locks.pop(path).release()
        return found

    def _read(self, path: str, context: Any) -> Any:
        try:
            with open(path, "rb") as file:
                if not is_trusted(os.fstat(file.fileno())):
                    return None
                digest, code = file.read(32), file.read()
        except OSError:
            return None
        return self._impl.rebuild(context, pickle.loads(code)) if digest == self._digest(code) else None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write a compile result to disk; do nothing if that is not possible."""
        path = self._path(signature, result.codegen)
        try:
            if self._impl.check_cachable(result):
                self._write(path, dumps(self._impl.reduce(result)))
        finally:
            if path in self._locks:
                self._locks.pop(path).release()

    def _write(self, path: str, code: bytes) -> None:
        own = f"{path}.{uuid4().hex[:16]}"  # hosts may share the folder
        with suppress(OSError):  # a full disk costs time in the next process, nothing here
            self._impl.locator.ensure_cache_path()
            try:
                with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
                    file.write(self._digest(code) + code)
                os.replace(own, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(own)


_compiled_into: defaultdict[str, set[ModuleType]] = defaultdict(set)
"""Modules whose constants and functions are compiled into those of a module, by its name."""


def _files(modules: Iterable[ModuleType]) -> set[str]:
    """Paths of modules and of all that are compiled into them."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module.__file__ not in found:
            found.add(module.__file__)
            waiting += _compiled_into.get(module.__name__, ())
    return found


def compiler(*modules: ModuleType, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile at the first call per signature, with `numba.njit(**options)`, or load from the cache on disk.

    `modules` are those whose constants and functions are compiled into it, besides the function's own. Modules that are
    compiled into these count too.
    """
    others = b"".join(sorted(hashlib.sha256(Path(path).read_bytes()).digest() for path in _files(modules)))

    def compile_lazily(function: Callable[..., Any]) -> Any:
        _compiled_into[function.__module__].update(modules)
        dispatcher = numba.njit(**options)(function)
        with suppress(RuntimeError):  # neither the package's folder nor the user's can be written
            dispatcher._cache = KernelCache(function, others)
        return dispatcher

    return compile_lazily

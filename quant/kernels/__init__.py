"""The arithmetic of few bits, each function in the fastest form there is for its arrays.

`reference` is what the functions do. Modules beside it have a table of faster forms, which give the same bits:
`compiled` for arrays on the host, where numba is installed; `device` for CuPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

from quant.kernels import reference_codecs as reference
from quant.kernels.reference_codecs import array_namespace, minifloat_bits, uniform

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_forms = ["compiled", "device"]


@cache
def _module(name: str) -> Mapping[str, Any]:
    """Kernels of a module by name; none where what it needs is missing."""
    try:
        return cast(Mapping[str, Any], import_module(f"quant.kernels.{name}").KERNELS)
    except ImportError:
        return {}


@contextmanager
def forms(*names: str) -> Iterator[None]:
    """Only these faster forms, for a while: for tests and benchmarks. None of them leaves the reference."""
    before = _forms[:]
    _forms[:] = names
    try:
        yield
    finally:
        _forms[:] = before


def _fastest(kernel: Kernel) -> Kernel:
    """The kernel, or the form of it for the kind of its first argument."""
    name = kernel.__name__

    @wraps(kernel)
    def call(first: Any, *arguments: Any) -> Any:
        kind = "compiled" if isinstance(first, np.ndarray) else "device"
        form = _module(kind).get(name, kernel) if kind in _forms else kernel
        return form(first, *arguments)

    return cast(Kernel, call)


absmax = _fastest(reference.absmax)
minmax = _fastest(reference.minmax)
peak = _fastest(reference.peak)
encode_linear = _fastest(reference.encode_linear)
encode_float = _fastest(reference.encode_float)
encode_table = _fastest(reference.encode_table)
quantize_linear = _fastest(reference.quantize_linear)
decode_linear = _fastest(reference.decode_linear)
decode_table = _fastest(reference.decode_table)
pack = _fastest(reference.pack)
unpack = _fastest(reference.unpack)

__all__ = [
    "absmax",
    "array_namespace",
    "decode_linear",
    "decode_table",
    "encode_float",
    "encode_linear",
    "encode_table",
    "forms",
    "minifloat_bits",
    "minmax",
    "pack",
    "peak",
    "quantize_linear",
    "uniform",
    "unpack",
]

"""Quantisation kernels, each run by the fastest implementation available for its arrays.

`reference_codecs` defines the results. Other modules have tables of faster forms with the same bits: `compiled_codecs`
and `compiled_row_sums` for host arrays (numba), `device_codecs` for CuPy arrays.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

from quant.kernels import reference_codecs
from quant.kernels.reference_codecs import LinearCode, ScaleRule, array_namespace, minifloat_bits, surely_all

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_forms = ["compiled", "device"]

_MODULES = {"compiled": "compiled_row_sums", "device": "device_codecs"}
"""Module of each form that has the table of its kernels, those of modules it imports included."""


@cache
def _module(name: str) -> Mapping[str, Any]:
    """Kernels by name of an implementation, `compiled` or `device`; empty if its dependency is missing."""
    try:
        return cast(Mapping[str, Any], import_module(f"quant.kernels.{_MODULES[name]}").KERNELS)
    except ImportError:
        return {}


def available(form: str) -> bool:
    """True if a faster implementation, `compiled` or `device`, can be imported."""
    return bool(_module(form))


@contextmanager
def forms(*names: str) -> Iterator[None]:
    """Allow only these of the faster implementations (`compiled`, `device`) within a `with` block.

    For tests and benchmarks; without names all kernels are the reference.
    """
    before = _forms[:]
    _forms[:] = names
    try:
        yield
    finally:
        _forms[:] = before


def _fastest(kernel: Kernel) -> Kernel:
    """Wrap a reference kernel: calls with NumPy or CuPy arrays go to the faster implementation for these, if any."""
    name = kernel.__name__

    @wraps(kernel)
    def call(first: Any, *arguments: Any) -> Any:
        kind = "compiled" if isinstance(first, np.ndarray) else "device"
        form = _module(kind).get(name, kernel) if kind in _forms else kernel
        return form(first, *arguments)

    return cast(Kernel, call)


absmax = _fastest(reference_codecs.absmax)
minmax = _fastest(reference_codecs.minmax)
peak = _fastest(reference_codecs.peak)
encode_linear = _fastest(reference_codecs.encode_linear)
encode_float = _fastest(reference_codecs.encode_float)
encode_table = _fastest(reference_codecs.encode_table)
quantize_linear = _fastest(reference_codecs.quantize_linear)
decode_linear = _fastest(reference_codecs.decode_linear)
decode_table = _fastest(reference_codecs.decode_table)
add_rows = _fastest(reference_codecs.add_rows)
multiply_rows = _fastest(reference_codecs.multiply_rows)
pack = _fastest(reference_codecs.pack)
unpack = _fastest(reference_codecs.unpack)

__all__ = ["LinearCode", "ScaleRule", "array_namespace", "minifloat_bits", "surely_all"]

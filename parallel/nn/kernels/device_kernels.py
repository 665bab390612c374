"""Operators' kernels on a GPU: one pass over memory each, of the storage type, launched as CuPy's raw kernels.

Same arguments and results as the functions of those names in `reference_kernels`, which are called instead for arrays
with gaps, of other types, or too large for 32-bit indices where a kernel divides these. Functions without a reference
return None then. Packs of elements are read at once where addresses and lengths of rows allow it (`device_source`).
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from parallel.nn.kernels import device_row_source, device_source, reference_kernels
from parallel.nn.kernels.deferred import number
from parallel.nn.kernels.storage import BOOL, wide
from quant.kernels.dispatch import Unsuited
from quant.types import Array

OPTIONS = ("--std=c++17", "--fmad=false")
"""Sums and products are rounded one by one, as on the host: x - max(x) is exactly 0 for the largest x."""

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
WARPS = device_source.THREADS // 32
MOST_BLOCKS = 1 << 16
INT64 = np.dtype(np.int64)


class RawSource(NamedTuple):
    """Name of a kernel in its source, and that source without the common part (`source`)."""

    entry: str
    text: str


def _sources() -> dict[str, RawSource]:
    found = {}
    for name in ACTIVATIONS:
        found[name] = RawSource(f"{name}_of", device_source.UNARY.format(name=name))
        derivative = f"{name}_backward"
        found[derivative] = RawSource(f"{derivative}_of", device_source.BINARY.format(name=derivative))
    for name in ("same", *ACTIVATIONS):
        found[f"biased_{name}"] = RawSource(f"biased_{name}", device_source.BIASED.format(name=name))
    found["add"] = RawSource("add_of", device_source.BINARY.format(name="add"))
    found["masked"] = RawSource("masked_of", device_source.MASKED)
    for kind in "TW":
        found[f"merge_heads from {kind}"] = RawSource("merge_heads", device_source.MERGED_HEADS.format(kind=kind))
    sums = (device_source.COLUMNS + text for text in (device_source.COLUMN_SUMS, device_source.NORM_SUMS))
    for text in (*device_row_source.KERNELS, *sums, device_source.HEADS):
        entry = text.partition("KERNEL ")[2].partition("(")[0]
        found[entry] = RawSource(entry, text)
    return found


SOURCES = _sources()


def source(name: str, dtype: np.dtype, width: int) -> str:
    """CUDA source of a kernel for elements of a dtype, `width` of them at once."""
    sizes = {"WIDTH": width, "THREADS": device_source.THREADS, "CHUNK": device_source.CHUNK}
    begin = "".join(f"#define {key} {value}\n" for key, value in sizes.items())
    return begin + device_source.TYPES[dtype] + device_source.COMMON + device_source.formulas() + SOURCES[name].text


@cache
def _kernel(cupy: Any, name: str, dtype: np.dtype, width: int) -> Any:
    return cupy.RawKernel(source(name, dtype, width), SOURCES[name].entry, options=OPTIONS)


def suits(x: Any) -> bool:
    """True if `x` is a CuPy array of a floating-point type, which these kernels accept."""
    return not isinstance(x, np.ndarray | np.generic) and getattr(x, "dtype", None) in device_source.TYPES


def _dense(dtype: np.dtype, *arrays: Array) -> bool:
    """True if all are C-contiguous arrays of the dtype on a device."""
    dense = True
    for x in arrays:
        dense = dense and not isinstance(x, np.ndarray) and x.dtype == dtype and x.flags.c_contiguous
    return dense


def _width(dtype: np.dtype, columns: int, *arrays: Array) -> int:
    """Elements of a pack: 16 bytes of `dtype` if rows of `columns` are whole packs at such addresses, else 1."""
    most = 16 // dtype.itemsize
    return most if columns % most == 0 and all(x.data.ptr % 16 == 0 for x in arrays) else 1


def _launch(name: str, dtype: np.dtype, width: int, blocks: tuple[int, ...], *arguments: Any) -> None:
    kernel = _kernel(sys.modules["cupy"], name, dtype, width)
    kernel(blocks, (device_source.THREADS,), arguments)


def _over_elements(name: str, dtype: np.dtype, width: int, packs: int, *arguments: Any) -> None:
    """Launch a kernel with a thread for each pack, or several packs a thread. None if there are no packs."""
    if packs:
        _launch(name, dtype, width, (min(-(-packs // device_source.THREADS), MOST_BLOCKS),), *arguments)


def _over_rows(name: str, dtype: np.dtype, width: int, rows: int, *arguments: Any) -> None:
    """Launch a kernel with a warp for each row, or several rows a warp. There is at least one row."""
    _launch(name, dtype, width, (min(-(-rows // WARPS), MOST_BLOCKS),), *arguments)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return sys.modules["cupy"].ndarray(shape, dtype)


def _reference(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(reference_kernels, name)
    return function


# ------------------------------------------------------------------------------------------ element by element


def _elementwise(name: str, x: Array, *others: Any, out: Array | None = None) -> Array:
    arrays = [x, *(other for other in others if hasattr(other, "dtype") and other.dtype != BOOL)]
    masks = [other for other in others if getattr(other, "dtype", None) == BOOL]
    y = _empty(x.shape, x.dtype) if out is None else out
    alike = all(array.shape == x.shape for array in (*arrays, *masks, y))
    if not (alike and _dense(x.dtype, *arrays, y) and _dense(BOOL, *masks)):
        return _reference(name)(x, *others, out=out) if name != "add" else x + others[0]
    width = _width(x.dtype, x.size, *arrays, *masks, y)
    numbers = [float(other) for other in others if not hasattr(other, "dtype")]
    _over_elements(name, x.dtype, width, x.size // width, *arrays, *masks, y, x.size // width, *numbers)
    return y


def add_bias(z: Array, bias: Array, y: Array | None = None, activation: str = "same") -> Array:
    """Add the bias to z, of shape (..., m), in place. Write the activation of that to y, by default z. Return y."""
    y = z if y is None else y
    if not (_dense(z.dtype, z, bias, y) and bias.shape == z.shape[-1:] and z.size < 1 << 32):
        z += bias
        return y if activation == "same" else _reference(activation)(z, out=y)
    width = _width(z.dtype, bias.size, z, bias, y)
    packs = z.size // width
    _over_elements(f"biased_{activation}", z.dtype, width, packs, z, bias, y, packs, bias.size // width)
    return y


def _biased(activation: str, z: Array, bias: Array) -> Array:
    """Add the bias to z in place and return the activation of that, for ReLU also in place."""
    return add_bias(z, bias, z if activation == "relu" else _empty(z.shape, z.dtype), activation)


def affine(x: Array, weight: Array, bias: Array) -> Array:
    """Affine map x @ weight + bias."""
    return add_bias(reference_kernels.matmul(x, weight), bias)


# ------------------------------------------------------------------------------------------ rows and columns


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """Sum over the first axis, wide: of chunks of rows, then of chunks of these, until one is left."""
    dtype, shape = wide(x.dtype), x.shape[1:]
    columns = x.size // len(x) if len(x) else 0
    # A grid has at most 65535 blocks along its second axis.
    if not (columns and _dense(x.dtype, x) and len(x) <= device_source.CHUNK * 65535):
        return reference_kernels.sum_rows(x, out=out)
    is_written = out is not None and out.shape == shape and _dense(dtype, out)
    result = out if is_written else _empty(shape, dtype)
    _add_chunks(x, len(x), columns, result)
    if out is None or is_written:
        return result
    out[...] = result
    return out


def _add_chunks(x: Array, rows: int, columns: int, result: Array) -> None:
    while rows:
        chunks = -(-rows // device_source.CHUNK)
        sums = result if chunks == 1 else _empty((chunks, columns), result.dtype)
        width = _width(x.dtype, columns, x)
        _launch("column_sums", x.dtype, width, (-(-columns // (32 * width)), chunks), x, sums, rows, columns)
        x, rows = sums, 0 if chunks == 1 else chunks


def layer_norm(x: Array, gain: Array, bias: Array | None, eps: float) -> tuple[Array, Array | None, Array]:
    """LayerNorm or, without a bias, RMSNorm of rows: (y, mean, rstd)."""
    parameters = [gain] if bias is None else [gain, bias]
    if not (x.size and _dense(x.dtype, x, *parameters) and all(one.shape == x.shape[1:] for one in parameters)):
        return reference_kernels.layer_norm(x, gain, bias, eps)
    rows, columns = x.shape
    width = _width(x.dtype, columns, x, *parameters)
    y, rstd = _empty(x.shape, x.dtype), _empty((rows,), wide(x.dtype))
    mean = rstd if bias is None else _empty((rows,), rstd.dtype)  # not written without a bias
    arrays = (x, gain, parameters[-1], y, mean, rstd)
    numbers = rows, columns // width, float(eps), int(bias is not None)
    _over_rows("layer_norm", x.dtype, width, rows, *arrays, *numbers)
    return y, None if bias is None else mean, rstd


def layer_norm_backward(
    dy: Array, x: Array, gain: Array, mean: Array | None, rstd: Array
) -> tuple[Array, Array, Array | None]:
    """Gradients of `layer_norm`: (dx, dgain, dbias)."""
    statistics = [rstd] if mean is None else [mean, rstd]
    chunks = -(-len(x) // device_source.CHUNK)
    right = x.size and dy.shape == x.shape and gain.shape == x.shape[1:] and chunks <= 65535
    if not (right and _dense(x.dtype, dy, x, gain) and _dense(wide(x.dtype), *statistics)):
        return reference_kernels.layer_norm_backward(dy, x, gain, mean, rstd)
    (rows, columns), parts = x.shape, len(statistics)
    width, dx = _width(x.dtype, columns, dy, x, gain), _empty(x.shape, x.dtype)
    shared = (statistics[0], rstd)  # RMSNorm: rstd in the place of means, which are not read
    _over_rows("layer_norm_dx", x.dtype, width, rows, dy, x, gain, *shared, dx, rows, columns // width, parts - 1)
    sums, total = (_empty((count, parts * columns), rstd.dtype) for count in (chunks, 1))
    blocks = -(-columns // (32 * width)), chunks
    _launch("norm_sums", x.dtype, width, blocks, dy, x, *shared, sums, rows, columns, parts - 1)
    _add_chunks(sums, chunks, parts * columns, total)
    return dx, total[0, :columns], None if mean is None else total[0, columns:]


# ------------------------------------------------------------------------------------------ cross entropy


def softmax_cross_entropy(scores: Array, targets: Array) -> tuple[float, Array]:
    """Cross entropy: (sum over rows with a target >= 0, log_sum)."""
    if not (scores.size and _dense(scores.dtype, scores) and _dense(INT64, targets)):
        return reference_kernels.softmax_cross_entropy(scores, targets)
    rows, columns = scores.shape
    width = _width(scores.dtype, columns, scores)
    losses, log_sum = (_empty((rows,), wide(scores.dtype)) for _ in range(2))
    arguments = scores, targets, losses, log_sum, rows, columns // width
    _over_rows("cross_entropy", scores.dtype, width, rows, *arguments)
    return number(losses.sum(dtype=np.float64)), log_sum


def softmax_cross_entropy_backward(scale: float, scores: Array, targets: Array, log_sum: Array) -> Array:
    """Gradient of `scale` * cross entropy by scores."""
    dense = _dense(scores.dtype, scores) and _dense(INT64, targets) and _dense(wide(scores.dtype), log_sum)
    if not (scores.size and dense):
        return reference_kernels.softmax_cross_entropy_backward(scale, scores, targets, log_sum)
    rows, columns = scores.shape
    width, gradient = _width(scores.dtype, columns, scores), _empty(scores.shape, scores.dtype)
    arguments = scores, targets, log_sum, gradient, rows, columns // width, float(scale)
    _over_rows("cross_entropy_gradient", scores.dtype, width, rows, *arguments)
    return gradient


# ------------------------------------------------------------------------------------------ causal attention


def split_heads(x: Array, parts: int, heads: int) -> Array | None:
    """Copy of x (batch, length, parts * heads * width) as (parts, batch, heads, length, width), or None."""
    batch, length, columns = x.shape
    columns //= parts * heads
    if not (x.size and _dense(x.dtype, x) and x.size < 1 << 32):
        return None
    y, width = _empty((parts, batch, heads, length, columns), x.dtype), _width(x.dtype, columns, x)
    packs = x.size // width
    _over_elements("split_heads", x.dtype, width, packs, x, y, packs, parts, batch, length, heads, columns // width)
    return y


def merge_heads(y: Array, dtype: np.dtype) -> Array | None:
    """Inverse of `split_heads`, rounded to `dtype`, or None."""
    parts, batch, heads, length, columns = y.shape
    if not (y.size and y.dtype in (dtype, wide(dtype)) and _dense(y.dtype, y) and y.size < 1 << 32):
        return None
    x, width = _empty((batch, length, parts * heads * columns), dtype), _width(dtype, columns, y)
    packs, kind = y.size // width, "T" if y.dtype == dtype else "W"
    _over_elements(
        f"merge_heads from {kind}", dtype, width, packs, y, x, packs, parts, batch, length, heads, columns // width
    )
    return x


def causal_probabilities(scores: Array, scale: float, first: int, dtype: np.dtype) -> Array | None:
    """Causal softmax of wide scores, rounded to `dtype`, or None."""
    queries, keys = scores.shape[-2:]
    if not (scores.size and _dense(wide(dtype), scores) and first + queries <= keys):
        return None
    p, width, rows = _empty(scores.shape, dtype), _width(dtype, keys, scores), scores.size // keys
    numbers = rows, keys // width, queries, int(first), float(scale)
    _over_rows("causal_probabilities", dtype, width, rows, scores, p, *numbers)
    return p


def causal_gradient(dp: Array, p: Array, scale: float, first: int) -> Array | None:
    """Gradient of `causal_probabilities` p, of the dtype of p, from wide dp, or None."""
    queries, keys = p.shape[-2:]
    right = p.size and dp.shape == p.shape and first + queries <= keys
    if not (right and _dense(p.dtype, p) and _dense(wide(p.dtype), dp)):
        return None
    ds, width, rows = _empty(p.shape, p.dtype), _width(p.dtype, keys, dp, p), p.size // keys
    numbers = rows, keys // width, queries, int(first), float(scale)
    _over_rows("causal_gradient", p.dtype, width, rows, dp, p, ds, *numbers)
    return ds


ELEMENTWISE = (*ACTIVATIONS, *(f"{name}_backward" for name in ACTIVATIONS), "masked", "add")
_KERNELS: dict[str, Callable[..., Any]] = {name: partial(_elementwise, name) for name in ELEMENTWISE}
_KERNELS |= {f"biased_{name}": partial(_biased, name) for name in ACTIVATIONS}
_KERNELS |= {
    function.__name__: function
    for function in (
        affine,
        sum_rows,
        layer_norm,
        layer_norm_backward,
        softmax_cross_entropy,
        softmax_cross_entropy_backward,
    )
}


def _of_floats(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Kernel that raises `Unsuited` where its first array is of no floating-point type."""
    place = int(name == "softmax_cross_entropy_backward")

    def call(*arguments: Any, **options: Any) -> Any:
        if not suits(arguments[place]):
            raise Unsuited(f"{name}: expected floating-point numbers")
        return function(*arguments, **options)

    return call


KERNELS = {name: _of_floats(name, function) for name, function in _KERNELS.items()}
"""Kernels by the name of the reference."""

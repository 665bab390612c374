"""Kernels of the project, as CuPy generates them: built for three architectures, and run on the host."""

import inspect
import io
import re
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from support import cupy_without_driver
from support import device_kernel_cases as kernel_cases
from support.operator_cases import COPIED, PRODUCTS, products_are_right
from support.recorded_calls import decoded
from support.standin import recorder

from collectives.transport.gpu import gpu_kernels, peer_kernels
from collectives.transport.wire import Iovec
from parallel.nn.flat_params import BLOCK
from parallel.nn.kernels import device_kernels, device_source
from parallel.nn.kernels.storage import BFLOAT16
from parallel.optim.grad_norm import reference_squares
from parallel.optim.kernels import device_updates
from parallel.optim.kernels.formulas import average
from parallel.optim.kernels.scalars import RunScalars, Scalars
from parallel.optim.optimizers import adam, lamb, lamb_direction, lamb_moments, momentum, nesterov, sgd
from quant.formats import MINIFLOATS
from quant.kernels import device_codecs, reference_codecs
from quant.kernels.reference_codecs import LinearCode
from quant.layout import packed_nbytes
from quant.spec.quant_spec import ROUNDINGS

ARCHITECTURES = (80, 90, 100)
CALLS = {key: entry for key, entry in recorder.stored().items() if key.startswith("ElementwiseKernel")}


@cache
def registers_and_spills(source, options, architecture, kernels=1):
    """Most registers of a thread, and bytes that it spills, as NVRTC's assembler prints them for so many kernels."""
    from cupy.cuda import compiler

    log = io.StringIO()
    program = compiler._NVRTCProgram(source, "kernel.cu", method="cubin")
    own = (f"-arch=sm_{architecture}", "--ptxas-options=-v", "--device-as-default-execution-space")
    program.compile((*options, *own), log)
    used = [int(found) for found in re.findall(r"Used (\d+) registers", log.getvalue())]
    assert len(used) == kernels
    return max(used), sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())))


def repeat(cupy, entry):
    """Make a recorded call of a kernel with CuPy; return (name, source, compiler options) of all that it launched."""
    first, *others = entry["arguments"]
    takes, gives, body, name, preamble, *options = first["kernel"]
    cupy_without_driver.LAUNCHED.clear()
    kernel = cupy.ElementwiseKernel(takes, gives, body, name, preamble=preamble, options=tuple(options))
    kernel(*(decoded(cupy, value) for value in others))
    return [(name, *cupy_without_driver.SOURCES[code]) for name, code in cupy_without_driver.LAUNCHED]


@pytest.mark.parametrize("form", CALLS)
def test_built_for_all_architectures(cupy, form, kernel_report):
    """One kernel a call, which keeps all its values in registers."""
    empty = any(0 in value.get("array", ()) for value in CALLS[form]["arguments"] if isinstance(value, dict))
    launched = repeat(cupy, CALLS[form])
    assert len(launched) == (not empty)
    for name, source, options in launched:
        found = [registers_and_spills(source, options, architecture) for architecture in ARCHITECTURES]
        kernel_report[name, source] = found
        assert all(spilled == 0 for _, spilled in found), found


@pytest.fixture
def on_host(monkeypatch):
    """Elementwise and raw kernels are run, on the host."""
    monkeypatch.setattr(cupy_without_driver, "run_kernels", True)


@pytest.mark.parametrize("dtype", device_source.TYPES, ids=str)
@pytest.mark.parametrize("name", device_kernels.SOURCES)
def test_kernels_of_operators(cupy, kernel_report, name, dtype):
    """For elements one by one and in packs: at least two blocks of them fit a processor."""
    for width in (1, 16 // dtype.itemsize):
        source = device_kernels.source(name, dtype, width)
        found = [registers_and_spills(source, device_kernels.OPTIONS, sm) for sm in ARCHITECTURES]
        kernel_report[f"operators: {name}, {dtype}, {width} per access", source] = found
        assert all(used * device_source.THREADS * 2 <= 65536 and spilled == 0 for used, spilled in found), found


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", sorted(kernel_cases.ROWS.keys() - {"affine", "softmax_cross_entropy"}))
def test_operators_like_the_reference(cupy, on_host, name, dtype):
    """With arguments as CuPy hands them over; no arrays of no rows, whose sums CuPy's own kernels write."""
    for shape in kernel_cases.SHAPES[1:]:
        kernel_cases.ROWS[name](cupy, name, dtype, shape)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_cross_entropy_like_the_reference(cupy, on_host, dtype):
    for shape in kernel_cases.SHAPES[1:]:
        kernel_cases.gradient_of_cross_entropy(cupy, dtype, shape)


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES)
def test_attention_like_the_reference(cupy, on_host, dtype):
    for shape in kernel_cases.HEADS[:-1]:
        if np.dtype(dtype) != BFLOAT16:  # CuPy's own casts of which run on a GPU only
            kernel_cases.heads_move(cupy, dtype, shape)
        kernel_cases.softmax_of_blocks(cupy, dtype, shape)
    kernel_cases.rows_without_numbers(cupy, dtype)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("multiply", [True, False])
def test_linear_codes_like_the_reference(cupy, on_host, rounding, multiply):
    random = np.random.default_rng(1)
    rows, by = random.standard_normal((6, 32)).astype("f4"), random.random(6 * 4).astype("f4") * 20 + 1
    key = (7, 11) if rounding == "stochastic" else None
    code = LinearCode(8, -127, 127, 0, True, rounding, key)
    scale = by if multiply else 1 / by
    expected, found = np.zeros(rows.size, "u1"), cupy.zeros(rows.size, "u1")
    reference_codecs.encode_linear(rows, 8, scale, multiply, None, code, expected)
    device_codecs.encode_linear(cupy.asarray(rows), 8, cupy.asarray(scale), multiply, None, code, found)
    np.testing.assert_array_equal(found.get(), expected)
    for add in (False, True):
        back, there = np.ones_like(rows), cupy.asarray(np.ones_like(rows))
        reference_codecs.decode_linear(expected, 8, by, by, code, back, add)
        device_codecs.decode_linear(found, 8, cupy.asarray(by), cupy.asarray(by), code, there, add)
        np.testing.assert_array_equal(there.get(), back)


@pytest.mark.parametrize("key", [None, (3, 5)])
@pytest.mark.parametrize("code", [name for name, kind in MINIFLOATS.items() if kind.bits <= 8])
def test_small_floats_like_the_reference(cupy, on_host, code, key):
    random = np.random.default_rng(2)
    rows, by = (100 * random.standard_normal((6, 32))).astype("f4"), random.random(6 * 4).astype("f4") + 0.5
    expected, found = np.zeros(rows.size, "u1"), cupy.zeros(rows.size, "u1")
    reference_codecs.encode_float(rows, 8, by, True, code, key, expected)
    device_codecs.encode_float(cupy.asarray(rows), 8, cupy.asarray(by), True, code, key, found)
    np.testing.assert_array_equal(found.get(), expected)


@pytest.mark.parametrize("count", [0, 5, 32, 131])
@pytest.mark.parametrize("bits", range(1, 8))
def test_packing_like_the_reference(cupy, on_host, bits, count):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, count).astype("u1")
    expected, found = np.zeros(packed_nbytes(count, bits), "u1"), cupy.zeros(packed_nbytes(count, bits), "u1")
    reference_codecs.pack(codes, bits, expected)
    device_codecs.pack(cupy.asarray(codes), bits, found)
    np.testing.assert_array_equal(found.get(), expected)
    device_codecs.unpack(found, bits, back := cupy.zeros(count, "u1"))
    np.testing.assert_array_equal(back.get(), codes)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("levels", [4, 16, 256])
def test_tables_like_the_reference(cupy, on_host, levels, own):
    random = np.random.default_rng(levels)
    rows, by = random.standard_normal((6, 32)).astype("f4"), random.random(24).astype("f4") + 0.5
    table = np.sort(random.standard_normal((6, 4, levels) if own else levels), axis=-1).astype("f4")
    bounds = np.ascontiguousarray(table[..., 1:])
    expected, found = np.zeros(rows.size, "u1"), cupy.zeros(rows.size, "u1")
    reference_codecs.encode_table(rows, 8, by, False, bounds, expected)
    device_codecs.encode_table(cupy.asarray(rows), 8, cupy.asarray(by), False, cupy.asarray(bounds), found)
    np.testing.assert_array_equal(found.get(), expected)
    back, there = np.ones_like(rows), cupy.asarray(np.ones_like(rows))
    reference_codecs.decode_table(expected, 8, 8, by, table, back, True)
    device_codecs.decode_table(found, 8, 8, cupy.asarray(by), cupy.asarray(table), there, True)
    np.testing.assert_array_equal(there.get(), back)


SCALARS = Scalars(0.3, 0.1, 0.01, 0.9, 0.1, 0.001, 1e-8, 1.5, 1.2, 0.12, 0.99)
FORMULAS = (sgd, momentum, nesterov, adam, lamb_moments, lamb_direction, lamb, average)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_updates_have_the_bits_of_the_formulas(cupy, on_host, formula, dtype):
    random, size = np.random.default_rng(4), 7 * BLOCK
    number = len(inspect.signature(formula).parameters) - 1
    arrays = [(10.0 ** random.integers(-20, 2, size) * random.random(size)).astype(dtype) for _ in range(number)]
    there = list(map(cupy.asarray, arrays))
    parts = slice(0, 2 * BLOCK), slice(2 * BLOCK, 3 * BLOCK), slice(3 * BLOCK, size)
    runs = SCALARS, None, SCALARS._replace(scale=0.7)
    numbers = device_updates.run_numbers([part.stop - part.start for part in parts])
    cupy_without_driver.LAUNCHED.clear()
    device_updates.run(formula.__name__, RunScalars(runs, numbers), *there)
    assert len(cupy_without_driver.LAUNCHED) == 1
    for part, some in zip(parts, runs):
        if some is not None:
            formula(*(array[part] for array in arrays), some)
    assert [array.get().tobytes() for array in there] == [array.tobytes() for array in arrays]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_squares_have_the_bits_of_the_reference(cupy, on_host, dtype):
    x = np.random.default_rng(5).normal(size=11 * 256).astype(dtype)
    expected, found = np.empty(11), cupy.empty(11, "f8")
    reference_squares(x, 256, np.empty(len(x)), expected)
    device_updates.squares(cupy.asarray(x), 256, cupy.empty(len(x) // device_updates.SPARE_TERMS, "f8"), found)
    assert found.get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_half_types(cupy, name, dtype, monkeypatch):
    """Arguments of cuBLAS, whose products a library in its place computes on the host."""
    copies = dtype == np.float16  # kernels of CuPy, which run on the host for this type only
    if copies or name not in COPIED:
        monkeypatch.setattr(cupy_without_driver, "run_kernels", copies)
        products_are_right(cupy, name, dtype, copies)


SHARED_GPU = {
    f"{dtype} {op}, {ranks} ranks, {width} per access": gpu_kernels.reduction_source(kind, ranks, width)
    for dtype, op in (
        ("f4", "SUM"),
        ("f2", "SUM"),
        ("bfloat16", "SUM"),
        ("f8", "MAX"),
        ("i4", "MIN"),
        ("i1", "PROD"),
        ("?", "LXOR"),
    )
    for kind in [gpu_kernels.reduction_type(op, np.dtype(dtype))]
    for ranks in (2, 4, gpu_kernels.MOST_RANKS)
    for width in (1, gpu_kernels.widest(kind))
} | {"copies": gpu_kernels.COPY}
"""Sources of the kernels for ranks that share a GPU."""


@pytest.mark.parametrize("name", SHARED_GPU)
def test_kernels_of_a_shared_gpu(cupy, kernel_report, name):
    found = [registers_and_spills(SHARED_GPU[name], gpu_kernels.OPTIONS, sm) for sm in ARCHITECTURES]
    kernel_report[f"shared GPU: {name}", SHARED_GPU[name]] = found
    assert all(used * gpu_kernels.THREADS <= 65536 and spilled == 0 for used, spilled in found), found


def test_kernels_between_gpus(cupy, kernel_report):
    found = [registers_and_spills(peer_kernels.SOURCE, gpu_kernels.OPTIONS, sm, kernels=2) for sm in ARCHITECTURES]
    kernel_report["between GPUs: put_message, take_message", peer_kernels.SOURCE] = found
    assert all(spilled == 0 for _, spilled in found), found


def test_launches_of_a_shared_gpu(cupy):
    """CuPy takes the tables of addresses as arguments, and launches what is built."""
    x = cupy.zeros(1003, "f4")
    kernels, kind = gpu_kernels.GpuKernels(cupy, 0), gpu_kernels.reduction_type("SUM", x.dtype)
    at = x.data.ptr
    outputs = [gpu_kernels.Reduced(at, 0, 1003), gpu_kernels.NOTHING]
    launches = kernels.reduction(kind, [at, at], 1003, outputs) + kernels.copies([gpu_kernels.Copied(at, at + 16, 8)])
    between, pieces = peer_kernels.PeerKernels(cupy, 0), [Iovec(at, 100)]
    launches += [between.put(pieces, at + 1024, 1 << 16), between.take(pieces, at + 1024, 1 << 16, at + 2048)]
    cupy_without_driver.LAUNCHED.clear()
    for launch in launches:
        launch.put(0)
    expected = ["reduce_vectors"] * 2 + ["copy_pieces", "put_message", "take_message"]
    assert [name for name, _ in cupy_without_driver.LAUNCHED] == expected

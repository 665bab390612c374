"""Kernels of a GPU run on the host by the stand-in for CuPy, and compared with the reference."""

import sys

import numpy as np
import pytest
from support import device_kernel_cases as cases

from parallel.nn import kernels
from parallel.nn.attention import CausalAttention
from parallel.nn.kernels import causal_attention
from parallel.nn.operator import ArraySpec, PassMode, nbytes_of


@pytest.fixture
def cupy(gpu):
    return sys.modules["cupy"]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", cases.ROWS)
def test_kernels_of_matrices(cupy, name, dtype):
    for shape in cases.SHAPES:
        cases.ROWS[name](cupy, name, dtype, shape)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", cases.HEADS)
def test_attention(cupy, dtype, shape):
    cases.heads_move(cupy, dtype, shape)
    cases.softmax_of_blocks(cupy, dtype, shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("length", [3, 300])
def test_blocks_of_queries(cupy, dtype, length):
    """Longer than those of the host, with the host's results, and the outline's bytes; of one block without copies."""
    operator, x, dy = CausalAttention(2), *(cases.matrix((2, length, width), dtype, width) for width in (12, 4))
    y, saved = operator.forward(x, PassMode())
    found, kept = operator.forward(cupy.asarray(x), PassMode())
    pairs = [(found, y), (operator.backward(cupy.asarray(dy), kept, None), operator.backward(dy, saved, None))]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.get(), theirs, rtol=0, atol=64 * np.finfo(dtype).eps * np.abs(theirs).max())
    with causal_attention.outlines_on("cuda"):
        assert nbytes_of(operator.outline(ArraySpec(x.shape, x.dtype)).saved) == nbytes_of(kept)
    assert len(kept[1]) == -(-length // 256)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_numbers_that_are_none(cupy, dtype):
    cases.rows_without_numbers(cupy, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_arrays_with_gaps(gpu, cupy, dtype):
    cases.gaps_are_taken_by_the_reference(cupy, dtype)
    assert gpu.launched == []


@pytest.mark.parametrize(("call", "launched"), [
    (lambda x, b: kernels.affine(x, x.T.copy(), b[:4]), ["biased_same"]),
    (lambda x, b: kernels.layer_norm(x, b, b, 1e-5), ["layer_norm"]),
    (lambda x, b: kernels.biased_gelu(x, b), ["biased_gelu"]),
    (lambda x, b: kernels.sum_rows(x), ["column_sums"]),
])  # fmt: skip
def test_one_kernel_each(gpu, cupy, call, launched):
    """Besides products, without copies."""
    call(cupy.asarray(np.ones((4, 8), np.float32)), cupy.asarray(np.ones(8, np.float32)))
    assert gpu.launched == launched


def test_threads_that_wait_in_vain_are_found(cupy):
    code = 'extern "C" __global__ void uneven(float* x) { if (threadIdx.x) __syncthreads(); x[0] = 1; }'
    x = cupy.zeros(1, np.float32)
    cupy.RawKernel(code, "uneven")((1,), (32,), (x,))
    with pytest.raises(RuntimeError, match="in vain"):
        x.get()

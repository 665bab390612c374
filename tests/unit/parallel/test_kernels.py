"""The arithmetic by itself: digits, storage, random numbers, and what is written where."""

import math

import ml_dtypes
import numpy as np
import pytest

from parallel.nn.kernels import reference_kernels
from parallel.nn.kernels.reference_elementwise import keep, key_of, philox
from parallel.nn.kernels.special import erf
from parallel.nn.kernels.storage import narrow, widen

POINTS = np.concatenate([np.linspace(-7, 7, 20001), [0.0, -0.0, 1e-30, 0.46875, 0.927734375, 4, math.inf, -math.inf]])


@pytest.mark.parametrize("dtype, bound", [(np.float64, 5e-16), (np.float32, 1e-7)])
def test_erf(dtype, bound):
    """Against the C library's."""
    x = POINTS.astype(dtype)
    y = erf(x)
    assert y.dtype == dtype and np.abs(y - np.vectorize(math.erf)(x.astype(np.float64))).max() < bound
    assert np.isnan(erf(np.array([math.nan], dtype)))[0]
    assert np.signbit(erf(np.array([-0.0], dtype)))[0]


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter, key, words):
    """The known answers that come with Random123, for philox4x32 and ten rounds."""
    found = philox(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in found) == words


def test_keep_at_the_ends():
    samples = np.arange(3)
    assert keep(samples, 1000, 0.0, key_of(0, 0, "")).all()
    assert keep(samples, 100_000, 1 - 2**-31, key_of(0, 0, "")).sum() < 5
    assert keep(samples[:0], 9, 0.5, key_of(0, 0, "")).shape == (0, 9)
    assert keep(samples, 0, 0.5, key_of(0, 0, "")).shape == (3, 0)


def test_bfloat16_rounds_to_nearest_even():
    """Every upper half with the lower halves that matter, all infinities and NaN among them, as ml_dtypes has it."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    x = (upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    ours = narrow(x, np.dtype(ml_dtypes.bfloat16))
    with np.errstate(invalid="ignore"):
        theirs = x.astype(ml_dtypes.bfloat16)
    nan = np.isnan(x)
    assert np.isnan(ours[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(ours[~nan].view(np.uint16), theirs[~nan].view(np.uint16))


def test_float64_is_rounded_once():
    """Halves between two neighbours go to the even one; a little more goes to the upper, a little less to the lower."""
    bits = np.array([0, 1, 2, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E], np.uint16)
    low, high = (b.view(ml_dtypes.bfloat16).astype(np.float64) for b in (bits, bits + np.uint16(1)))
    half, little = (low + high) / 2, (high - low) * 2.0**-40
    for sign in (1, -1):
        for x, expected in ((half - little, bits), (half, bits + bits % 2), (half + little, bits + 1)):
            found = narrow(sign * x, np.dtype(ml_dtypes.bfloat16))
            np.testing.assert_array_equal(abs(found).view(np.uint16), expected)
            np.testing.assert_array_equal(np.signbit(found), sign < 0)
    far = narrow(np.array([1e300, -np.inf, np.nan, 1e-300, -0.0]), np.dtype(ml_dtypes.bfloat16))
    assert str(far.tolist()) == "[inf, -inf, nan, 0.0, -0.0]"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_widen_and_back(dtype):
    """Nothing is lost, strides do not matter, and wide arrays are handed on as they are."""
    x = np.arange(60).reshape(5, 12).astype(dtype)[::2, ::3].T
    wider = widen(x)
    assert wider.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert (wider is x) == (np.dtype(dtype).itemsize > 2)
    back = narrow(wider, x.dtype)
    assert back.dtype == dtype and np.array_equal(back, x)
    out = np.zeros_like(x)
    assert narrow(wider, x.dtype, out) is out and np.array_equal(out, x)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_matmul(dtype):
    """Small integers, so exact in every storage: stacks of matrices, views, an `out`, nothing to add up."""
    a, b = np.arange(24).reshape(2, 3, 4) % 5 - 2, np.arange(40).reshape(2, 4, 5) % 7 - 3
    left, right = a.astype(dtype), b.astype(dtype)
    for one, other in ((left, right), (left.copy(order="F"), right.swapaxes(1, 2).copy().swapaxes(1, 2))):
        y = reference_kernels.matmul(one, other)
        assert y.dtype == dtype and np.array_equal(y, (a @ b).astype(dtype))
    for kind in (dtype, np.float64 if dtype == np.float64 else np.float32):
        out = np.full((2, 5, 3), 9, kind).swapaxes(1, 2)
        assert reference_kernels.matmul(left, right, out=out) is out and np.array_equal(out, (a @ b).astype(dtype))
    assert np.array_equal(reference_kernels.matmul(left[:, :, :0], right[:, :0]), np.zeros((2, 3, 5)))


def test_matmul_of_halves_rounds_once():
    """Products are summed in float32: 1 and 2048 times 2^-12 are 1.5, which a sum in float16 would never reach."""
    a = np.full((1, 2049), 2.0**-12, np.float16)
    a[0, 0] = 1
    assert reference_kernels.matmul(a, np.ones((2049, 1), np.float16))[0, 0] == 1.5


def test_float16_overflows_silently():
    """As with bfloat16: the loss scale looks for infinities, nobody else needs to hear of them."""
    assert narrow(np.array([1e6, -1e6], np.float32), np.dtype(np.float16)).tolist() == [np.inf, -np.inf]


ELEMENTWISE = [
    (reference_kernels.relu, 1),
    (reference_kernels.relu_backward, 2),
    (reference_kernels.gelu, 1),
    (reference_kernels.gelu_backward, 2),
    (reference_kernels.gelu_tanh, 1),
    (reference_kernels.gelu_tanh_backward, 2),
    (reference_kernels.silu, 1),
    (reference_kernels.silu_backward, 2),
]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("kernel, count", ELEMENTWISE, ids=lambda value: getattr(value, "__name__", ""))
def test_elementwise(kernel, count, dtype):
    """With an `out`, also one that is an argument; far from zero without a warning; no element at all."""
    arrays = np.array([[-1e4, -20, -1, -0.0, 0.5, 3, 20, 1e4], [1, 2, -3, 4, 5, 6, 7, 8]], dtype)[:count]
    expected = kernel(*arrays)
    assert expected.dtype == dtype and np.isfinite(expected.astype(np.float64)).all()
    out = np.empty_like(expected)
    assert kernel(*arrays, out=out) is out and np.array_equal(out, expected)
    first = arrays[0].copy()
    assert kernel(first, *arrays[1:], out=first) is first and np.array_equal(first, expected)
    assert kernel(*arrays[:, :0]).shape == (0,)


@pytest.mark.parametrize("kernel", [reference_kernels.gelu, reference_kernels.gelu_tanh, reference_kernels.silu])
def test_activations_of_the_largest_numbers(kernel):
    """They overflow no sooner than their results do."""
    x = np.array([3e38, 1e20, -1e20, -3e38, np.inf], np.float32)
    with np.errstate(over="ignore"):  # of the cube, which is the argument of an exponential
        np.testing.assert_array_equal(kernel(x), [x[0], x[1], 0, 0, np.inf])


@pytest.mark.parametrize("backward", [reference_kernels.gelu_tanh_backward, reference_kernels.silu_backward])
def test_slopes_far_out(backward):
    """Small ones keep their digits, on the way to 0; the largest numbers have the limits."""
    x = np.array([-3e38, -1e20, -13, -9, -6, -4, 4, 9, 1e20, 3e38], np.float32)
    one = np.ones_like(x)
    with np.errstate(all="raise", under="ignore"):
        found, expected = backward(one, x), backward(one.astype("f8"), x.astype("f8"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-38)
    assert found[0] == found[1] == 0 and found[-1] == found[-2] == 1


@pytest.mark.parametrize("kernel", [reference_kernels.gelu_tanh, reference_kernels.silu])
def test_logistic_tails_keep_their_digits(kernel):
    x = np.array([-20, -13, -9, -6, -4, -1], np.float32)
    np.testing.assert_allclose(kernel(x), kernel(x.astype("f8")), rtol=1e-4, atol=1e-38)


def test_causal_softmax():
    """A block of queries in the middle: rows sum to 1, the future is 0, equal scores share alike, in place."""
    scores = np.zeros((2, 3, 5))
    p = reference_kernels.causal_softmax(scores, 0.5, 2)
    assert p is scores
    expected = [[1 / 3] * 3 + [0, 0], [1 / 4] * 4 + [0], [1 / 5] * 5]
    np.testing.assert_allclose(p, [expected, expected], rtol=1e-15)
    large = reference_kernels.causal_softmax(np.array([[[1e30, 0.0], [-1e30, -1e30]]], np.float32), 1.0, 0)
    np.testing.assert_array_equal(large, [[[1, 0], [0.5, 0.5]]])


def test_cross_entropy_of_large_scores():
    """No overflow, and a row that does not count counts nothing."""
    scores = np.array([[1e4, 0, -1e4], [3e38, 0, 0]], np.float32)
    loss, log_sum = reference_kernels.softmax_cross_entropy(scores, np.array([1, -1]))
    assert loss == 1e4 and log_sum.dtype == np.float32
    d = reference_kernels.softmax_cross_entropy_backward(2.0, scores, np.array([1, -1]), log_sum)
    np.testing.assert_array_equal(d, [[2, -2, 0], [0, 0, 0]])


def test_no_samples():
    assert reference_kernels.softmax_cross_entropy(np.zeros((0, 4)), np.zeros(0, int))[0] == 0


@pytest.mark.parametrize("tokens", [[], [3], [3, 3, 3], [5, 0, 5, 2, 0, 5]])
def test_embedding_gradient(tokens):
    """As a loop over the rows has it, what is there before being overwritten."""
    tokens = np.array(tokens, np.int64)
    dy = np.arange(1.0, 1 + 2 * len(tokens)).reshape(-1, 2)
    expected = np.zeros((6, 2))
    for token, row in zip(tokens, dy):
        expected[token] += row
    out = np.full((6, 2), np.nan)
    assert reference_kernels.embedding_gradient(dy, tokens, out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("window, stride, padding", [((2, 2), 2, 0), ((3, 2), 1, 1), ((1, 1), 3, 0), ((4, 5), 2, 2)])
def test_im2col_and_its_adjoint(window, stride, padding):
    """Element by element as the definition says; and <im2col x, c> = <x, col2im c>."""
    x = np.arange(2.0 * 3 * 5 * 6).reshape(2, 3, 5, 6)
    columns = reference_kernels.im2col(x, window, stride, padding)
    down, across = reference_kernels.positions((5, 6), window, stride, padding)
    framed = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    seen = columns.reshape(3, *window, 2, down, across)
    for i in range(down):
        for j in range(across):
            here = framed[:, :, i * stride : i * stride + window[0], j * stride : j * stride + window[1]]
            np.testing.assert_array_equal(seen[..., i, j], np.moveaxis(here, 0, -1))
    c = np.arange(columns.size).reshape(columns.shape) % 11 - 5.0
    assert (columns * c).sum() == (x * reference_kernels.col2im(c, x.shape, window, stride, padding)).sum()

"""Kernels of the device with arrays of many shapes, compared with the reference in float64."""

import ml_dtypes
import numpy as np

from parallel.nn import kernels
from parallel.nn.kernels import causal_attention, device_kernels, reference_kernels

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
COMMON = [np.float32, ml_dtypes.bfloat16]
SHAPES = [(0, 5), (3, 1), (1, 7), (5, 8), (9, 24), (2, 1000), (300, 40)]
"""Of matrices: none, odd and whole packs, rows longer than a warp's packs, and columns of several chunks."""

HEADS = [(2, 3, 5, 4), (1, 2, 70, 8), (2, 1, 300, 16), (1, 1, 1, 1), (0, 2, 3, 4)]
"""Batch, heads, length, width: also of several blocks of queries."""


def matrix(shape, dtype, seed=0, scale=1.0):
    return (scale * np.random.default_rng((seed, *shape)).standard_normal(shape)).astype(dtype)


def close(found, expected, dtype, sums=1, factor=8):
    """Compare with a result in float64: one rounding to the dtype, and those of a formula and of so many terms."""
    found, expected = found.get().astype(np.float64), np.asarray(expected, np.float64)
    wide = np.finfo(np.float64 if np.dtype(dtype) == np.float64 else np.float32).eps
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=1)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(found, expected, rtol=eps, atol=wide * largest * (factor + np.sqrt(sums)) + 1e-7 * eps)


def wide_of(dtype):
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def elementwise(cupy, name, dtype, shape):
    """All elementwise kernels: results, and in place."""
    arrays = [matrix(shape, dtype, seed, 3) for seed in range(1 + (name.endswith("backward") or name == "add"))]
    others = [np.random.default_rng(1).random(shape) < 0.5, 1.25] if name == "masked" else []
    reference = [array.astype(np.float64) for array in arrays] + others
    expected = getattr(reference_kernels, name)(*reference)
    given = [cupy.asarray(array) for array in arrays]
    others = [cupy.asarray(other) if isinstance(other, np.ndarray) else other for other in others]
    found = getattr(kernels, name)(*given, *others)
    assert found.dtype == dtype and found.shape == shape
    close(found, expected, dtype, factor=64)
    if name != "add":
        assert getattr(kernels, name)(*given, *others, out=given[0]) is given[0]
        close(given[0], expected, dtype, factor=64)


def biased(cupy, name, dtype, shape):
    z, bias = matrix(shape, dtype), matrix(shape[1:], dtype, 1)
    total = (z.astype(np.float64) + bias.astype(np.float64)).astype(dtype)
    expected = getattr(reference_kernels, name.removeprefix("biased_"))(total.astype(np.float64))
    given = cupy.asarray(z)
    found = getattr(kernels, name)(given, cupy.asarray(bias))
    close(found, expected, dtype)
    np.testing.assert_array_equal(given.get(), total if name != "biased_relu" else found.get())


def affine(cupy, name, dtype, shape):
    x, weight, bias = matrix(shape, dtype), matrix((shape[1], 24), dtype, 1), matrix((24,), dtype, 2)
    product, found = (
        x.astype(np.float64) @ weight.astype(np.float64),
        kernels.affine(*map(cupy.asarray, (x, weight, bias))),
    )
    eps = float(ml_dtypes.finfo(dtype).eps)  # of the product, which is rounded before the bias is added
    expected = product + bias.astype(np.float64)
    atol = eps * np.abs(product).max(initial=1) * (2 + (np.dtype(dtype).itemsize > 2) * np.sqrt(shape[1]))
    np.testing.assert_allclose(found.get().astype(np.float64), expected, rtol=eps, atol=atol)


def sum_rows(cupy, name, dtype, shape):
    x = matrix(shape, dtype)
    expected = x.astype(np.float64).sum(axis=0)
    for out in (
        None,
        cupy.full(shape[1:], np.nan, wide_of(dtype)),
        cupy.full((*shape[1:], 2), 7, wide_of(dtype))[:, 0],
    ):
        found = kernels.sum_rows(cupy.asarray(x), out=out)
        assert found.dtype == wide_of(dtype) and (out is None or found is out)
        close(found, expected, wide_of(dtype), len(x))
    again = kernels.sum_rows(cupy.asarray(x))
    np.testing.assert_array_equal(again.get(), found.get())


def norms(cupy, name, dtype, shape):
    """LayerNorm and RMSNorm, and their gradients."""
    x, dy, gain, bias = (
        matrix(shape, dtype, 0, 2),
        matrix(shape, dtype, 1),
        *(matrix(shape[1:], dtype, n) for n in (2, 3)),
    )
    for with_bias in (True, False):
        wide = [array.astype(np.float64) for array in (x, gain, bias)]
        expected = reference_kernels.layer_norm(*wide[:2], wide[2] if with_bias else None, 1e-5)
        given = [cupy.asarray(array) for array in (x, gain, bias)]
        found = kernels.layer_norm(*given[:2], given[2] if with_bias else None, 1e-5)
        assert (found[1] is None) == (not with_bias)
        for ours, theirs, kind in zip(found, expected, (dtype, wide_of(dtype), wide_of(dtype))):
            if theirs is not None:
                assert ours.dtype == kind
                close(ours, theirs, kind, x.shape[1])
        statistics = [None if one is None else one.get().astype(np.float64) for one in found[1:]]
        expected = reference_kernels.layer_norm_backward(dy.astype(np.float64), *wide[:2], *statistics)
        found = kernels.layer_norm_backward(cupy.asarray(dy), *given[:2], *found[1:])
        for ours, theirs, kind in zip(found, expected, (dtype, wide_of(dtype), wide_of(dtype))):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert ours.dtype == kind
                close(ours, theirs, kind, sum(x.shape))


def cross_entropy(cupy, name, dtype, shape):
    """Cross entropy and its gradient."""
    found, loss = gradient_of_cross_entropy(cupy, dtype, shape)
    assert abs(found - loss) <= 64 * np.finfo(wide_of(dtype)).eps * max(1, abs(loss))


def gradient_of_cross_entropy(cupy, dtype, shape):
    """Compare all but the sums, which are returned; targets may be below 0, and scores apart by more than exponents."""
    scores = matrix(shape, dtype, 0, 60)
    targets = np.arange(shape[0]) % (shape[1] + 1) - 1
    loss, log_sum = reference_kernels.softmax_cross_entropy(scores.astype(np.float64), targets)
    given, places = cupy.asarray(scores), cupy.asarray(targets)
    found, ours = kernels.softmax_cross_entropy(given, places)
    eps = np.finfo(wide_of(dtype)).eps
    close(ours, log_sum, wide_of(dtype), shape[1])
    expected = reference_kernels.softmax_cross_entropy_backward(0.25, scores.astype(np.float64), targets, log_sum)
    gradient = kernels.softmax_cross_entropy_backward(0.25, given, places, ours)
    assert gradient.dtype == dtype
    of_sum = 0.25 * eps * (4 + np.abs(log_sum).max(initial=0))  # exponents have the rounding error of the sum
    rtol = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(gradient.get().astype(np.float64), expected, rtol=rtol, atol=of_sum + 1e-7 * rtol)
    return found, loss


ROWS = {
    **dict.fromkeys(device_kernels.ELEMENTWISE, elementwise),
    **{f"biased_{name}": biased for name in device_kernels.ACTIVATIONS},
    "affine": affine,
    "sum_rows": sum_rows,
    "layer_norm": norms,
    "softmax_cross_entropy": cross_entropy,
}
"""Comparisons (cupy, name, dtype, shape) of the kernels of matrices."""


def heads_move(cupy, dtype, shape):
    """Heads are split and merged as on the host, also from wide ones."""
    batch, heads, length, width = shape
    x = matrix((batch, length, 3 * heads * width), dtype)
    expected, found = (causal_attention.split_heads(one, 3, heads) for one in (x, cupy.asarray(x)))
    np.testing.assert_array_equal(found.get(), expected)
    np.testing.assert_array_equal(causal_attention.merge_heads(found, np.dtype(dtype)).get(), x)
    wide = found.astype(wide_of(dtype))
    np.testing.assert_array_equal(causal_attention.merge_heads(wide, np.dtype(dtype)).get(), x)


def softmax_of_blocks(cupy, dtype, shape):
    """Probabilities of blocks of queries and their gradients; scores that differ by more than exponentials bear."""
    batch, heads, length, _ = shape
    for first in {0, length // 2}:
        block = (batch, heads, length - first, length)
        scores, dp = matrix(block, wide_of(dtype), 0, 300), matrix(block, wide_of(dtype), 1)
        exact = reference_kernels.causal_softmax(scores.astype(np.float64), 0.5, first)
        p = causal_attention.causal_probabilities(cupy.asarray(scores), 0.5, first, np.dtype(dtype))
        assert p.dtype == dtype
        np.testing.assert_allclose(
            p.get().astype(np.float64), exact, rtol=2 * float(ml_dtypes.finfo(dtype).eps), atol=1e-4
        )
        rounded = p.get().astype(np.float64)
        expected = reference_kernels.softmax_backward(dp.astype(np.float64), rounded, 0.5)
        found = causal_attention.causal_gradient(cupy.asarray(dp), p, 0.5, first)
        assert found.dtype == dtype
        close(found, expected, dtype, length)
        hidden = np.arange(length)[None] > first + np.arange(length - first)[:, None]
        assert not p.get()[..., hidden].astype(bool).any() and not found.get()[..., hidden].astype(bool).any()


def rows_without_numbers(cupy, dtype):
    """A row of -inf, or with a NaN, gives NaN, and the others are as they were; so are those of the largest numbers."""
    largest = float(ml_dtypes.finfo(wide_of(dtype)).max) / 4
    scores = np.full((1, 1, 4, 8), -largest, wide_of(dtype))
    scores[..., 1, :] = -np.inf
    scores[..., 2, 1] = np.nan
    scores[..., 3, :4] = largest
    p = causal_attention.causal_probabilities(cupy.asarray(scores), 1.0, 4, np.dtype(dtype)).get()[0, 0].astype(float)
    assert np.isnan(p[1:3, :5]).all() and not np.isnan(p[[0, 3]]).any()
    np.testing.assert_array_equal(p[3], [0.25] * 4 + [0] * 4)
    x = matrix((3, 8), dtype)
    x[1] = np.inf
    y, _, _ = kernels.layer_norm(
        cupy.asarray(x), cupy.asarray(np.ones(8, dtype)), cupy.asarray(np.zeros(8, dtype)), 1e-5
    )
    assert np.isnan(y.get()[1].astype(float)).all() and np.isfinite(y.get()[[0, 2]].astype(float)).all()


def gaps_are_taken_by_the_reference(cupy, dtype):
    """Arrays with gaps, and mixed types, have the reference's results."""
    x, gain = matrix((6, 14), dtype), matrix((7,), dtype, 1)
    given, half = cupy.asarray(x)[:, ::2], x[:, ::2]
    kind = wide_of(dtype)
    for found, expected in (
        (kernels.gelu(given), kernels.gelu(half)),
        (kernels.add(given, given), half + half),
        (kernels.sum_rows(given), half.astype(kind).sum(axis=0)),
        (kernels.layer_norm(given, cupy.asarray(gain), None, 1e-5)[0], kernels.layer_norm(half, gain, None, 1e-5)[0]),
    ):
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(found.get().astype(float), expected.astype(float), rtol=4 * eps, atol=4 * eps)

"""Kernels in C at the edges: denormal numbers, NaN, infinities, no rows, long rows, and arguments of other shapes."""

import numpy as np
import pytest

pytest.importorskip("parallel.nn.kernels._operators")

from parallel.nn import kernels
from parallel.nn.kernels import _operators as operators
from parallel.nn.kernels import compiled_kernels, reference_kernels
from quant.kernels.dispatch import Unsuited

F = np.float32
C = compiled_kernels.KERNELS
TINY = 2.0**-149  # smallest denormal number
SMALL = np.concatenate([TINY * np.array([0, 1, 3, 1000, 1 << 22]), [1.2e-38, 1e-30, 1e-20]]).astype(F)
SMALL = np.concatenate([SMALL, -SMALL])
UNARY = ("gelu", "gelu_tanh", "silu")
BINARY = ("relu_backward", "gelu_backward", "gelu_tanh_backward", "silu_backward")


def numbers(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(F)


def exact(name, *arguments, **options):
    """Result of the reference in float64; arrays of integers and flags as they are."""
    wide = [one.astype(np.float64) if getattr(one, "dtype", None) == F else one for one in arguments]
    with np.errstate(all="ignore"):
        return getattr(reference_kernels, name)(*wide, **options)


@pytest.mark.parametrize("name", UNARY)
def test_denormal_numbers_keep_their_digits(name):
    """Near 0 the functions are x / 2: of a denormal number, half of its digits may be lost, but no more."""
    found = C[name](SMALL).astype(np.float64)
    np.testing.assert_allclose(found, exact(name, SMALL), rtol=1e-6, atol=0.5 * TINY)
    assert (np.signbit(found) == np.signbit(SMALL)).all()


@pytest.mark.parametrize("name", BINARY)
def test_denormal_gradients_keep_their_digits(name):
    dy, x = map(np.ravel, np.meshgrid(SMALL, numbers(50, scale=3)))
    expected = exact(name, dy, x)
    np.testing.assert_allclose(C[name](dy, x), expected, rtol=2e-5, atol=1.5 * TINY)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 64, 65, 1000])
def test_nan_is_neither_spread_nor_lost(name, size):
    """In whole vectors and in the rest of an array."""
    for at in {0, size // 2, size - 1}:
        x = numbers(size)
        x[at] = np.nan
        for found in (C[name](x), C[f"biased_{name}"](x[None].copy(), np.zeros(size, F))[0]):
            assert np.isnan(found).nonzero()[0].tolist() == [at]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [1, 16, 64, 67, 200])
def test_sums_contain_every_element(width, bad):
    """A number that is not finite at any place of a row reaches its sum, and no other row."""
    for at in {0, width // 2, width - 1}:
        x, ones = numbers(3, width), np.ones((3, width), F)
        x[1, at] = bad
        places, rows = np.arange(3), np.empty((3, width), F)
        sums = {
            "row_products": C["row_products"](x, places, ones),
            "weighted_rows": C["weighted_rows"](x, places, ones[:, :1].copy(), ones, rows),
            "layer_norm": C["layer_norm"](x, ones[0], ones[0], 1e-5)[1],
        }
        for name, found in sums.items():
            assert np.isfinite(found).tolist() == [True, False, True], name
        rstd = C["layer_norm"](x, ones[0], None, 1e-5)[2]
        assert np.isfinite(rstd[[0, 2]]).all() and (np.isnan(rstd[1]) or rstd[1] == 0)
        assert np.isnan(C["softmax_backward"](x.copy(), ones, 1.0)[1]).any()
        column = C["sum_rows"](x)
        assert np.isfinite(column).tolist() == [place != at for place in range(width)]


@pytest.mark.parametrize("width", [1, 5, 16, 100])
@pytest.mark.parametrize("bad", [np.nan, np.copysign(np.nan, F(-1))])
def test_softmax_of_a_row_with_nan_is_nan(width, bad):
    """NaN of both signs, of which integers have the largest and the smallest bits."""
    for at in {0, width // 2, width - 1}:
        scores = numbers(3, width)
        scores[1, at] = bad
        none, whole = np.zeros(3, np.int64), np.full(3, width)
        masked = scores.copy()
        log_sum = C["visible_softmax"](masked, 1.0, none, whole)
        _, other = C["softmax_cross_entropy"](scores, none)
        for found in (C["softmax"](scores), masked, C["causal_softmax"](scores[:, None].copy(), 1.0, width)[:, 0]):
            assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()
        for sums in (log_sum, other):
            assert np.isnan(sums).tolist() == [False, True, False]


LONG = 1 << 20


@pytest.mark.parametrize("scale", [0.1, 8.0])
def test_long_rows_of_probabilities(scale):
    """Sums of a million exponentials, of which those of NumPy have the error of a few units in the last place."""
    scores, targets = numbers(2, LONG, scale=scale), np.array([3, LONG - 1])
    loss, log_sum = C["softmax_cross_entropy"](scores, targets)
    expected, of_exact = exact("softmax_cross_entropy", scores, targets)
    np.testing.assert_allclose(log_sum, of_exact, rtol=2e-6)
    assert loss == pytest.approx(expected, rel=2e-6)
    p = exact("softmax", scores)
    np.testing.assert_allclose(C["softmax"](scores), p, rtol=2e-5)
    np.testing.assert_allclose(C["causal_softmax"](scores[:, None].copy(), 1.0, LONG)[:, 0], p, rtol=2e-5)


def test_long_rows_of_norms_and_sums():
    x, dy, gain, bias = (numbers(2, LONG, seed=seed) for seed in range(4))
    x += 3
    y, mean, rstd = C["layer_norm"](x, gain[0], bias[0], 1e-5)
    found = exact("layer_norm", x, gain[0], bias[0], 1e-5)
    for one, expected in zip((y, mean, rstd), found):
        np.testing.assert_allclose(one, expected, rtol=5e-6, atol=2e-5)
    arguments = dy, x, gain[0], mean, rstd
    for one, expected in zip(C["layer_norm_backward"](*arguments), exact("layer_norm_backward", *arguments)):
        np.testing.assert_allclose(one, expected, rtol=5e-6, atol=2e-5)
    tall = x.reshape(-1, 2)
    np.testing.assert_allclose(C["sum_rows"](tall), tall.astype(np.float64).sum(axis=0), rtol=1e-5)


def test_no_rows_and_no_columns():
    empty, nothing = np.empty((0, 7), F), np.empty(0, np.int64)
    gain, ones = np.ones(7, F), np.ones((3, 7), F)
    assert kernels.layer_norm(empty, gain, gain, 1e-5)[0].shape == (0, 7)
    _, dgain, dbias = kernels.layer_norm_backward(empty, empty, gain, empty[:, 0].copy(), empty[:, 0].copy())
    assert not dgain.any() and not dbias.any()
    assert not kernels.sum_rows(empty).any() and kernels.sum_rows(empty.T.copy()).shape == (0,)
    assert not kernels.embedding_gradient(empty, nothing, ones.copy()).any()
    kernels.add_rows(ones, nothing, empty)
    assert (ones == 1).all() and kernels.row_products(ones, nothing, empty).shape == (0,)
    loss, log_sum = kernels.softmax_cross_entropy(empty, nothing)
    assert loss == 0 and log_sum.shape == (0,)
    for name in UNARY:
        assert getattr(kernels, name)(empty).shape == getattr(kernels, f"biased_{name}")(empty, gain).shape == (0, 7)


def test_ranges_of_keys_may_reach_beyond_the_row():
    low, high = np.array([-5, 2, 9, 0]), np.array([3, 99, 12, 0])
    scores, guard = numbers(3, 4, 6), 7.0
    whole = np.full((5, 4, 6), guard, F)
    found, expected = whole[1:4], scores.copy()
    for name, more in (("visible_softmax", ()), ("visible_probabilities", (np.zeros((3, 4), F),))):
        found[...], expected[...] = scores, scores
        C[name](found, 0.5, low, high, *more)
        getattr(reference_kernels, name)(expected, 0.5, low, high, *more)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)
        assert (whole[[0, 4]] == guard).all()


X, ROW, PLACES = numbers(4, 6), numbers(6), np.arange(4)
SCORES, RANGE = numbers(2, 4, 6), np.zeros(4, np.int64)
OTHER = {
    "gelu": [(X, {"out": np.empty((6, 4), F)})],
    "silu_backward": [(X, ROW)],
    "biased_gelu": [(X, ROW[:1]), (X, ROW[:5].copy())],
    "masked": [(X, np.ones((4, 5), bool), 2.0), (X, np.ones((4, 6), np.uint8), 2.0)],
    "keep": [(PLACES.astype(np.uint64), 4, 0.5, (1, 2)), (PLACES.reshape(2, 2), 4, 0.5, (1, 2))],
    "sum_rows": [(X, np.empty(5, F)), (np.array(3, F),)],
    "layer_norm": [(X, ROW[:1], None, 1e-5), (X, ROW, ROW[:1], 1e-5), (SCORES, ROW, ROW, 1e-5)],
    "layer_norm_backward": [
        (X, X[:3], ROW, X[:, 0].copy(), X[:, 0].copy()),
        (X, X, ROW[:1], X[:, 0].copy(), X[:, 0].copy()),
        (X, X, ROW, X[:3, 0].copy(), X[:, 0].copy()),
        (X, X, ROW, None, X[:3, 0].copy()),
    ],
    "causal_softmax": [(SCORES, 1.0, -3)],
    "softmax_backward": [(SCORES, SCORES[:1], 1.0)],
    "visible_softmax": [(SCORES, 1.0, RANGE[:3], RANGE[:3]), (SCORES, 1.0, RANGE, RANGE[:2])],
    "visible_probabilities": [(SCORES, 1.0, RANGE, RANGE, np.zeros((1, 4), F))],
    "attention_gradient": [(SCORES, SCORES[:1], 1.0, np.zeros((2, 4), F)), (SCORES, SCORES, 1.0, np.zeros((2, 1), F))],
    "merge_attention": [(SCORES, SCORES[..., 0].copy(), SCORES[:1], SCORES[..., 0].copy())],
    "softmax": [(np.empty((0, 3), F),)],
    "top_k": [(numbers(2, 65), 3)],
    "softmax_cross_entropy": [(X, PLACES[:3]), (X, np.full(4, 6))],
    "softmax_cross_entropy_backward": [(1.0, X, PLACES, X[:3, 0].copy()), (1.0, X, np.full(4, 6), X[:, 0].copy())],
    "embedding_gradient": [(X, PLACES[:3], X), (X, PLACES, X[:3]), (X, -PLACES, X), (X, PLACES, X[:, :5].copy())],
    "add_rows": [(X, PLACES + 1, X), (X, PLACES - 1, X), (X, PLACES, X[:3]), (X, PLACES, X, ROW[:4, None][:3])],
    "weighted_rows": [(X, PLACES + 1, X[:, :1].copy(), X, X), (X, PLACES, X[:, :1].copy(), X, X[:3])],
    "row_products": [(X, PLACES + 1, X), (X, PLACES, X[:3])],
}
"""Arguments that C does not take: other shapes, and numbers of rows that are not there."""


@pytest.mark.parametrize(("name", "number"), [(name, at) for name, cases in OTHER.items() for at in range(len(cases))])
def test_other_arguments_never_reach_c(name, number):
    """They are refused before anything is read or written, and left to the reference."""
    given = OTHER[name][number]
    *given, options = (*given, {}) if not isinstance(given[-1], dict) else given
    before = [one.copy() if isinstance(one, np.ndarray) else one for one in given]
    with pytest.raises(Unsuited):
        C[name](*given, **options)
    for one, other in zip(given, before):
        np.testing.assert_array_equal(one, other)


def test_negative_rows_count_from_the_end():
    """As NumPy counts them: the reference computes these."""
    y, rows = np.zeros((3, 2), F), np.ones((1, 2), F)
    kernels.add_rows(y, np.array([-1]), rows)
    assert y.tolist() == [[0, 0], [0, 0], [1, 1]]
    with pytest.raises(IndexError):
        kernels.add_rows(y, np.array([3]), rows)


# ------------------------------------------------------------------------------------------ places in memory


def arguments_of(rows, width):
    """Arguments of the C functions for matrices of such a shape. Lists are shapes of arrays that are only written."""
    x, dy, z = (numbers(rows, width, seed=seed) for seed in range(3))
    gain, column = numbers(width, seed=3), numbers(rows, seed=4)
    order, target = np.arange(rows)[::-1].copy(), np.arange(rows) % width
    low, high = np.zeros(rows, np.int64), np.full(rows, width)
    shape = [rows, width]
    keep = x > 0
    return {
        **dict.fromkeys(UNARY, (x, shape)),
        **dict.fromkeys(BINARY, (dy, x, shape)),
        **{f"biased_{name}": (x, gain, shape) for name in ("relu", *UNARY)},
        "masked": (x, keep, 2.0, shape),
        "keep": (order, 1 << 31, 1, 2, 0, (np.bool_, rows, -(-width // 4) * 4)),
        "sum_rows": (x, [width]),
        "layer_norm": (x, gain, gain, 1e-5, shape, [rows], [rows]),
        "layer_norm_backward": (dy, x, gain, column, abs(column), shape, [width], [width], [2, width]),
        "causal_softmax": (x, rows, 0.5, 0),
        "softmax_backward": (dy, x, 0.5),
        "visible_softmax": (x, 0.5, low, high, [rows]),
        "visible_probabilities": (x, 0.5, low, high, column),
        "attention_gradient": (dy, x, 0.5, column),
        "merge_attention": (x, column, z, column + 1),
        "softmax": (x, shape),
        "softmax_cross_entropy": (x, target, [rows]),
        "softmax_cross_entropy_backward": (0.5, x, target, column, shape),
        "embedding_gradient": (x, order, shape),
        "add_rows": (dy, order, x, column),
        "weighted_rows": (dy, order, column, x, shape, [rows]),
        "row_products": (dy, order, x, [rows]),
        "top_k": (x, min(3, width), (np.bool_, rows, width)),
    }


def placed(arguments, order, gap):
    """Copies of the arguments whose arrays lie in one block of memory, in an order, with `gap` bytes between them."""
    given = [
        np.zeros(one, F) if isinstance(one, list) else np.zeros(one[1:], one[0]) if isinstance(one, tuple) else one
        for one in arguments
    ]
    arrays = [at for at, one in enumerate(given) if isinstance(one, np.ndarray)]
    block = np.zeros(sum(given[at].nbytes + gap + 16 for at in arrays) + 64, np.uint8)
    start = -block.ctypes.data % 64
    for at in order(arrays):
        one = given[at]
        start += -start % one.itemsize
        given[at] = block[start : start + one.nbytes].view(one.dtype).reshape(one.shape)
        given[at][...] = one
        start += one.nbytes + gap
    return given


@pytest.mark.parametrize("name", arguments_of(1, 8))
def test_bits_do_not_depend_on_places_in_memory(name):
    """Compilers make loops twice, for arrays that are near each other too: both have to round alike."""
    orders = [
        lambda places, turn=turn, step=step: (places[turn:] + places[:turn])[::step]
        for turn in range(4)
        for step in (1, -1)
    ]
    for rows, width in [(1, 2), (1, 5), (1, 8), (1, 13), (1, 16), (1, 24), (1, 64), (1, 90), (3, 8), (3, 21)]:
        found = set()
        for order in orders:
            for gap in (0, 4, 16, 32, 48, 64, 4096):
                given = placed(arguments_of(rows, width)[name], order, gap)
                getattr(operators, name)(*given)
                found.add(b"".join(one.tobytes() for one in given if isinstance(one, np.ndarray)))
        assert len(found) == 1, (rows, width)


def test_every_operator_is_placed():
    assert set(arguments_of(1, 8)) == {name for name in vars(operators) if not name.startswith("_")}

"""Levels by k-means: the exact ones are the best there are, Lloyd's are what scikit-learn's iterations come to."""

import itertools
import time

import numpy as np
import pytest

from quant import INT4_G32, NF4, PerChannel, PerGroup, QuantizedArray, QuantSpec, kernels, quantize
from quant.scaling import codebook
from quant.scaling.codebook import kmeans_exact, kmeans_lloyd

RNG = np.random.default_rng(2)


def cost(values, levels, weights=1.0):
    return float((weights * ((values[:, None] - levels) ** 2).min(axis=1)).sum())


def best_by_trying(values, k, weights):
    """Every way to cut the sorted values in k runs."""
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    least = np.inf
    for cuts in itertools.combinations(range(1, len(values)), k - 1):
        edges = [0, *cuts, len(values)]
        runs = [slice(a, b) for a, b in itertools.pairwise(edges)]
        means = [np.average(values[run], weights=weights[run]) for run in runs]
        least = min(least, sum((weights[run] * (values[run] - mean) ** 2).sum() for run, mean in zip(runs, means)))
    return least


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [5, 8, 11])
def test_the_best_there_are(n, k):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        values, weights = np.round(rng.standard_normal(n), seed % 3), rng.integers(1, 4, n)
        levels = kmeans_exact(np.repeat(values, weights), k)
        assert len(levels) == k and (np.diff(levels) >= 0).all()
        if len(np.unique(values)) >= k:
            assert cost(values, levels, weights) == pytest.approx(best_by_trying(values, k, weights), abs=1e-12)


@pytest.mark.parametrize("k", [2, 4, 16])
def test_scikit_learn(k):
    """Exact is no worse than the best of its runs; Lloyd's from its start ends where it does."""
    cluster = pytest.importorskip("sklearn.cluster")
    values = RNG.standard_normal(600)
    theirs = cluster.KMeans(k, n_init=10, random_state=0).fit(values[:, None])
    exact = cost(values, kmeans_exact(values, k))
    assert exact <= theirs.inertia_ * (1 + 1e-9)
    assert exact >= theirs.inertia_ * 0.9
    start = np.sort(values)[(2 * np.arange(k) + 1) * 600 // (2 * k)]
    same = cluster.KMeans(k, init=start[:, None], n_init=1, max_iter=300, tol=0).fit(values[:, None])
    np.testing.assert_allclose(kmeans_lloyd(values, k, 300), np.sort(same.cluster_centers_[:, 0]), atol=1e-9)


def test_few_values():
    np.testing.assert_array_equal(kmeans_exact(np.array([3.0, 1, 3]), 4), [1, 3, 3, 3])
    np.testing.assert_array_equal(kmeans_exact(np.full(9, 2.5), 2), [2.5, 2.5])
    np.testing.assert_array_equal(kmeans_lloyd(np.full(9, 2.5), 2), [2.5, 2.5])


def test_far_from_zero():
    """Sums of squares are taken about the mean, or the digits would be gone."""
    levels = kmeans_exact(1e8 + np.array([0.0, 1, 10, 11]), 2)
    np.testing.assert_allclose(levels - 1e8, [0.5, 10.5])


def test_levels_of_every_row():
    x = np.array([[1, 1, 5, 5, 9, 13], [-2, 0, 2, 4, 4, 4]], np.float32)
    q = quantize(x, QuantSpec(2, code="kmeans", granularity=PerChannel(0)))
    np.testing.assert_array_equal(q.dequantize(), x)
    np.testing.assert_array_equal(q.levels()[:, 0], [[1, 5, 9, 13], [-2, 0, 2, 4]])
    np.testing.assert_array_equal(q.integers(), [[0, 0, 1, 1, 2, 3], [0, 1, 2, 3, 3, 3]])


def test_many_values():
    """Beyond EXACT values Lloyd takes over, and is not much worse."""
    values = RNG.standard_normal(codebook.EXACT + 1)
    assert cost(values, codebook.fit(values, 8)) < 1.05 * cost(values, kmeans_exact(values, 8))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e6])
def test_levels_that_do_not_fit(wrong):
    q = quantize(np.arange(4, dtype=np.float32), QuantSpec(2, code="kmeans", scale="fp16"))
    with pytest.raises(ValueError, match=r"a level of .* does not fit fp16"):
        q.with_levels([0, 1, 2, wrong])
    assert q.with_levels([0, 1, 2, 5]).dequantize().tolist() == [0, 1, 2, 5]


def test_last_groups_are_shorter():
    x = np.array([[1, 1, 2, 2, 9], [3, 4, 3, 4, -7]], np.float32)
    q = quantize(x, QuantSpec(1, code="kmeans", granularity=PerGroup(4)))
    np.testing.assert_array_equal(q.dequantize(), x)
    assert q.levels().tolist() == [[[1, 2], [9, 9]], [[3, 4], [-7, -7]]]


def test_what_has_no_mean():
    with pytest.raises(ValueError, match="no mean"):
        quantize(np.array([1, np.nan], np.float32), QuantSpec(2, code="kmeans"))
    with pytest.raises(ValueError, match="does not fit fp16"):
        quantize(np.array([1, 1e6], np.float32), QuantSpec(2, code="kmeans", scale="fp16"))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("k", [1, 3, 7, 15, 255])
def test_codes_at_thresholds(k, own, multiply):
    """A threshold itself takes the level below it, and the next number the one above; as the reference does it."""
    pytest.importorskip("quant.kernels._codecs")
    limits = np.sort(np.random.default_rng(k).standard_normal((2, 3, k) if own else k), axis=-1).astype(np.float32)
    flat = limits.reshape(-1)
    numbers = np.concatenate([flat, np.nextafter(flat, np.float32(9)), np.float32([-99, 99, 0, -0.0])])
    lines = np.resize(numbers, (2, 3 * 2 * k + 2)).astype(np.float32)
    by, size = np.ones((2, 3), np.float32), 2 * k + 1
    codes = [np.empty(lines.shape, np.uint8) for _ in range(2)]
    kernels.encode_table(lines, size, by, multiply, limits, codes[0])
    with kernels.forms():
        kernels.encode_table(lines, size, by, multiply, limits, codes[1])
    np.testing.assert_array_equal(*codes)
    if not own:
        np.testing.assert_array_equal(codes[0], (lines[..., None] > limits).sum(axis=-1))


def test_16_levels_cost_little_more_than_four_bits():
    """A search for each element's level took 30 times as long, so 8 leaves room for noise."""
    pytest.importorskip("quant.kernels._codecs")
    x = np.random.default_rng(1).standard_normal(1 << 20).astype(np.float32)
    made = {spec: QuantizedArray(spec, x.shape) for spec in (NF4, INT4_G32)}
    seconds = {spec: [] for spec in made}
    for _ in range(12):
        for spec, out in made.items():
            start = time.process_time()
            quantize(x, spec, out=out)
            seconds[spec].append(time.process_time() - start)
    assert min(seconds[NF4]) < 8 * min(seconds[INT4_G32])

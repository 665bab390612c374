"""Codes, observers, GPTQ, AWQ, HQQ and k-means beside slow references in float64, on data that are hard to quantise.

Data stay away from 0, have outliers, dead inputs or few samples. A sample of the cases runs by default, 5,000 with
`full`.
"""

from fractions import Fraction

import numpy as np
import pytest

from quant import PerChannel, PerGroup, PerTensor, QuantSpec, Scales, kernels, quantize
from quant.formats import GREATEST, MINIFLOATS
from quant.kernels import reference_clusters
from quant.observers import Ema, Entropy, MeanSquare, MinMax, Percentile
from quant.ptq import awq, gptq, hqq
from quant.scaling.codebook import EXACT, fit_groups, kmeans_exact, kmeans_lloyd
from quant.scaling.scales import LARGEST, spread
from quant.spec.granularity import to_rows
from quant.spec.quant_spec import CHOICES, SCALE_BITS

F = np.float32
CANDIDATES = 256


def cases(few):
    """Seeds of a test: the first `few`, and as `full` all others of 5,000."""
    rest = pytest.param(range(few, 5000), id="full", marks=(pytest.mark.full, pytest.mark.timeout(1800)))
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), rest])


def hard(rng, shape):
    """Random numbers, most often away from 0, some with outliers, zeros or equal values, in float64."""
    kinds = {
        "uniform": lambda: rng.uniform(0.5, 1, shape),
        "narrow": lambda: rng.normal(1, 0.1, shape),
        "far": lambda: rng.normal(1000, 1, shape),
        "sigmoid": lambda: 1 / (1 + np.exp(-rng.normal(0, 2, shape))),
        "normal": lambda: rng.standard_normal(shape),
        "few values": lambda: rng.choice(rng.standard_normal(3), shape),
        "a point": lambda: np.where(rng.random(shape) < 0.6, 0.5, rng.uniform(0.5, 1, shape)),
        "all sizes": lambda: np.exp(rng.normal(0, 3, shape)),
    }
    x = np.asarray(kinds[rng.choice(list(kinds))]()) * rng.choice([1, -1]) * 10.0 ** rng.integers(-3, 4)
    if rng.random() < 0.3:
        x.reshape(-1)[rng.integers(x.size)] *= 10.0 ** rng.integers(1, 9) * rng.choice([1, -1])
    if rng.random() < 0.2:
        x[rng.random(shape) < 0.5] = 0
    return x


# ------------------------------------------------------------------------------------------ codes of every spec

SCALES = [*(form for form in SCALE_BITS if not form.startswith("uint")), Scales("e4m3", parent=Scales("fp32"))]
SCALES += [Scales(f"uint{bits}", kind, Scales("fp32")) for bits in (4, 8) for kind in (PerTensor(), PerChannel(0))]
GRANULARITIES = [PerTensor(), PerChannel(0), PerChannel(-1), *map(PerGroup, (1, 5, 8, 32)), PerGroup(3, 0)]


def any_spec(rng, x, fits=lambda spec: True):
    """A spec out of all that fit, and whose formats have room for the scales and zero points of an array."""
    while True:
        spec = None
        fields = {name: str(rng.choice(allowed)) for name, allowed in CHOICES.items() if rng.random() < 0.5}
        if fields.get("code", "linear") == "linear":
            fields |= {name: bool(rng.integers(2)) for name in ("signed", "symmetric") if rng.random() < 0.5}
        else:
            fields.pop("q_range", None)
        fields |= {"granularity": GRANULARITIES[rng.integers(len(GRANULARITIES))]}
        try:
            spec = QuantSpec(int(rng.integers(1, 9)), scale=SCALES[rng.integers(len(SCALES))], **fields)
            if fits(spec) and quantize(x, spec, seed=0) is not None:
                return spec
        except ValueError as error:
            assert spec is None or "fit " in str(error), error


def ideal_scale(x, spec):
    """Scale of a group of elements before its rounding; None for asymmetric specs, whose ranges may be extended."""
    most = max(x.max(), 0.0) if not spec.signed else x[np.argmax(abs(x))] if spec.q_range == "peak" else abs(x).max()
    if not spec.symmetric:
        low, high = (min(x.min(), 0.0), max(x.max(), 0.0)) if spec.zero == "integer" else (x.min(), x.max())
        return None if spec.zero != "integer" else (high - low) / (spec.q_max - spec.q_min)
    if spec.code == "nf4":
        return most
    if spec.minifloat:
        largest = MINIFLOATS[spec.code].largest
        octave = np.floor(np.log2(most)) - np.floor(np.log2(largest)) if most else -127
        return 2.0 ** max(octave, -127) if spec.scales.format == "e8m0" else most / largest
    half = 2.0 ** (spec.bits - 1)
    divisors = {"restricted": half - 1, "full": half, "centred": half - 0.5, "peak": -half}
    return most / (divisors[spec.q_range] if spec.signed else spec.q_max)


def expect_scale(found, ideal, outer, spec):
    """A scale is its ideal rounded to its format; `outer` is the largest ideal one of the array."""
    form = spec.scales.format
    if spec.scales.parent is not None:
        assert abs(found - ideal) <= max(outer / LARGEST[form], 1e-40) * 0.51 + ideal * 2.0**-4 * (form == "e4m3") or (
            ideal and found <= outer / LARGEST[form] * 1.001  # at least one unit
        )
    elif form == "e8m0":
        assert found == ideal if spec.minifloat else ideal * (1 - 1e-6) <= found <= max(2 * ideal, 2.0**-127)
    else:
        digits, lowest = (24, -126) if form == "fp32" else (MINIFLOATS[form].mantissa + 1, MINIFLOATS[form].lowest)
        assert abs(found - ideal) <= abs(ideal) * (2.0**-digits + 3e-7) + 2.0 ** (lowest - digits + 1)


@cases(60)
def test_codes(seeds):
    """Every element has the nearest of all values that its group's codes stand for, and scales are as defined."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x = np.clip(hard(rng, (int(rng.integers(1, 4)), int(rng.choice([1, 2, 7, 40])))), -3e38, 3e38).astype(F)
        spec = any_spec(rng, x)
        q = quantize(x, spec, seed=0)
        blocks, rows = q.layout.blocks, to_rows(x, spec.granularity).astype(np.float64)
        decoded = to_rows(q.dequantize(), spec.granularity).astype(np.float64)
        scales, zeros = q.scales().astype(np.float64), q.zeros()
        groups = [
            (row, group, slice(group * blocks.size, (group + 1) * blocks.size))
            for row in range(blocks.rows)
            for group in range(blocks.per_row)
        ]
        ideals = {} if spec.code == "kmeans" else {(r, g): ideal_scale(rows[r, at], spec) for r, g, at in groups}
        outer = max((ideal for ideal in ideals.values() if ideal is not None), default=0)
        for row, group, at in groups:
            scale, zero = scales[row, group], 0.0 if zeros is None else float(zeros[row, group])
            if spec.linear:
                all_codes = np.arange(spec.q_min, spec.q_max + 1) - zero
            else:
                all_codes = (q.levels()[row, group] if spec.code == "kmeans" else q.levels()).astype(np.float64)
            all_codes = all_codes[np.isfinite(all_codes)]
            off = abs(decoded[row, at] - np.clip(scale * all_codes, -GREATEST, GREATEST)[:, None])
            assert (off.min(axis=0) <= abs(decoded[row, at]) * 1e-6 + 1e-45).all()  # values of codes, and no others
            chosen = all_codes[off.argmin(axis=0)]
            ideal = ideals.get((row, group))
            if ideal is not None:
                expect_scale(scale, ideal, outer, spec)
            unit = (ideal if spec.divisor == "inverse" and ideal is not None else scale) or 1.0
            far = abs(rows[row, at] / unit - all_codes[:, None]).min(axis=0)
            slack = (abs(rows[row, at] / unit) + abs(zero) + 1) * 2.0**-21
            step = np.diff(np.sort(all_codes)).max(initial=0.0) if spec.rounding == "stochastic" else 0.0
            if not spec.symmetric and spec.scales == Scales("fp32"):  # none clips by more than Z is rounded
                exact = spec.zero == "fp32" and abs(zero) < 2**12 and spec.rounding != "stochastic"
                limit = (0.5 + 2.0**-10 if exact else 1 + 2.0**-8) * scale
                assert (abs(decoded[row, at] - rows[row, at]) <= limit + abs(rows[row, at]) * 1e-6).all()
            if scale and not (spec.divisor == "inverse" and ideal is None):
                assert (abs(rows[row, at] / unit - chosen) <= far + slack + step).all()


# ------------------------------------------------------------------------------------------ observers


def batches(seed):
    """A generator, and one to three batches in one of the floating-point types."""
    rng = np.random.default_rng(seed)
    dtype = rng.choice([np.float16, np.float32, np.float64, ">f8"])
    x = np.clip(hard(rng, int(rng.choice([1, 2, 5, 20, 64, 300]))), -6e4, 6e4).astype(dtype)
    return rng, np.array_split(x, min(rng.integers(1, 4), len(x)))


def observed(observer, parts):
    for part in parts:
        observer.observe(part)
    return tuple(bound.item() for bound in observer.range())


def whole_range(x, symmetric):
    low, high = min(x.min(), 0.0), max(x.max(), 0.0)
    return (-max(-low, high), max(-low, high)) if symmetric else (low, high)


def fraction_of(found, whole):
    """Index of the candidate that an observer has chosen: its share of the whole range, in 256ths."""
    at = int(np.argmax(np.abs(whole)))
    index = round(found[at] / whole[at] * CANDIDATES) if whole[at] else CANDIDATES
    assert found == tuple(float(F(index / CANDIDATES * bound)) for bound in whole)
    return index


@cases(20)
def test_ranges_of_the_elements(seeds):
    for seed in seeds:
        _, parts = batches(seed)
        x = np.sort(np.concatenate(parts).astype(F).astype(np.float64))
        assert observed(MinMax(), parts) == (x[0], x[-1])
        average = np.array([parts[0].min(), parts[0].max()]).astype(F).astype(np.float64)
        for part in parts[1:]:
            average = 0.25 * np.array([part.min(), part.max()]).astype(F) + 0.75 * average
        assert observed(Ema(0.25), parts) == tuple(average.astype(F).tolist())
        observer = Percentile(90)
        low, high = observed(observer, parts)
        beyond, width = len(x) * 0.05, observer.width
        assert (x < low).sum() <= beyond and (x > high).sum() <= beyond
        assert (x <= low + width).sum() > beyond or low == x[0]
        assert (x >= high - width).sum() > beyond or high == x[-1]


def root_mean_square(x, bits, symmetric, low, high):
    steps = 2**bits - 1 - symmetric
    step = (high - low) / steps or 1.0
    return np.sqrt(np.mean((np.clip(np.rint((x - low) / step), 0, steps) * step + low - x) ** 2))


@cases(8)
@pytest.mark.parametrize("symmetric", [True, False])
def test_least_squares(seeds, symmetric):
    """No other candidate's error is smaller by more than the width of a bin, by which a histogram can be off."""
    for seed in seeds:
        rng, parts = batches(seed)
        x, bits = np.concatenate(parts).astype(F).astype(np.float64), int(rng.integers(2, 9))
        observer = MeanSquare(bits, symmetric)
        found, whole = observed(observer, parts), whole_range(x, symmetric)
        index = fraction_of(found, whole)
        errors = [root_mean_square(x, bits, symmetric, *np.multiply(whole, i / CANDIDATES)) for i in range(1, 257)]
        assert errors[index - 1] <= min(errors) + observer.width


def divergence(places, counts, width, bits, symmetric, low, high):
    """Of elements that are in bins with these places, from their codes for the range; the codes count elements too."""
    if high - low < (2**bits - symmetric) * width:
        return np.inf
    first, last = np.floor(low / width), np.floor(high / width)
    within = (places >= first) & (places <= last)
    if not within.any():
        return np.inf
    steps = 2**bits - 1 - symmetric
    codes = np.clip(np.rint(((places + 0.5) * width - low) / ((high - low) / steps)), 0, steps)
    total = 0.0
    for place in np.unique(np.clip(places, first, last)):
        share = counts[np.clip(places, first, last) == place].sum() / counts.sum()
        alike = within & (codes == codes[places == place][0]) if place in places else None
        q = 1.0 if alike is None else counts[alike].mean()
        total += share * np.log(share / (q / counts.sum()))
    return total


@cases(4)
@pytest.mark.parametrize("symmetric", [True, False])
def test_least_divergence(seeds, symmetric):
    for seed in seeds:
        rng, parts = batches(seed)
        x, bits = np.concatenate(parts).astype(F).astype(np.float64), int(rng.integers(2, 9))
        observer = Entropy(bits, symmetric, bins=2 * int(rng.choice([32, 256, 1024])))
        found, whole = observed(observer, parts), whole_range(x, symmetric)
        index = fraction_of(found, whole)
        places, counts = np.unique(np.floor(x / observer.width), return_counts=True)
        others = range(1, CANDIDATES + 1) if seed % 50 == 0 else rng.integers(1, CANDIDATES + 1, 6)
        about = places, counts, observer.width, bits, symmetric
        least = divergence(*about, *np.multiply(whole, index / CANDIDATES))
        for other in (CANDIDATES, *others):
            assert least <= divergence(*about, *np.multiply(whole, other / CANDIDATES)) + 1e-9
        if np.isfinite(least):  # the share of elements in the range has a bound
            within = (np.floor(x / observer.width) >= np.floor(found[0] / observer.width)) & (
                np.floor(x / observer.width) <= np.floor(found[1] / observer.width)
            )
            assert within.mean() >= np.exp(-least) - 2 / len(x) - 1e-9


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_data_away_from_zero_keep_their_range(bits, symmetric):
    rng = np.random.default_rng(0)
    data = {
        "uniform": rng.uniform(0.5, 1, 10000),
        "narrow": rng.normal(1, 0.1, 10000),
        "64 samples": rng.normal(1, 0.1, 64),
        "sigmoid": 1 / (1 + np.exp(-rng.standard_normal(10000))),
        "negative": rng.uniform(-1, -0.5, 1000),
    }
    spec = QuantSpec(bits, symmetric=symmetric)
    for name, x in data.items():
        seen, ends = Entropy(bits, symmetric), MinMax()
        seen.observe(x)
        ends.observe(x)
        errors = [
            np.sqrt(np.mean((quantize(x, spec, **one.parameters(spec)).dequantize() - x) ** 2)) for one in (seen, ends)
        ]
        assert errors[0] <= 2 * errors[1], name  # a rare one is clipped


# ------------------------------------------------------------------------------------------ weights and their inputs


def one_by_one(spec):
    """True for specs with which inputs are rounded one after another."""
    found = spec.scales.parent is None and spec.q_range != "peak" and spec.code != "kmeans"
    return found and spec.rounding != "stochastic" and spec.granularity not in (PerChannel(-1), PerGroup(3, 0))


def problem(seed):
    """Weights, inputs of samples, few of them often, some always 0, and a spec."""
    rng = np.random.default_rng(seed)
    outputs, inputs, samples = rng.integers(1, 5), rng.integers(1, 30), rng.choice([1, 2, 4, 10, 60])
    w = np.clip(hard(rng, (outputs, inputs)), -3e4, 3e4).astype(F)
    x = hard(rng, (samples, inputs))
    if rng.random() < 0.5:
        x = x + rng.standard_normal((samples, 1)) * x.std()
    x[:, rng.random(inputs) < rng.choice([0, 0.3, 1], p=[0.5, 0.45, 0.05])] = 0
    return w, x, any_spec(rng, w, one_by_one)


def product_loss(q, w, x, divisor=1.0):
    return float((((q.dequantize() / np.float64(divisor) - w) @ x.T) ** 2).sum())


def gptq_input_by_input(w, x, spec, damping):
    """Weights rounded one input after another, with the inverse moments of those left, found anew each time."""
    h = x.T @ x
    live = np.diag(h) > 0
    mean = np.diag(h)[live].mean() if live.any() else 1.0
    h = h + np.diag(np.where(live, damping * mean, mean))
    size = spec.granularity.size if isinstance(spec.granularity, PerGroup) else w.shape[1]
    rows = spec.replace(granularity=PerTensor() if spec.granularity == PerTensor() else PerChannel(0))
    left, chosen = w.astype(np.float64), np.empty_like(w)
    for j in range(w.shape[1]):
        if j % size == 0:
            q = quantize(left[:, j : j + size], rows)
            given = {"scales": np.where(q.scales() == 0, 1, q.scales())}
            given |= {} if spec.symmetric else {"zeros": q.zeros()}
        inverse = np.linalg.inv(h[j:, j:])
        chosen[:, j] = quantize(left[:, j : j + 1], rows, **given).dequantize()[:, 0]
        error = (left[:, j] - chosen[:, j]) / inverse[0, 0]
        left[:, j:] -= np.outer(error, inverse[0])
    return chosen


@cases(20)
def test_gptq(seeds):
    """As input by input, unless rounding to nearest is no worse; never worse than that."""
    compared = 0
    for seed in seeds:
        w, x, spec = problem(seed)
        found = gptq(w, x.T @ x, spec)
        nearest = quantize(w, spec.replace(rounding="nearest_even"))
        plain = product_loss(nearest, w, x)
        assert product_loss(found, w, x) <= plain * (1 + 1e-9) + 1e-12 * float(((w @ x.T) ** 2).sum())
        if found.buffer.tobytes() == nearest.buffer.tobytes():
            continue
        compared += 1
        expected = gptq_input_by_input(w, x, spec, 0.01)
        scale = spread(found.scales(), found.layout.blocks).reshape(w.shape)
        assert (abs(found.dequantize() - expected) <= 1e-2 * scale).all()
    assert compared > len(seeds) / 4


@cases(8)
def test_awq(seeds):
    """Least loss of all powers that fit, each tried by itself in float64."""
    for seed in seeds:
        w, x, spec = problem(seed)
        spec = spec.replace(rounding="nearest_even")
        sizes = abs(x).mean(axis=0).astype(F).astype(np.float64)
        q, s = awq(w, x.T @ x, sizes, spec)
        sizes[sizes == 0] = sizes[sizes > 0].min(initial=np.inf) if sizes.any() else 1
        losses = []
        for number in range(20):
            factor = sizes ** (number / 20)
            factor = (factor / np.sqrt(factor.max() * factor.min())).astype(F)
            try:
                losses.append(product_loss(quantize(w * factor, spec), w, x, factor))
            except ValueError:
                continue
        scale = float(((w @ x.T) ** 2).sum())
        assert product_loss(q, w, x, s) <= min(losses) * (1 + 1e-4) + 1e-9 * scale


def robust_loss(w, decoded, norm):
    return float((abs(decoded.astype(np.float64) - w) ** norm).sum())


def hqq_in_float64(w, spec, norm, beta=10.0):
    """Least loss of the steps of half-quadratic splitting, each group with zero points of its own."""
    start = quantize(w, spec, seed=0)
    size, rows = start.layout.blocks.size, to_rows(w, spec.granularity).astype(np.float64)
    scales = np.where(start.scales() == 0, 1, start.scales())
    current, least = start, robust_loss(w, start.dequantize(), norm)
    for _ in range(20):
        off = rows - to_rows(current.dequantize(), spec.granularity)
        shrunk = np.sign(off) * np.maximum(abs(off) - np.maximum(abs(off), 1e-30) ** (norm - 1) / beta, 0)
        codes = to_rows(current.integers(), spec.granularity).astype(np.float64)
        zeros = np.empty(scales.shape)
        for row, group in np.ndindex(scales.shape):
            at = slice(group * size, (group + 1) * size)
            zeros[row, group] = np.mean(codes[row, at] - (rows - shrunk)[row, at] / scales[row, group])
        current = quantize(w, spec, seed=0, scales=scales, zeros=zeros)
        loss = robust_loss(w, current.dequantize(), norm)
        if loss >= least:
            break
        least, beta = loss, beta * 1.01
    return least


@cases(20)
def test_hqq(seeds):
    """No worse than the usual zero points, and as good as the steps in float64."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        w = np.clip(hard(rng, (int(rng.integers(1, 4)), int(rng.integers(1, 40)))), -3e4, 3e4).astype(F)
        spec = any_spec(rng, w, lambda spec: not spec.symmetric and spec.zero != "integer")
        norm = float(rng.uniform(0.3, 0.9))
        found = robust_loss(w, hqq(w, spec, norm).dequantize(), norm)
        assert found <= robust_loss(w, quantize(w, spec, seed=0).dequantize(), norm)
        assert found <= hqq_in_float64(w, spec, norm) * (1 + 1e-9) + 1e-30


# ------------------------------------------------------------------------------------------ k-means


def squares(values, levels):
    """Sum of squared distances to the nearest level, exact."""
    return sum(min((Fraction(value) - Fraction(level)) ** 2 for level in levels) for value in values)


def least_squares(values, k):
    """Least sum of any k levels, exact, by trying all starts of all clusters."""
    points = sorted(map(Fraction, values))
    sums, sums_of_squares = [Fraction(0)], [Fraction(0)]
    for point in points:
        sums.append(sums[-1] + point)
        sums_of_squares.append(sums_of_squares[-1] + point * point)

    def cost(first, end):
        return sums_of_squares[end] - sums_of_squares[first] - (sums[end] - sums[first]) ** 2 / (end - first)

    least = [Fraction(0), *(cost(0, end) for end in range(1, len(points) + 1))]
    for _ in range(k - 1):
        least = [
            min([least[end], *(least[first] + cost(first, end) for first in range(1, end))])
            for end in range(len(points) + 1)
        ]
    return least[-1]


@cases(30)
def test_kmeans(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x = hard(rng, int(rng.integers(1, 14))).astype(F)
        if seed % 4 == 0:
            x[rng.integers(len(x))] = rng.choice([1e8, -1e8, 1e30, -3e38])
        k = int(rng.integers(1, 6))
        levels, best = kmeans_exact(x, k), least_squares(x.tolist(), k)
        found = squares(x.tolist(), levels.tolist())
        assert len(levels) == k and (np.diff(levels) >= 0).all()
        assert found <= best * (1 + Fraction(1, 10**9)) + Fraction(float(abs(x).max())) ** 2 * Fraction(1, 10**29)
        if len(set(x.tolist())) <= k:
            assert levels.tolist() == sorted(set(x.tolist())) + [x.max()] * (k - len(set(x.tolist())))


@pytest.mark.parametrize("n", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("k", [1, 2, 16, 256])
def test_groups_are_fitted_each_by_itself(n, k):
    rng = np.random.default_rng(n)
    groups = np.array([hard(rng, n) for _ in range(5)])
    np.testing.assert_array_equal(fit_groups(groups, k), [kmeans_exact(group, k) for group in groups])


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 100, 1500])
@pytest.mark.parametrize("k", [1, 2, 3, 16])
def test_best_intervals_have_the_bits_of_the_reference(n, k):
    """Also where intervals cost the same (few distinct values), beside outliers, and where squares vanish."""
    pytest.importorskip("quant.kernels._codecs")
    rng = np.random.default_rng(n)
    draws = rng.standard_normal((5, n))
    spread = 10.0 ** rng.integers(-40, 30, n)
    rows = draws[0], np.round(draws[1]), draws[2] * spread, draws[3] * 1e-160, np.round(draws[4], 1)
    points = np.sort(rows, axis=1)
    k = min(k, n)
    edges = kernels.optimal_edges(points, k)
    assert edges.tobytes() == reference_clusters.optimal_edges(points, k).tobytes()
    assert (edges[:, 0] == 0).all() and (edges[:, -1] == n).all() and (np.diff(edges, axis=1) > 0).all()


@cases(10)
def test_codes_of_kmeans_in_all_forms(seeds):
    """Levels ascend, whatever is beside them, so that codes by comparison and by bisection are the same."""
    pytest.importorskip("quant.kernels._codecs")
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x = hard(rng, (2, int(rng.choice([5, 33, 100])))).astype(F)
        spec = QuantSpec(int(rng.choice([2, 3, 4])), code="kmeans", granularity=PerGroup(int(rng.choice([5, 32, 64]))))
        fast = quantize(x, spec)
        assert (np.diff(fast.levels()) >= 0).all()
        with kernels.forms():
            assert quantize(x, spec).buffer.tobytes() == fast.buffer.tobytes()
            assert fast.dequantize().tobytes() == quantize(x, spec).dequantize().tobytes()


@pytest.mark.parametrize("outlier", [0, 1e8, -1e30, 3e38])
def test_many_values_beside_an_outlier(outlier):
    """Lloyd's levels are means of their own values alone, and ascend."""
    x = np.random.default_rng(0).standard_normal(EXACT + 10)
    x[5] = outlier
    levels = kmeans_lloyd(x, 8)
    edges = np.searchsorted(np.sort(x), (levels[1:] + levels[:-1]) / 2, "right")
    means = [part.mean() for part in np.split(np.sort(x), edges) if len(part)]
    assert (np.diff(levels) >= 0).all()
    np.testing.assert_allclose(
        [level for level in levels if np.isclose(level, means, rtol=1e-2).any()], means, rtol=1e-2
    )

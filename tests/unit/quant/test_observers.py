"""Observers: what they see does not depend on who saw it, and their ranges are what they promise."""

import itertools

import numpy as np
import pytest

from quant import INT8, PerChannel, PerGroup, QuantSpec, quantize
from quant.observers import OBSERVERS, Ema, Entropy, Histogram, MeanSquare, MinMax, Percentile

F = np.float32
ALL = OBSERVERS | {"histogram": lambda spec: Histogram()}


class Ranks:
    """Communicators of several ranks in one process: what every rank would send is known from the start."""

    def __init__(self, observers):
        self.observers = observers

    def allreduce(self):
        """What each rank's `allreduce` gives: they are played in turn, one exchange further each time."""
        sent = []
        while True:
            results = []
            for rank, observer in enumerate(self.observers):
                try:
                    results.append(observer.allreduce(_Rank(self, rank, sent)))
                except _Waits as waits:
                    results.append(waits)
            if not any(isinstance(result, _Waits) for result in results):
                return results
            assert all(isinstance(result, _Waits) for result in results), "some ranks exchange more than others"
            sent.append([result.args[0] for result in results])


class _Waits(Exception):
    pass


class _Rank:
    def __init__(self, ranks, rank, sent):
        self.ranks, self.rank, self.sent = ranks, rank, list(sent)

    def Get_size(self):
        return len(self.ranks.observers)

    def _exchange(self, data):
        if not self.sent:
            raise _Waits(data.copy())
        everyone = self.sent.pop(0)
        assert len({(part.shape, part.dtype) for part in everyone}) == 1
        return np.stack(everyone)

    def Allgather(self, mine, everyones):
        everyones[...] = self._exchange(mine)

    def Allreduce(self, mine, total):
        total[...] = self._exchange(mine).sum(axis=0)


def batches(seed=0, n=12):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(rng.integers(1, 300)) * 10.0 ** rng.integers(-3, 3)).astype(F) for _ in range(n)]


def state(observer):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(observer).items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ALL)
def test_as_if_one_rank_had_seen_it_all(name, ranks):
    """Exactly the same state, whether batches or parts of batches are given to the ranks, some of which get nothing."""
    seen = batches()
    alone = ALL[name](INT8)
    for x in seen:
        alone.observe(x)
    shares = [ALL[name](INT8) for _ in range(ranks)]
    for number, x in enumerate(seen):
        if name == "ema":  # batches are seen together
            for share, part in zip(shares, np.array_split(np.tile(x, ranks), ranks)):
                share.observe(part)
        else:
            shares[number % max(ranks - 1, 1)].observe(x)
    together = Ranks(shares).allreduce()
    assert [state(one) for one in together] == [state(alone)] * ranks
    for one in together:
        np.testing.assert_array_equal(one.range(), alone.range())
    before = state(shares[0])
    Ranks(shares).allreduce()
    assert state(shares[0]) == before


@pytest.mark.parametrize("name", ALL)
def test_nothing_seen(name):
    for observer in [ALL[name](INT8), *Ranks([ALL[name](INT8), ALL[name](INT8)]).allreduce()]:
        with pytest.raises(ValueError, match="nothing was observed"):
            observer.range()
        with pytest.raises(ValueError, match="has no range"):
            observer.observe(np.empty(0, F))
        with pytest.raises(ValueError, match="NaN or infinity"):
            observer.observe(F([1, np.nan]))


def test_min_max_per_channel():
    one, other = MinMax(PerChannel(1)), MinMax(PerChannel(1))
    one.observe(F([[1, -2], [3, 4]]))
    other.observe(F([[0, 7]]))
    both = Ranks([one, other]).allreduce()[0]
    low, high = both.range()
    assert low.tolist() == [0, -2] and high.tolist() == [3, 7]
    spec = QuantSpec(8, granularity=PerChannel(1))
    parameters = both.parameters(spec)
    q = quantize(F([[3, 7], [-3, -7]]), spec, **parameters)
    assert q.integers().tolist() == [[127, 127], [-127, -127]]
    with pytest.raises(ValueError, match="expected 2 channels, as before, found 3"):
        one.observe(np.ones((2, 3), F))
    with pytest.raises(ValueError, match="per tensor or per channel"):
        MinMax(PerGroup(3))
    three = MinMax(PerChannel(1))
    three.observe(np.ones((1, 3), F))
    with pytest.raises(ValueError, match="different numbers of channels"):
        Ranks([one, three]).allreduce()


def test_average_that_forgets():
    ema = Ema(0.25)
    for high in (4, 8, 0.5):
        ema.observe(F([-1, high]))
    low, high = ema.range()
    assert low.item() == -1 and high.item() == 0.25 * 0.5 + 0.75 * (0.25 * 8 + 0.75 * 4)
    with pytest.raises(ValueError, match="a: expected above 0"):
        Ema(0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_batches_in_turns(ranks):
    """Whoever sees a batch, and in parts or not, it is averaged where it stands among all; gaps count for nothing."""
    seen, alone, shares = batches(), Ema(0.25), [Ema(0.25) for _ in range(ranks)]
    for number, x in enumerate(seen):
        alone.observe(x)
        shares[number % ranks].begin(2 * number)
        for part in np.array_split(x, min(2, len(x))):
            shares[number % ranks].observe(part)
    for one in Ranks(shares).allreduce():
        assert len(one.batches) == 2 * len(seen) - 1
        np.testing.assert_array_equal(one.range(), alone.range())


def test_ranks_that_average_differently_are_refused():
    with pytest.raises(ValueError, match=r"a: expected the same on all ranks, found \[0.25, 0.25, 0.5\]"):
        Ranks([Ema(0.25), Ema(0.25), Ema(0.5)]).allreduce()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_histogram_knows_no_order(order):
    parts = [F([0.001, -0.002]), F([5, -7, 0]), F([1e30, 3e-45, -0.0])]
    one, sorted_ = Histogram(16), Histogram(16)
    for number in order:
        one.observe(parts[number])
    sorted_.observe(np.sort(np.concatenate(parts)))
    assert state(one) == state(sorted_) and one.total == 8


def test_a_histogram_counts():
    x = np.random.default_rng(0).standard_normal(5000).astype(F)
    seen = Histogram(64)
    seen.observe(x)
    expected, _ = np.histogram(x.astype(np.float64), seen.edges())
    np.testing.assert_array_equal(seen.counts, expected)
    assert seen.counts[:16].sum() + seen.counts[-16:].sum() > 0  # no wider than it has to be
    extremes = Histogram(4)
    extremes.observe(F([3.4028235e38, -3.4028235e38, 1e-45]))
    assert extremes.total == 3 and extremes.edges()[-1] > 3.4028235e38
    edge = Histogram(4)
    edge.observe(F([-2, 1]))  # -2 is the edge of the last bin on its side
    assert edge.width == 1
    for bins in (3, 0):
        with pytest.raises(ValueError, match="even number"):
            Histogram(bins)
    with pytest.raises(ValueError, match="do not add up"):
        Ranks([edge, Histogram(8)]).allreduce()


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.9, 100.0])
def test_percentiles(percentile):
    x = np.random.default_rng(0).standard_normal(20000).astype(F) * 3 + 1
    seen = Percentile(percentile)
    seen.observe(x)
    low, high = (bound.item() for bound in seen.range())
    beyond = (100 - percentile) / 2
    assert low == pytest.approx(np.percentile(x, beyond), abs=2 * seen.width)
    assert high == pytest.approx(np.percentile(x, 100 - beyond), abs=2 * seen.width)
    with pytest.raises(ValueError, match="above 0 and at most 100"):
        Percentile(0)


def mean_square(x, spec, low, high):
    from quant.scaling import scales

    if spec.symmetric:
        return float(((quantize(x, spec, scales=F(high / spec.q_max)).dequantize().astype(float) - x) ** 2).mean())
    scale, bottom = scales.affine(spec, F([low]), F([high]))
    zero = scales.zero_point(spec, scale, bottom)
    return float(((quantize(x, spec, scales=scale, zeros=zero).dequantize().astype(float) - x) ** 2).mean())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_least_squares(bits, symmetric):
    """No other fraction of the whole range is better by more than a few per cent, whole range included."""
    x = np.random.default_rng(1).standard_t(3, 30000).astype(F) + F(0 if symmetric else 2)
    seen = MeanSquare(bits, symmetric)
    seen.observe(x)
    spec = QuantSpec(bits, symmetric=symmetric)
    low, high = (bound.item() for bound in seen.range())
    whole = (-abs(x).max(), abs(x).max()) if symmetric else (min(x.min(), 0), max(x.max(), 0))
    found = mean_square(x, spec, low, high)
    others = [mean_square(x, spec, fraction * whole[0], fraction * whole[1]) for fraction in np.linspace(0.05, 1, 60)]
    assert found <= min(others) * 1.05
    with pytest.raises(ValueError, match="bits: expected 2 to 8"):
        MeanSquare(1, symmetric)
    if bits <= 4:
        assert found < 0.7 * others[-1]


def test_entropy_clips_what_is_rare():
    x = np.concatenate([np.random.default_rng(0).standard_normal(100000), [50.0]]).astype(F)
    seen = Entropy(8)
    seen.observe(x)
    assert 2.5 < seen.range()[1].item() < 10
    dense = Entropy(8)
    dense.observe(x[:-1])
    assert dense.range()[1].item() == pytest.approx(4.1035, abs=2 * dense.width)
    level = Entropy(8)
    level.observe(np.linspace(-1, 1, 5000, dtype=F))
    assert level.range()[1].item() > 0.95
    with pytest.raises(ValueError, match="bits: expected 2 to 8"):
        Entropy(1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "x", [np.arange(100), np.repeat(np.arange(8), [37, 37, 18, 6, 3, 2, 1, 1])], ids=["level", "rare"]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_entropy_of_few_values(x, symmetric, bits):
    """A range is not the better for holding a single value: with more than two codes a side nothing is clipped."""
    seen = Entropy(bits, symmetric)
    seen.observe(x.astype(F))
    assert seen.range()[1].item() == x.max()


@pytest.mark.parametrize("name", ALL)
def test_elements_of_other_types(name):
    """They count as float32, the range of which others may leave by rounding; complex numbers are refused."""
    for x in (
        np.array([-2.0000000001, 1.0]),
        np.array([-2.0000000001, 1.0], ">f8"),
        np.array(1.9999999999999),
        np.float64(-4.0000000001),
        np.array([1, -3], np.int16),
        np.array([1, -3], np.float16)[::-1],
    ):
        found, expected = ALL[name](INT8), ALL[name](INT8)
        found.observe(x)
        expected.observe(np.asarray(x, F))
        assert state(found) == state(expected)
        np.testing.assert_array_equal(found.range(), expected.range())
    with pytest.raises(TypeError, match="x: expected real numbers, found complex64"):
        ALL[name](INT8).observe(np.ones(3, np.complex64))
    with pytest.raises(ValueError, match="NaN or infinity"):
        ALL[name](INT8).observe(np.array([1e300]))


def test_batches_have_indices():
    for wrong in (-1, 1.5, None):
        with pytest.raises(ValueError, match="batch: expected"):
            Ema().begin(wrong)


def test_zeros_only():
    for kind in OBSERVERS.values():
        seen = kind(INT8)
        seen.observe(np.zeros(10, F))
        assert (quantize(np.zeros(4, F), INT8, **seen.parameters(INT8)).dequantize() == 0).all()


def test_specs_that_a_range_is_not_enough_for():
    seen = MinMax()
    seen.observe(F([1]))
    with pytest.raises(ValueError, match="as observed, found"):
        seen.parameters(QuantSpec(8, granularity=PerChannel(0)))
    with pytest.raises(ValueError, match="does not make scales"):
        seen.parameters(QuantSpec(2, code="kmeans"))


@pytest.mark.parametrize("name", OBSERVERS)
def test_on_a_device(name, gpu):
    from support.standin import cupy

    here, there = OBSERVERS[name](INT8), OBSERVERS[name](INT8)
    for x in batches(3, 3):
        here.observe(x)
        there.observe(cupy.asarray(x))
    assert state(here) == state(there)

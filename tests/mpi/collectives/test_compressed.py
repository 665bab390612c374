"""Encoded sums: exact where the codec is, the same digits on all ranks, nothing lost for good, errors as predicted."""

from functools import partial
from itertools import accumulate

import numpy as np
import pytest
from mpi4py import MPI
from verify_errors import LAWS, noise, once, relative

from collectives import Communicator
from collectives.compressed import (
    EncodedAlltoall,
    HierarchicalAllreduce,
    QuantCodec,
    RingAllreduce,
    SegmentedAllreduce,
    SharedScale,
    TwoShotAllreduce,
    VectorPartition,
    run,
)
from collectives.compressed.bound_collective import staggered
from quant import INT8, PerChannel, QuantSpec, grouped, parse

COUNTS = (0, 1, 2, 5, 16, 17, 1000, 4099)
WAYS = {
    "two_shot": TwoShotAllreduce,
    "ring": RingAllreduce,
    "hierarchical": HierarchicalAllreduce,
    "segmented": partial(SegmentedAllreduce, segments=3),
}
FLAT = {"two_shot": TwoShotAllreduce, "ring": RingAllreduce}
ways = pytest.mark.parametrize("way", WAYS)
counts = pytest.mark.parametrize("count", COUNTS)


class Multiples:
    """A byte for every element, which is rounded to a multiple of `step`: all of it exact in float32."""

    def __init__(self, step=1, block=8):
        self.step, self.block = np.float32(step), block

    def nbytes(self, count):
        return count

    def encode(self, x, wire):
        wire.view(np.int8)[...] = np.rint(x / self.step)

    def decode(self, wire, out):
        np.multiply(wire.view(np.int8), self.step, out=out)

    def add(self, wire, out):
        out += wire.view(np.int8) * self.step


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as made:
        yield made


def terms(comm, count, largest=3):
    """Every rank's x: small integers, other ones on every rank."""
    return [
        ((np.arange(count) * (rank + 3) + rank) % (2 * largest + 1) - largest).astype(np.float32)
        for rank in range(comm.size)
    ]


def same_everywhere(comm, array):
    return all(other == array.tobytes() for other in comm.allgather(array.tobytes()))


@ways
@counts
def test_sums_are_exact_where_the_codec_is(comm, way, count):
    x, out = terms(comm, count), np.full(count, np.nan, np.float32)
    with WAYS[way](comm, count, Multiples()) as made:
        for _ in range(2):  # it may be used again
            run(made.allreduce(x[comm.rank], out))
            np.testing.assert_array_equal(out, sum(x))
        np.testing.assert_array_equal(x[comm.rank], terms(comm, count)[comm.rank])
        inside = x[comm.rank].copy()
        run(made.allreduce(inside, inside))
        np.testing.assert_array_equal(inside, sum(x))


@ways
@counts
def test_what_is_lost_is_what_is_missing(comm, way, count):
    x, out, lost = terms(comm, count), *np.full((2, count), np.nan, np.float32)
    with WAYS[way](comm, count, Multiples(step=4)) as made:
        run(made.allreduce(x[comm.rank], out, lost))
        assert same_everywhere(comm, out)
        np.testing.assert_array_equal(out + sum(comm.allgather(lost)), sum(x))
        into = x[comm.rank].copy()
        run(made.allreduce(into, out, into))
        np.testing.assert_array_equal(into, lost)


@counts
def test_integers_of_one_scale(comm, count):
    x, out, lost = terms(comm, count, 100), *np.full((2, count), np.nan, np.float32)
    with SharedScale(comm, count, bits=8, group=16) as made:
        run(made.allreduce(x[comm.rank], out, lost))
    assert same_everywhere(comm, out)
    np.testing.assert_allclose(out + sum(comm.allgather(lost)), sum(x), atol=1e-3)
    if count:
        assert np.abs(out - sum(x)).max() <= comm.size * 0.5 * 100 / 127 * 1.001


def test_integers_are_as_wide_as_their_sum_needs(comm):
    with SharedScale(comm, 10, bits=8) as made:
        assert np.iinfo(made.integer).max >= 127 * comm.size and made.integer.itemsize == (1 if comm.size == 1 else 2)
    with SharedScale(comm, 10, bits=16) as made:
        run(made.allreduce(np.full(10, comm.rank + 1, np.float32), out := np.empty(10, np.float32)))
    np.testing.assert_allclose(out, comm.size * (comm.size + 1) / 2, rtol=1e-3)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_integers_of_denormals_do_not_wrap_around(comm, bits):
    """The largest of 177 smallest steps, over 127, is one step; 177 of them are more than a byte holds."""
    x, lost, out = np.full(40, 177 * 2.0**-149, np.float32), *np.empty((2, 40), np.float32)
    with SharedScale(comm, 40, bits=bits, group=16) as made:
        run(made.allreduce(x, out, lost))
        assert out.min() >= 0 and out.max() <= comm.size * made.largest * np.ceil(177 / made.largest) * 2.0**-149
    np.testing.assert_allclose(out.astype("f8") + sum(comm.allgather(lost.astype("f8"))), comm.size * 177 * 2.0**-149)


def test_a_group_that_is_not_finite_is_so_on_all_ranks_and_no_other_is(comm):
    for odd in (np.nan, np.inf, -np.inf):
        x, out = np.ones(64, np.float32), np.empty(64, np.float32)
        if comm.rank == comm.size - 1:
            x[20] = odd
        with SharedScale(comm, 64, group=16) as made:
            run(made.allreduce(x, out))
        assert not np.isfinite(out[16:32]).any()
        np.testing.assert_array_equal(np.delete(out, slice(16, 32)), comm.size)


def test_numpy_s_error_state_stays_the_caller_s_between_parts(comm):
    x, out, before = np.ones((2, 20), np.float32), np.empty((2, 20), np.float32), np.geterr()
    with SharedScale(comm, 20) as one, SharedScale(comm, 20) as other:
        for requests in staggered([one.allreduce(x[0], out[0]), other.allreduce(x[1], out[1])]):
            assert np.geterr() == before
            for request in requests:
                request.Wait()
    assert np.geterr() == before and (out == comm.size).all()


@pytest.mark.parametrize("wrong", [{"bits": 1}, {"bits": 17}, {"group": 0}])
def test_wrong_widths_are_refused(comm, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SharedScale(comm, 10, **wrong)


def test_a_codec_only_where_one_is_expected(comm):
    for given in ({"bits": QuantCodec(INT8)}, {"group": INT8}, {"bits": 8.0}):
        with pytest.raises(TypeError, match=f"{next(iter(given))}: expected a whole number, found .*takes no codec"):
            SharedScale(comm, 10, **given)
    for way in (TwoShotAllreduce, RingAllreduce, SegmentedAllreduce, HierarchicalAllreduce, EncodedAlltoall):
        for wrong in (8, INT8):
            lengths = ([2] * comm.size, [2] * comm.size) if way is EncodedAlltoall else (10,)
            with pytest.raises(TypeError, match=r"codec: expected a codec such as QuantCodec\(spec\), found"):
                way(comm, *lengths, wrong)


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("cut", ["even", "falling", "one"])
@pytest.mark.parametrize("count", [0, 1, 2, 17, 1000])
def test_a_part_of_the_sum_and_all_parts(comm, way, cut, count):
    """In lengths of one's own too, none of them whole blocks: all for the last rank, or ever shorter ones."""
    falling = [count >> (rank + 1) for rank in range(comm.size - 1)]
    lengths = {"even": None, "falling": [*falling, count - sum(falling)], "one": [0] * (comm.size - 1) + [count]}[cut]
    x, out, lost = terms(comm, count), *np.full((2, count), np.nan, np.float32)
    with FLAT[way](comm, count, Multiples(step=2), lengths) as made:
        assert lengths is None or list(made.parts.lengths) == lengths
        mine = np.full(made.parts.lengths[comm.rank], np.nan, np.float32)
        run(made.reduce_scatter(x[comm.rank], mine, lost))
        missing = made.parts.of_vector(sum(x) - sum(comm.allgather(lost)), comm.rank)
        np.testing.assert_array_equal(mine, missing)
        gone = np.zeros_like(mine)
        run(made.allgather(mine, out, gone))
        assert same_everywhere(comm, out)
        np.testing.assert_array_equal(made.parts.of_vector(out, comm.rank) + gone, mine)


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("wrong", [lambda p: [1] * (p + 1), lambda p: [-1] + [11] * (p - 1), lambda p: [11] * p])
def test_lengths_that_are_no_division_are_refused(comm, way, wrong):
    with pytest.raises(ValueError, match="lengths: expected"):
        FLAT[way](comm, 10, Multiples(), wrong(comm.size))


@pytest.mark.parametrize("way", FLAT)
def test_lengths_in_narrow_integers(comm, way):
    """The places of the parts are sums of lengths, which an int8 does not hold."""
    lengths = np.full(comm.size, 100, np.int8)
    with FLAT[way](comm, 100 * comm.size, Multiples(step=2), lengths) as made:
        assert made.parts.starts == tuple(range(0, 100 * comm.size, 100)) and made.parts.elements == 100 * comm.size
    with pytest.raises(TypeError):
        FLAT[way](comm, 100 * comm.size, Multiples(step=2), np.full(comm.size, 100.0))


def test_segments_change_no_digit(comm):
    count, codec = 10_001, QuantCodec(parse("int8_g128"))
    x, whole, cut = noise(comm.rank, count), np.empty(count, np.float32), np.empty(count, np.float32)
    with TwoShotAllreduce(comm, count, codec) as one, SegmentedAllreduce(comm, count, codec, segments=5) as several:
        run(one.allreduce(x, whole))
        run(several.allreduce(x, cut))
    np.testing.assert_array_equal(cut, whole)


def test_there_is_a_segment_at_least(comm):
    with SegmentedAllreduce(comm, 0, Multiples()) as made:
        assert len(made.segments) == 1
    with pytest.raises(ValueError, match="segments: expected 1 or more, found 0"):
        SegmentedAllreduce(comm, 10, Multiples(), segments=0)


# ---------------------------------------------------------------------------------------------- all to all


def sizes(comm, most):
    """Elements from rank r to rank s, some of them none."""
    return [
        [(3 * source + 5 * target) * most // 7 % (most + 1) for target in range(comm.size)]
        for source in range(comm.size)
    ]


@pytest.mark.parametrize("most", [0, 1, 3, 17, 1000])
def test_what_all_have_for_one_comes_to_it(comm, most):
    table, rank = sizes(comm, most), comm.rank
    x = [terms(comm, sum(row))[source] for source, row in enumerate(table)]
    starts = [[0, *accumulate(row)] for row in table]
    wanted = np.concatenate([x[s][starts[s][rank] : starts[s][rank + 1]] for s in range(comm.size)])
    out, lost = np.full_like(wanted, np.nan), np.full_like(x[rank], np.nan)
    with EncodedAlltoall(comm, table[rank], [row[rank] for row in table], Multiples()) as made:
        for _ in range(2):
            run(made.alltoall(x[rank], out, lost))
            np.testing.assert_array_equal(out, wanted)
            assert not lost.any()


@pytest.mark.parametrize("count", [0, 1, 5, 257])
def test_as_many_for_each_in_place_and_what_is_lost(comm, count):
    x = terms(comm, count * comm.size)
    with EncodedAlltoall(comm, count, count, Multiples(step=4)) as made:
        out, lost = x[comm.rank].copy(), np.full(count * comm.size, np.nan, np.float32)
        run(made.alltoall(out, out, lost))
    whole = np.array([comm.allgather(out), comm.allgather(lost), x]).reshape(3, comm.size, comm.size, count)
    np.testing.assert_array_equal(whole[0].swapaxes(0, 1) + whole[1], whole[2])
    mine = whole[:2, comm.rank, comm.rank], whole[2, comm.rank, comm.rank]
    np.testing.assert_array_equal(mine[0][0], mine[1])  # what stays is exact
    assert not mine[0][1].any()


def test_numbers_of_numpy_are_lengths_too(comm):
    with EncodedAlltoall(comm, np.int64(3), np.int32(3), Multiples()) as made:
        assert made.sent.lengths == made.received.lengths == (3,) * comm.size


def test_all_to_all_in_few_bits(comm):
    count, codec = 4096, QuantCodec(parse("int8_g128"))
    x = noise(comm.rank, count * comm.size)
    out = np.empty_like(x)
    with EncodedAlltoall(comm, count, count, codec) as made:
        run(made.alltoall(x, out))
    for source in range(comm.size):
        theirs = noise(source, count * comm.size)[comm.rank * count :][:count]
        here = out[source * count :][:count]
        wanted = 0 if source == comm.rank else once(codec, theirs)
        assert relative(here, theirs) == pytest.approx(wanted)


def test_one_length_for_each_rank_is_wanted(comm):
    with pytest.raises(ValueError, match=f"received: expected the elements of {comm.size} ranks' parts"):
        EncodedAlltoall(comm, 1, [1] * (comm.size + 1), Multiples())


@pytest.mark.parametrize("count,ranks,block", [(0, 3, 8), (1, 3, 8), (100, 3, 8), (7, 1, 8), (64, 8, 8), (63, 8, 8)])
def test_parts_are_whole_blocks(count, ranks, block):
    parts = VectorPartition.even(count, ranks, block, lambda n: 2 * n)
    assert sum(parts.lengths) == count and sum(parts.sizes) == 2 * count
    assert all(start % block == 0 or start == count for start in parts.starts)
    vector = np.arange(count)
    np.testing.assert_array_equal(np.concatenate([parts.of_vector(vector, rank) for rank in range(ranks)]), vector)


# ---------------------------------------------------------------------------------------------- quantised


@pytest.mark.parametrize("way", LAWS)
@pytest.mark.parametrize("spec", ["int8_g128", "int4_g128"])
def test_the_error_of_a_quantised_sum_follows_the_law(comm, way, spec):
    count, codec = 1 << 16, QuantCodec(parse(spec))
    x, out = [noise(rank, count) for rank in range(comm.size)], np.empty(count, np.float32)
    kind, law = LAWS[way]
    with kind(comm, count, codec) as made:
        run(made.allreduce(x[comm.rank], out))
    error, eps = relative(out, np.sum(x, axis=0, dtype="f8")), once(codec, x[comm.rank])
    assert error / eps == pytest.approx(law(comm.size, eps), rel=0.1)


@ways
@counts
def test_quantised_sums_of_any_length(comm, way, count):
    x, out, lost = terms(comm, count, 100), *np.full((2, count), np.nan, np.float32)
    codec = QuantCodec(grouped(8, 32, "fp32"))
    with WAYS[way](comm, count, codec) as made:
        run(made.allreduce(x[comm.rank], out, lost))
    assert same_everywhere(comm, out)
    np.testing.assert_allclose(out + sum(comm.allgather(lost)), sum(x), atol=2e-3 * comm.size)


def test_nan_in_one_group_of_one_rank_is_nan_in_that_group_on_all(comm):
    x, out = np.ones(256, np.float32), np.empty(256, np.float32)
    if comm.rank == comm.size - 1:
        x[70] = np.nan
    with TwoShotAllreduce(comm, 256, QuantCodec(grouped(8, 32, "fp32"))) as made:
        run(made.allreduce(x, out))
    assert np.isnan(out[64:96]).all() and np.isfinite(np.delete(out, slice(64, 96))).all()


def test_ranks_that_round_at_random_do_so_each_on_its_own(comm):
    x, spec = noise(0, 4096), grouped(4, 128, rounding="stochastic")

    def encoded(codec):
        codec.encode(x, wire := np.empty(codec.nbytes(len(x)), np.uint8))
        return wire.tobytes()

    codec = QuantCodec(spec, seed=comm.rank)
    wires = [encoded(codec) for _ in range(3)]
    assert len({wire for those in comm.allgather(wires) for wire in those}) == 3 * comm.size
    codec.reseed(comm.rank)
    assert [encoded(codec) for _ in range(3)] == wires
    with pytest.raises(ValueError, match="seed: stochastic rounding needs one"):
        QuantCodec(spec)


def test_a_vector_has_no_channels():
    with pytest.raises(ValueError, match="no channels"):
        QuantCodec(QuantSpec(8, granularity=PerChannel(0)))

"""Encoded sums: exact where the codec is, the same digits on all ranks, nothing lost for good, errors as predicted."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed import Hierarchical, Parts, Quantised, Ring, SharedScale, TwoShot
from collectives.requests import wait_all
from quant import PerChannel, QuantSpec, grouped, parse

COUNTS = (0, 1, 2, 5, 16, 17, 1000, 4099)
WAYS = {"two_shot": TwoShot, "ring": Ring, "hierarchical": Hierarchical}
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


def done(motion):
    for requests in motion:
        wait_all(requests)


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
            done(made.allreduce(x[comm.rank], out))
            np.testing.assert_array_equal(out, sum(x))
        np.testing.assert_array_equal(x[comm.rank], terms(comm, count)[comm.rank])
        inside = x[comm.rank].copy()
        done(made.allreduce(inside, inside))
        np.testing.assert_array_equal(inside, sum(x))


@ways
@counts
def test_what_is_lost_is_what_is_missing(comm, way, count):
    x, out, lost = terms(comm, count), *np.full((2, count), np.nan, np.float32)
    with WAYS[way](comm, count, Multiples(step=4)) as made:
        done(made.allreduce(x[comm.rank], out, lost))
        assert same_everywhere(comm, out)
        np.testing.assert_array_equal(out + sum(comm.allgather(lost)), sum(x))
        into = x[comm.rank].copy()
        done(made.allreduce(into, out, into))
        np.testing.assert_array_equal(into, lost)


@counts
def test_integers_of_one_scale(comm, count):
    x, out, lost = terms(comm, count, 100), *np.full((2, count), np.nan, np.float32)
    with SharedScale(comm, count, bits=8, group=16) as made:
        done(made.allreduce(x[comm.rank], out, lost))
    assert same_everywhere(comm, out)
    np.testing.assert_allclose(out + sum(comm.allgather(lost)), sum(x), atol=1e-3)
    if count:
        assert np.abs(out - sum(x)).max() <= comm.size * 0.5 * 100 / 127 * 1.001


def test_integers_are_as_wide_as_their_sum_needs(comm):
    with SharedScale(comm, 10, bits=8) as made:
        assert np.iinfo(made.integer).max >= 127 * comm.size and made.integer.itemsize == (1 if comm.size == 1 else 2)
    with SharedScale(comm, 10, bits=16) as made:
        done(made.allreduce(np.full(10, comm.rank + 1, np.float32), out := np.empty(10, np.float32)))
    np.testing.assert_allclose(out, comm.size * (comm.size + 1) / 2, rtol=1e-3)


def test_a_group_that_is_not_finite_is_so_on_all_ranks_and_no_other_is(comm):
    for odd in (np.nan, np.inf, -np.inf):
        x, out = np.ones(64, np.float32), np.empty(64, np.float32)
        if comm.rank == comm.size - 1:
            x[20] = odd
        with SharedScale(comm, 64, group=16) as made:
            done(made.allreduce(x, out))
        assert not np.isfinite(out[16:32]).any()
        np.testing.assert_array_equal(np.delete(out, slice(16, 32)), comm.size)


@pytest.mark.parametrize("wrong", [{"bits": 1}, {"bits": 17}, {"group": 0}])
def test_wrong_widths_are_refused(comm, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SharedScale(comm, 10, **wrong)


def test_a_part_of_the_sum_and_all_parts(comm):
    x = terms(comm, 1000)
    with TwoShot(comm, 1000, Multiples()) as made:
        mine = np.empty(made.parts.lengths[comm.rank], np.float32)
        done(made.reduce_scatter(x[comm.rank], mine))
        np.testing.assert_array_equal(mine, made.parts.of_vector(sum(x), comm.rank))
        done(made.allgather(mine, out := np.empty(1000, np.float32)))
        np.testing.assert_array_equal(out, sum(x))


@pytest.mark.parametrize("count,ranks,block", [(0, 3, 8), (1, 3, 8), (100, 3, 8), (7, 1, 8), (64, 8, 8), (63, 8, 8)])
def test_parts_are_whole_blocks(count, ranks, block):
    parts = Parts.of(count, ranks, block, lambda n: 2 * n)
    assert sum(parts.lengths) == count and sum(parts.sizes) == 2 * count
    assert all(start % block == 0 or start == count for start in parts.starts)
    vector = np.arange(count)
    np.testing.assert_array_equal(np.concatenate([parts.of_vector(vector, rank) for rank in range(ranks)]), vector)


# ---------------------------------------------------------------------------------------------- quantised


LAWS = {"two_shot": lambda p: math.sqrt(2) if p > 1 else 1, "ring": lambda p: math.sqrt((p + 1) / 2)}
"""The error of a sum of p terms over that of encoding once, both relative to what is encoded. To encode again what was
encoded and is alone in its sum loses nothing."""


def relative(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("way", LAWS)
@pytest.mark.parametrize("spec", ["int8_g128", "int4_g128"])
def test_the_error_of_a_quantised_sum_follows_the_law(comm, way, spec):
    count, codec = 1 << 16, Quantised(parse(spec))
    x = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(comm.size)]
    wire, once, out = np.empty(codec.nbytes(count), np.uint8), np.empty(count, np.float32), np.empty(count, np.float32)
    codec.encode(x[comm.rank], wire)
    codec.decode(wire, once)
    with WAYS[way](comm, count, codec) as made:
        done(made.allreduce(x[comm.rank], out))
    error, eps = relative(out, np.sum(x, axis=0, dtype="f8")), relative(once, x[comm.rank])
    assert error / eps == pytest.approx(LAWS[way](comm.size), rel=0.1)


@ways
@counts
def test_quantised_sums_of_any_length(comm, way, count):
    x, out, lost = terms(comm, count, 100), *np.full((2, count), np.nan, np.float32)
    codec = Quantised(grouped(8, 32, "fp32"))
    with WAYS[way](comm, count, codec) as made:
        done(made.allreduce(x[comm.rank], out, lost))
    assert same_everywhere(comm, out)
    np.testing.assert_allclose(out + sum(comm.allgather(lost)), sum(x), atol=2e-3 * comm.size)


def test_nan_in_one_group_of_one_rank_is_nan_in_that_group_on_all(comm):
    x, out = np.ones(256, np.float32), np.empty(256, np.float32)
    if comm.rank == comm.size - 1:
        x[70] = np.nan
    with TwoShot(comm, 256, Quantised(grouped(8, 32, "fp32"))) as made:
        done(made.allreduce(x, out))
    assert np.isnan(out[64:96]).all() and np.isfinite(np.delete(out, slice(64, 96))).all()


def test_a_vector_has_no_channels():
    with pytest.raises(ValueError, match="no channels"):
        Quantised(QuantSpec(8, granularity=PerChannel(0)))

"""Compressed gradients: what is lost is owed, all ranks agree, training gets there, and restarts go on bit for bit."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.tiers import default

from collectives import Communicator
from collectives.analysis.cost_functions import LinearCost
from collectives.compressed import HierarchicalAllreduce, QuantCodec, SegmentedAllreduce, compression_model
from collectives.compressed.compression_model import CompressionForecast, crowding, forecast
from collectives.runtime.requests.request_lists import wait_all
from parallel.checkpoint import checkpoint_files
from parallel.checkpoint.checkpoint_files import Checkpoint
from parallel.engine import compression
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.grad_compression import COMPRESSORS, parse
from parallel.engine.grad_compression.signs import SignCompressor
from parallel.engine.settings import Settings
from parallel.nn.flat_params import FlatParams
from parallel.optim.optimizers import SGD
from parallel.runtime.consistency_check import StepFailed
from quant import grouped

HOWS = ("int8", "int4", "qsgd:6", "terngrad", "sign", "topk:0.05", "topk:1", "powersgd:1", "powersgd:3")
hows = pytest.mark.parametrize("how", HOWS)


@pytest.fixture(scope="module")
def comm():
    with Communicator(MPI.COMM_WORLD) as made:
        yield made


def test_every_compressor_is_here():
    assert {how.partition(":")[0] for how in HOWS} == set(COMPRESSORS)


def bucket(comm):
    """All of a small model."""
    return GradBucket(0, FlatParams(tiny_models.model()).places, comm.size, comm.rank)


def filled(of, seed):
    """A gradient of noise: zeros between the tensors."""
    x = np.zeros(of.span.size, np.float32)
    for place in of.places:
        start = place.span.start - of.span.start
        x[start : start + place.size] = np.random.default_rng([seed, start]).standard_normal(place.size)
    return x


def exchanged(made, x, step=0):
    out, lost = x.copy(), np.full_like(x, np.nan)
    for requests in made.exchange(out, out, lost, step):
        wait_all(requests)
    return out, lost


@hows
def test_what_all_have_lost_is_missing_from_the_sum_that_all_have(comm, how):
    of = bucket(comm)
    made = parse(how)(comm, of, 0)
    for step in range(3):
        terms = [filled(of, 10 * step + rank) for rank in range(comm.size)]
        out, lost = exchanged(made, terms[comm.rank], step)
        assert len({array.tobytes() for array in comm.allgather(out)}) == 1
        np.testing.assert_allclose(out + sum(comm.allgather(lost)), sum(terms), atol=2e-5 * comm.size)
    made.close()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e38, 3e38])
@pytest.mark.parametrize("how", ["qsgd:2", "qsgd:4", "qsgd:8"])
def test_blocks_of_hardly_anything_and_of_next_to_too_much_are_sent(comm, how, size):
    """On one rank, whose row is all of it: the others do not wait for it in vain."""
    of = bucket(comm)
    x = np.zeros(of.span.size, np.float32)
    if comm.rank == comm.size - 1:
        x[0], x[256:512] = size, size
    made = parse(how)(comm, of, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        out, _ = exchanged(made, x)
    made.close()
    assert not out[1:256].any() and not out[512:].any()
    levels, value = 2 ** (int(how[-1]) - 1) - 1, np.float64(np.float32(size))
    step = 16 * value / levels  # of the terms; the sum's is that of elements which may be larger by a step
    within = 1.01 * (step + 16 * (value + step) / levels) + levels * 2.0**-149
    if value + within < 3e38:
        assert np.isfinite(out).all() and np.abs(out[256:512] - value).max() <= within


@hows
def test_what_is_not_fed_back_is_not_kept(comm, how):
    with engine(comm, how) as made:
        train(made, range(2))
        for reducer in made._gradients.reducers:
            assert (reducer.residual is not None) == reducer.compressor.feedback == parse(how).feedback
            assert (reducer._before is not None) == reducer.compressor.feedback


def test_all_of_the_largest_is_everything(comm):
    of = bucket(comm)
    out, lost = exchanged(parse("topk:1")(comm, of, 0), filled(of, comm.rank))
    np.testing.assert_allclose(out, sum(filled(of, rank) for rank in range(comm.size)), rtol=1e-6, atol=1e-6)
    assert not lost.any()


@pytest.mark.ranks(3)
@hows
def test_nodes_of_several_ranks_lose_nothing_either(how):
    nodes = [rank // 2 for rank in range(MPI.COMM_WORLD.size)]
    with Communicator(MPI.COMM_WORLD, nodes=nodes) as comm:
        test_what_all_have_lost_is_missing_from_the_sum_that_all_have(comm, how)


def test_a_matrix_of_low_rank_is_carried_whole(comm):
    of = bucket(comm)
    made, total = parse("powersgd:2")(comm, of, 0), 0
    x = filled(of, comm.rank)
    for matrix in made._matrices:
        matrix.of(x)[...] = np.outer(np.arange(matrix.rows) + 1, np.arange(matrix.columns) - comm.rank)
        total += 1
    assert total >= 3
    sent = x.copy()
    for _ in range(3):
        out, _ = exchanged(made, sent)
    np.testing.assert_allclose(out, sum(comm.allgather(sent)), rtol=1e-3, atol=1e-3 * np.abs(out).max())


def test_signs_are_a_bit_and_a_scale_for_every_block():
    codec = SignCompressor()
    for count in (0, 1, 255, 256, 257, 1000):
        x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        wire, out = np.zeros(codec.nbytes(count), np.uint8), np.empty(count, np.float32)
        assert len(wire) == 4 * -(-count // 256) + -(-count // 8)
        codec.encode(x, wire)
        codec.decode(wire, out)
        for start in range(0, count, 256):
            here = slice(start, min(start + 256, count))
            scale = np.abs(x[here]).mean()
            np.testing.assert_allclose(out[here], np.where(x[here] < 0, -scale, scale), rtol=1e-6)
        twice = out.copy()
        codec.add(wire, twice)
        np.testing.assert_array_equal(twice, 2 * out)


def test_the_size_of_signs_is_that_of_elements_and_not_of_what_fills_the_block(comm):
    """On any number of ranks, who have other parts of the vector; terms and sums alike, zeros behind others too."""
    of = bucket(comm)
    places = [(place.span.start - of.span.start, place.size, place.span.size) for place in of.places]
    assert any(size % 256 for _, size, _ in places)
    x = np.zeros(of.span.size, np.float32)
    for start, size, _ in places:
        x[start : start + size] = comm.rank + 1
    out, lost = exchanged(parse("sign")(comm, of, 0), x)
    for start, size, _ in places:
        here = slice(start, start + size)
        np.testing.assert_allclose(out[here], comm.size * (comm.size + 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(lost[here], 0, atol=1e-5)
    x = np.zeros(of.span.size, np.float32)
    start, size, _ = next(each for each in places if 1 < each[1] < 256)
    x[start] = size  # zeros of the tensor's own count
    out, _ = exchanged(parse("sign")(comm, of, 0), x)
    np.testing.assert_allclose(out[start : start + size], comm.size, rtol=1e-6)


def test_a_block_that_is_not_finite_stays_so():
    codec, x = SignCompressor(), np.ones(512, np.float32)
    x[300] = np.nan
    wire, out = np.zeros(codec.nbytes(512), np.uint8), np.empty(512, np.float32)
    codec.encode(x, wire)
    codec.decode(wire, out)
    assert np.isfinite(out[:256]).all() and not np.isfinite(out[256:]).any()


@pytest.mark.parametrize(
    "how,words",
    [
        ("zip", "expected one of int8"),
        ("", "expected one of int8"),
        ("sign:3", "takes no number"),
        ("qsgd:9", "bits, 2 to 8"),
        ("topk:0", "a share"),
        ("topk:1.5", "a share"),
        ("topk:x", "a share"),
        ("topk:nan", "a share"),
        ("powersgd:0", "a rank"),
        ("powersgd:1.5", "a rank"),
        ("powersgd:inf", "a rank"),
    ],
)
def test_what_makes_no_sense_is_refused(how, words):
    with pytest.raises(ValueError, match=words):
        parse(how)


# ---------------------------------------------------------------------------------------------- in an engine


def engine(comm, how, layout="dp", **settings):
    settings = {"first_bytes": 1, "bucket_bytes": 5000, **settings}
    optimizer = SGD(rate=0.05, momentum=0.9)
    return DataParallelEngine(
        tiny_models.model(), tiny_models.Squares(), comm, optimizer, Settings(layout=layout, compress=how, **settings)
    )


def parameters(made):
    return {place.parameter.name: place.parameter.data.copy() for place in made.flat.places}


def train(made, steps):
    return [made.step(tiny_models.batches(made.share(4), 0)).loss for _ in steps]


@pytest.mark.parametrize("how", default(HOWS, "int8", "sign", "topk:0.05", "powersgd:1"))
@pytest.mark.parametrize("layout", ["dp", "dp-naive", "dp-bucket"])
def test_it_learns_and_replicas_stay_the_same(comm, how, layout):
    with engine(comm, how, layout, check_every=1) as made:
        losses = train(made, range(40))
        assert losses[-1] < 0.8 * losses[0]
        assert sum(made.ledger.predicted.values()) == sum(made.ledger.allocated.values())


def test_all_elements_sent_is_plain_training(comm):
    with engine(comm, "topk:1") as made, engine(comm, "none") as plain:
        np.testing.assert_allclose(train(made, range(10)), train(plain, range(10)), rtol=1e-5)


@pytest.mark.parametrize("how", default(HOWS, "int4", "qsgd:6", "terngrad", "powersgd:3"))
def test_a_restart_goes_on_bit_for_bit(comm, how, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("here")) if comm.rank == 0 else None)
    with engine(comm, how) as made:
        train(made, range(5))
        path = checkpoint_files.save(comm, Path(folder), 5, made.tensor_slices(), {"engine": made.state()})
        went_on = train(made, range(5)), parameters(made)
    with engine(comm, how) as again:
        found = Checkpoint(comm, path)
        found.restore(again.tensor_slices())
        again.load(found.facts["engine"])
        again.refresh()
        resumed = train(again, range(5)), parameters(again)
    assert went_on[0] == resumed[0]
    for name, values in went_on[1].items():
        np.testing.assert_array_equal(values, resumed[1][name])


def owed(comm, made):
    """What all ranks owe together, of each tensor."""
    total = {}
    for reducer in made._gradients.reducers:
        for place in reducer.bucket.places:
            start = place.span.start - reducer.bucket.span.start
            if reducer.residual is None:
                continue
            total[place.parameter.name] = comm.allreduce(reducer.residual[start : start + place.size].astype("f8"))
    return total


def test_other_ranks_owe_as_much(comm, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("here")) if comm.rank == 0 else None)
    with engine(comm, "sign") as made:
        train(made, range(5))
        path = checkpoint_files.save(comm, Path(folder), 5, made.tensor_slices(), {"engine": made.state()})
        before = owed(comm, made)
    with comm.Split(0 if comm.rank == 0 else 1) as few, engine(few, "topk:0.1") as other:
        found = Checkpoint(few, path)
        found.restore(other.tensor_slices())
        other.load(found.facts["engine"])
        other.refresh()
        after = owed(few, other)
    assert any(values.any() for values in before.values())
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, rtol=1e-5, atol=1e-7)


@hows
def test_a_gradient_that_is_not_finite_ends_nothing_but_the_step(comm, how):
    with engine(comm, how) as made:
        train(made, range(3))
        before, due = parameters(made), owed(comm, made)
        mine = tiny_models.batches(made.share(comm.size), 1)
        huge = [(number, x, np.full_like(y, 3e38 if number == 0 else 1), samples) for number, x, y, samples in mine]
        with pytest.raises(StepFailed), np.errstate(all="ignore"):
            made.step(huge)
        for name, values in parameters(made).items():
            np.testing.assert_array_equal(values, before[name])
        for name, values in owed(comm, made).items():
            np.testing.assert_array_equal(values, due[name])
        assert all(np.isfinite(train(made, range(3))))


@pytest.mark.parametrize("how", ["int4", "topk:0.05"])
def test_a_step_that_the_loss_scale_skips_leaves_what_is_owed(comm, how):
    """Whatever its buckets have sent was for nothing, of those too that have not overflown."""
    with engine(comm, how, precision="fp16") as made:
        made.scaling.value = 2.0**10
        train(made, range(3))
        due, at = owed(comm, made), parameters(made)
        made.scaling.value = 2.0**30
        skipped = made.step(tiny_models.batches(made.share(4), 0)).skipped
        assert skipped and any(values.any() for values in due.values())
        for name, values in owed(comm, made).items():
            np.testing.assert_array_equal(values, due[name])
            np.testing.assert_array_equal(parameters(made)[name], at[name])


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"layout": "zero1"}, "every rank has the whole sum"),
        ({"reproducible": True}, "canonical order"),
        ({"precision": "fp64"}, "float32"),
        ({"how": "zip"}, "expected one of"),
    ],
)
def test_an_engine_refuses_what_cannot_be(comm, settings, words):
    with pytest.raises(ValueError, match=words):
        engine(comm, **{"how": "sign", **settings})


def test_auto_declines_within_a_node():
    with Communicator(MPI.COMM_WORLD, nodes=[0] * MPI.COMM_WORLD.size) as made, engine(made, "auto") as training:
        assert training.remarks == ("compress auto: plain is quicker within a node",)
        assert training._plan.compress is None


def test_auto_takes_what_it_foresees_to_be_quickest_between_nodes(monkeypatch):
    """All ranks alike; what is measured is the machine's, so the forecasts are given."""
    made_of = {8: CompressionForecast(3.0, 1.0, 1.0), 4: CompressionForecast(3.0, 0.5, 2.0)}
    monkeypatch.setattr(compression, "forecast", lambda comm, count, codec, wire, feedback: made_of[codec.spec.bits])
    nodes = list(range(MPI.COMM_WORLD.size))
    with Communicator(MPI.COMM_WORLD, nodes=nodes) as comm:
        found = compression.choose(comm, 1000)
        made_of.update({8: CompressionForecast(1.0, 1.0, 1.0), 4: CompressionForecast(1.0, 1.0, 1.0)})
        declined = compression.choose(comm, 1000)
    if comm.size > 1:
        assert found[0] == "int8" and "1 s of kernels" in found[1]
        assert declined[0] == "none" and declined[1].startswith("plain is quicker (int8")
    else:
        assert found == declined == ("none", "plain is quicker within a node")


def test_ranks_of_a_node_add_up_before_they_encode(monkeypatch):
    """With two ranks on a node, the leaders' sum; the forecast is of that too, and of what it takes within nodes."""
    nodes = [rank // 2 for rank in range(MPI.COMM_WORLD.size)]
    several = MPI.COMM_WORLD.size > 2
    codec, wire = QuantCodec(grouped(8, 256, "fp32")), LinearCost(0, 1e-9)
    with Communicator(MPI.COMM_WORLD, nodes=nodes) as comm, engine(comm, "int8") as made:
        sums = [reducer.compressor._sum for reducer in made._gradients.reducers]
        assert {type(each) for each in sums} == {HierarchicalAllreduce if several else SegmentedAllreduce}
        train(made, range(2))
        for each in sums:
            assert not several or (each._between is None) == bool(comm.rank % 2)
        monkeypatch.setattr(compression_model, "fitted", lambda comm: LinearCost(0, 2e-9))
        found = forecast(comm, 1 << 20, codec, wire)
    inside = 4 * 2e-9 * (1 << 20) if several else 0
    assert found.messages == pytest.approx(1e-9 * codec.nbytes(1 << 20) + inside, rel=0.01)


def test_noting_what_is_lost_takes_time_too(comm, monkeypatch):
    seconds = iter([1.0, 2.0, 4.0, 8.0] * 2)
    monkeypatch.setattr(compression_model, "_median", lambda run: next(seconds))
    monkeypatch.setattr(compression_model, "crowding", lambda nodes, cores: 1.0)
    codec, twice = QuantCodec(grouped(8, 256, "fp32")), 1 + 1 / comm.size
    for feedback, noting in ((False, 0), (True, 10 * twice)):
        made = forecast(comm, 100, codec, LinearCost(0, 0), feedback=feedback)
        assert made.kernels == pytest.approx(twice + 4 + 2 + noting)


def test_kernels_take_longer_where_ranks_share_cores(comm):
    assert crowding([0, 0], [{0}, {1}]) == 1
    assert crowding([0, 0, 1, 1, 1, 1], [{0, 1}] * 6) == 2
    assert crowding([0, 1], [{0, 1, 2}, {0}]) == 1
    made = forecast(comm, 1 << 12, QuantCodec(grouped(8, 256, "fp32")))
    assert min(made.plain, made.messages) >= 0 and made.kernels > 0 and made.encoded == made.messages + made.kernels

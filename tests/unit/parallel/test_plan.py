"""How a vector is divided into buckets, slots and slices; what a training will take; a gradient being filled in."""

import itertools

import numpy as np
import pytest
from support import tiny_models

from parallel.engine.data_parallel.ddp import MOST_REQUESTS
from parallel.engine.data_parallel.grad_bucket import GradBucket, buckets_of
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.param_store import resident_slots
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.data_parallel.zero import Zero3, slots, users_of
from parallel.engine.memory_ledger import FORMULAS, predict_part
from parallel.engine.microbatch_pass import MicrobatchPass, empty_pass
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams, ParamSpan, Span
from parallel.nn.flat_params import buckets as divide
from parallel.nn.operator import Parameter, PassMode, constant
from parallel.optim.precision import PRECISIONS
from parallel.runtime.profiler import Profiler


def plan(ranks=2, rank=0, model=None, **settings):
    model = model or tiny_models.model()
    settings = {"precision": PRECISIONS["fp32"], "reproducible": False, **settings}
    flat = FlatParams(model)
    return PartitionSpec(tuple(model.items), flat, ranks, rank, bucket_bytes=5000, first_bytes=1, **settings)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_buckets_divide_the_vector(layout, ranks):
    here = plan(ranks)
    buckets = buckets_of(LAYOUTS[layout].gradients.cut(here), here)
    spans = sorted(bucket.span for bucket in buckets)
    assert spans[0].start == 0 and spans[-1].stop == here.flat.length
    assert all(one.stop == other.start for one, other in itertools.pairwise(spans))
    parts = sorted(part for bucket in buckets for part in bucket.parts if part.size)
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))


@pytest.mark.parametrize(
    ("nbytes", "first", "expected"),
    [
        (3000, 1, [[5], [4, 3], [2, 1], [0]]),
        (3000, 1500, [[5, 4], [3, 2], [1, 0]]),  # the last tensor alone is too short
        (3000, 3000, [[5, 4, 3], [2, 1, 0]]),
        (1, 1, [[5], [4], [3], [2], [1], [0]]),
        (1 << 30, 1, [[5], [4, 3, 2, 1, 0]]),
        (1 << 30, 1 << 30, [[5, 4, 3, 2, 1, 0]]),
    ],
)
def test_no_bucket_is_too_small(nbytes, first, expected):
    sizes, at, places = (256, 768, 512, 512, 256, 256), 0, []
    for number, size in enumerate(sizes):
        places.append(ParamSpan(number, Span(at, at + size)))
        at += size
    found = divide(places, nbytes, first)
    assert [[place.parameter for place in reversed(bucket)] for bucket in found] == expected


def test_buckets_that_have_requests_are_few():
    here = plan(model=tiny_models.model(50, 60))
    assert len(here.flat.places) > MOST_REQUESTS + 1
    for layout in ("dp-bucket", "dp"):
        assert 10 < len(LAYOUTS[layout].gradients.cut(here)) <= MOST_REQUESTS + 1
    assert len(LAYOUTS["zero2"].gradients.cut(here)) > MOST_REQUESTS + 1


def test_a_bucket_of_stage_3_is_of_one_unit_or_tied():
    here = plan()
    buckets = buckets_of(Zero3.cut(here), here)
    names = {users: [p.parameter.name for p in b.places] for users, b in zip(users_of(buckets, here), buckets)}
    assert names[(0, 4)] == ["0.weight"] and names[(0,)] == ["0.bias"] and names[(4,)] == ["4.bias"]


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_not_used_twice_at_once(seed):
    random = np.random.default_rng(seed)
    users = [tuple(sorted(random.integers(0, 9, 2).tolist())) for _ in range(12)]
    sizes = random.integers(1, 50, 12).tolist()
    chosen, lengths = slots(users, sizes)
    for unit in range(9):
        busy = [slot for slot, units in zip(chosen, users) if units[0] <= unit <= units[-1]]
        assert len(set(busy)) == len(busy)
    assert all(lengths[slot] >= size for slot, size in zip(chosen, sizes))
    assert len(lengths) == max(sum(u[0] <= unit <= u[-1] for u in users) for unit in range(9))


def test_neighbouring_units_share_no_slot():
    users = [(0,), (0, 3), (0,), (1,), (2,), (3,)]
    taken = resident_slots(users)
    for one, other in ((0, 1), (1, 2), (2, 3)):
        here = [slot for slot, units in zip(taken, users) if one in units or other in units]
        assert len(set(here)) == len(here)
    assert len(set(taken)) < len(taken)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_stage_takes_less(ranks, precision):
    """Of what it divides: the optimiser's state, then gradients, then weights."""
    of = {}
    for layout in FORMULAS:
        here = plan(ranks, model=tiny_models.model(200, 6), precision=PRECISIONS[precision])
        of[layout] = predict_part(here, layout, 2, [()] * ranks)
    kinds = PRECISIONS[precision].bytes_per_parameter(2)
    length = here.flat.length
    assert of["dp"]["parameters"] == length * kinds["weights"] and of["dp"]["gradients"] == length * kinds["gradients"]
    assert of["dp"]["optimizer"] == length * (kinds["master"] + kinds["optimizer"])
    nearly = 1 + 6 * ranks * 256 * 4 / length * 10  # parts are whole blocks
    for layout, kind in (
        ("zero1", "optimizer"),
        ("zero2", "optimizer"),
        ("zero3", "optimizer"),
        ("zero3", "parameters"),
    ):
        assert of["dp"][kind] <= ranks * of[layout][kind] <= nearly * of["dp"][kind]
    if ranks > 2:
        assert of["zero3"]["gradients"] < of["dp"]["gradients"]


def filling():
    first, second = (Parameter(shape, constant(0.0)) for shape in ((3, 5), (300,)))
    model = tiny_models.Dense(3, 5)
    model.weight, model.bias = first, second
    bucket = GradBucket(0, FlatParams(model).places, 1, 0)
    bucket.use_scratch(np.empty(300))
    return bucket, first, second, np.full(bucket.span.size, np.nan)


def test_a_gradient_is_written_then_added_to():
    fill, first, second, vector = filling()
    fill.reset(vector)
    for times in (1, 2):
        fill.begin_backward()
        fill.accumulate(second, lambda out: out.fill(2.0))
        fill.accumulate(first, lambda out: out.fill(1.0))
        assert (vector[:15] == times).all() and (vector[256:556] == 2 * times).all()
    fill.complete(gaps=True)
    assert (vector[15:256] == 0).all() and (vector[556:] == 0).all()


def test_a_tensor_may_come_twice_until_the_bucket_is_shut():
    fill, first, second, vector = filling()
    fill.reset(vector)
    fill.begin_backward()
    fill.accumulate(first, lambda out: out.fill(1.0))
    fill.accumulate(first, lambda out: out.fill(2.0))
    fill.use_scratch(np.empty(0))  # no tensor has several uses: no memory was foreseen
    fill.reset(vector)
    fill.begin_backward()
    for value in (1.0, 2.0, 4.0):
        fill.accumulate(second, lambda out, value=value: out.fill(value))
    fill.end_backward()
    assert (vector[:15] == 3).all() and (vector[256:556] == 7).all()
    with pytest.raises(ValueError, match="came after the backward had left the units that hold it"):
        fill.accumulate(second, lambda out: out.fill(1.0))


def test_what_got_nothing_is_zero():
    fill, first, _, vector = filling()
    fill.reset(vector)
    fill.begin_backward()
    fill.accumulate(first, lambda out: out.fill(1.0))
    fill.complete()
    assert (vector[256:] == 0).all() and (vector[:15] == 1).all()


def test_a_motion_that_fails_goes_on_as_nobody():
    unit = tiny_models.Dense(7, 7)
    flat = FlatParams(Sequential([unit]))
    flat.bind(np.zeros(flat.length))
    number, x, y, samples = tiny_models.batches([0])[0]
    broken = MicrobatchPass(x[:, :3], y, PassMode(True, 0, number, samples), tiny_models.Squares())
    for pass_ in (broken, empty_pass()):
        pass_.forward([unit], 0)
        pass_.score(lambda scores, y: 1.0)
        pass_.loss_backward(1.0)
        pass_.backward(unit, lambda parameter, compute: pytest.fail("a gradient of nothing"))
        assert pass_.total == pass_.measured == 0 and not pass_.saved
    assert isinstance(broken.problem, ValueError) and empty_pass().problem is None


def test_seconds_add_up():
    recorder = Profiler()
    recorder.note("communication", "a", 1.0, 3.0)
    recorder.note("communication", "b", 3.0, 3.5)
    with recorder("compute", "c"):
        pass
    assert recorder.seconds["communication"] == 2.5 and 0 <= recorder.seconds["compute"] < 1 and not recorder.events

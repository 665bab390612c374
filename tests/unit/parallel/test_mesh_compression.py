"""Compressed gradients beside tp, cp and pp: equal copies, sums of the same bits, residuals on other meshes."""

from itertools import pairwise

import numpy as np
import pytest
from conformance.composition import Composition
from conformance.composition_run import difference
from conformance.thread_communicator import run_threads
from support.tiers import default

from parallel.checkpoint.tensor_slices import TensorSlice
from parallel.engine import compression
from parallel.engine.data_parallel.error_feedback import ErrorFeedbackReducer
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.grad_compression import parse
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.gated import gated_transformer
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.operator import ArraySpec
from parallel.nn.placement import Copies, Replicate, Shard
from parallel.optim.optimizers import SGD
from parallel.runtime.consistency_check import ParameterMismatch
from parallel.sharding.mesh import Mesh
from parallel.trainer.engine import Engine

TOKENS, LENGTH, SAMPLES = 37, 4, 6
HOWS = ("int8", "int4", "qsgd:6", "terngrad", "sign", "topk:0.05", "powersgd:1")
BY_BLOCK = ("int8", "int4", "sign")
"""Compressions of which a block of the sum depends on nothing but that block of the ranks."""


def model():
    """Heads and tokens that no mesh divides, and one key/value head, of which ranks have copies."""
    return gated_transformer(TOKENS, LENGTH, 1, 3, 12, kv_heads=1)


def options(how, mesh, **more):
    more = {"bucket_bytes": 3000, "first_bytes": 1, "micro_batch": 1, "batch": SAMPLES, "check_every": 1, **more}
    return Settings(compress=how, mesh=mesh, **more)


def optimizer():
    return SGD(rate=0.05, momentum=0.9)


def shapes(samples):
    return tuple(ArraySpec((samples, LENGTH), np.dtype(np.int64)) for _ in range(2))


def step(engine, number):
    return engine.step(*np.random.default_rng(number).integers(0, TOKENS, (2, SAMPLES, LENGTH)))


def on_mesh(comm, how, mesh, steps, **more):
    with Engine(model(), SoftmaxCrossEntropy(), comm, optimizer(), options(how, mesh, **more)) as engine:
        losses = [step(engine, number).loss for number in range(steps)]
        ledger = engine.inner.ledger
        assert ledger.allocated == ledger.predicted
        return losses, engine.state_dict(), ledger.predicted


@pytest.mark.parametrize("how", default(HOWS, "int4", "qsgd:6", "topk:0.05"))
@pytest.mark.parametrize("mesh", default(("dp=2,tp=2", "tp=3,dp=2", "dp=2,cp=2,tp=2"), "dp=2,tp=2"))
def test_copies_stay_equal_and_the_memory_is_as_forecast(how, mesh):
    ranks = Mesh.parse(mesh).size
    found = run_threads(ranks, lambda comm: on_mesh(comm, how, mesh, 4))
    losses, _, _ = found[0]
    assert all(one[0] == losses for one in found)
    for rank, (_, _, predicted) in enumerate(found):
        workload = Workload(rank, ranks, shapes, [(1,) * SAMPLES])
        forecast = DataParallelEngine.forecast(
            model(), SoftmaxCrossEntropy(), optimizer(), workload, options(how, mesh)
        )
        assert forecast.predicted == predicted


def test_buckets_that_mix_copies_with_shards_would_make_copies_differ(monkeypatch):
    monkeypatch.setattr(PartitionSpec, "runs", lambda self: [self.flat.places])
    with pytest.raises(ParameterMismatch, match="after step"):
        run_threads(4, lambda comm: on_mesh(comm, "topk:0.05", "dp=2,tp=2", 3))


@pytest.mark.parametrize("how", ["none", *HOWS])
def test_buckets_of_compressed_gradients_are_on_the_same_ranks(how):
    def kinds(comm):
        with Engine(model(), SoftmaxCrossEntropy(), comm, optimizer(), options(how, "tp=2")) as engine:
            buckets = engine.inner._gradients.buckets
            places = [place for bucket in reversed(buckets) for place in bucket.places]
            assert [one.span.start for one in places] == sorted(one.span.start for one in places)
            assert all(one.span.stop == other.span.start for one, other in pairwise(places))
            return [{place.parameter.placement for place in bucket.places} for bucket in buckets]

    found = [kind for some in run_threads(2, kinds) for kind in some]
    assert (max(map(len, found)) == 1) == (how != "none")
    assert {type(one) for some in found for one in some} == {Replicate, Shard, Copies}


@pytest.mark.parametrize("how", BY_BLOCK)
def test_a_first_step_has_the_bits_of_the_mesh_without_tp(how):
    """With as many logical shards; from the second on, the ranks that keep the error of a sum are others."""
    _, expected, _ = run_threads(2, lambda comm: on_mesh(comm, how, "dp=2", 1, tensor_shards=2))[0]
    _, found, _ = run_threads(4, lambda comm: on_mesh(comm, how, "dp=2,tp=2", 1))[0]
    _, plain, _ = run_threads(4, lambda comm: on_mesh(comm, "none", "dp=2,tp=2", 1))[0]
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert not all(np.array_equal(found[name], plain[name]) for name in expected)


def test_auto_is_one_choice_for_all_ranks(monkeypatch):
    """Ranks with the same shards of a stage measure; others may find another compression the fastest."""
    measured = []

    def choose(comm, count):
        measured.append((comm.Get_size(), count))
        return ("int8" if comm.Get_group().members[0] == 0 else "none"), "it is the fastest"

    monkeypatch.setattr(compression, "choose", choose)
    settings, mesh = Settings(compress="auto"), Mesh.parse("pp=2,dp=3,tp=2")
    found = run_threads(12, lambda comm: compression.resolve_compression(settings, comm, mesh, 4000))
    assert {(one.compress, remarks) for one, remarks in found} == {("int8", ("compress auto: it is the fastest",))}
    assert measured == [(3, 1000)] * 12


CONTINUED = (
    Composition(mesh="dp=2,tp=2", heads=3, head_width=4, next_mesh="dp=4", compress="sign"),
    Composition(mesh="dp=4", heads=4, head_width=4, next_mesh="tp=4", compress="int4"),
    Composition(mesh="dp=2,tp=2", family="gated", heads=4, head_width=4, next_mesh="cp=2,tp=2", compress="topk:0.1"),
    Composition(mesh="pp=2,dp=2,tp=2", layout="pp:zb-h1", heads=2, next_mesh="dp=4,tp=2", compress="powersgd:1"),
    Composition(mesh="dp=2,cp=2,tp=2", heads=2, length=8, next_mesh="tp=4,dp=2", compress="int8"),
)


def continued(composition):
    """The composition with other data in each of several steps, before and after a checkpoint."""
    changes = {"precision": "fp32", "microbatches": 4, "steps": 2, "kv_heads": (composition.family == "gated") * 1}
    return Composition(**{**vars(composition), **changes})


@pytest.mark.parametrize("composition", default(CONTINUED, *CONTINUED[:3]), ids=str)
def test_nothing_is_lost_on_other_meshes(composition):
    assert not difference(continued(composition))


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_residual_that_is_lost_is_found(lost, monkeypatch):
    """Those of the first mesh, and those that the second one takes from the checkpoint."""
    whole = ErrorFeedbackReducer.tensor_slices

    def forgetful(self):
        self.residual.fill(0)
        return whole(self)

    if lost == "before":
        monkeypatch.setattr(ErrorFeedbackReducer, "tensor_slices", forgetful)
    else:
        monkeypatch.setattr(TensorSlice, "sources", lambda self, there: [] if self.terms else [self.name])
    assert "differs from one rank" in difference(continued(CONTINUED[0]))


def test_a_restart_continues_bit_for_bit(tmp_path):
    """Factors of shards are in the checkpoint too."""

    def run(comm):
        found = []
        for first in (True, False):
            settings = options("powersgd:1", "dp=2,tp=2")
            with Engine(model(), SoftmaxCrossEntropy(), comm, optimizer(), settings) as engine:
                if first:
                    _ = [step(engine, number) for number in range(3)]
                    engine.save(tmp_path)
                else:
                    engine.load(tmp_path)
                found.append([step(engine, number).norm for number in range(3, 6)])
        return found

    assert all(went_on == again for went_on, again in run_threads(4, run))


@pytest.mark.parametrize("how", ["int8", "int4", "qsgd:6", "terngrad", "sign", "topk:0.1", "powersgd:1"])
def test_frozen_parameters_have_no_gradient_and_keep_their_residuals(how):
    """Else the norm, by which others are clipped, has residuals, which are lost."""

    def run(comm):
        made = model()
        with Engine(made, SoftmaxCrossEntropy(), comm, optimizer(), options(how, "dp=2,tp=2")) as engine:
            for number in range(2):
                step(engine, number)
            made.requires_grad_(False)
            before = [one.array.copy() for one in engine.inner.tensor_slices() if "/lost/" in one.name]
            norm = step(engine, 2).norm
            after = [one.array.copy() for one in engine.inner.tensor_slices() if "/lost/" in one.name]
            return norm, all(map(np.array_equal, before, after)), len(before)

    for norm, is_kept, count in run_threads(4, run):
        assert norm == 0 and is_kept and (count > 0) == parse(how).feedback

"""Batches counted in tokens: any number of ranks has the mean loss and the bits of one; overlapping shares train."""

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.training_states import differing, whole

from collectives import Communicator
from parallel import Engine
from parallel.asynchronous.decentralized.replica_engine import ReplicaEngine
from parallel.data.sequences import PaddedSequences, TokenSampler
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.optim.optimizers import SGD, AdamW
from parallel.pipeline.pipeline_engine import Pipeline


def trained(comm, kind, **settings):
    random = np.random.default_rng(0)
    data = PaddedSequences([random.integers(0, 20, count) for count in random.integers(2, 17, 40)])
    sampler = TokenSampler(data.lengths, 64, 24, seed=1)
    model = transformer(20, 16, 2, 2, 8)
    with kind(model, SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), Settings(reproducible=True, **settings)) as engine:
        reports = []
        for step in sampler.steps(0):
            report = engine.step(list(step.batches(data, engine.share(len(step.parts)))))
            assert report.count == data.lengths[np.concatenate(step.parts)].sum()
            reports.append(report.loss)
        assert engine.ledger.predicted == engine.ledger.allocated
        return reports, whole(comm, engine)


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b"])
def test_steps_of_tokens_are_those_of_one_rank(comm, layout):
    with Communicator(MPI.COMM_SELF) as alone:
        expected = trained(alone, DataParallelEngine)
    pipeline = layout.startswith("pp")
    if pipeline and comm.size > 4:
        pytest.skip("more stages than units")
    options = {"mesh": f"pp={comm.size}", "microbatches": 12} if pipeline else {}
    losses, state = trained(comm, Pipeline if pipeline else DataParallelEngine, layout=layout, **options)
    assert losses == expected[0] and differing(state, expected[1]) == []


def test_an_engine_cuts_sequences_by_tokens(comm):
    random = np.random.default_rng(0)
    data = PaddedSequences([random.integers(0, 20, count) for count in random.integers(2, 17, 40)])
    model, optimizer = transformer(20, 16, 2, 2, 8), AdamW(lr=0.01)
    with Engine(model, SoftmaxCrossEntropy(), comm, optimizer, batch_tokens=64, accumulate=2) as engine:
        counts = [engine.step(batches).count for batches in engine.batches(data)]
        assert sum(counts) == data.lengths.sum() and max(counts) <= 64 < counts[0] + max(data.lengths)
    with (
        Engine(model, SoftmaxCrossEntropy(), comm, optimizer, batch_tokens=64, micro_batch=2) as engine,
        pytest.raises(ValueError, match="micro_batch: it counts samples, batch_tokens tokens; found 2"),
    ):
        engine.batches(data)


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_pipeline_gets_as_many_micro_batches_as_it_plans(comm, reproducible):
    """Sequences of five targets, of which one fits into the eighth part of 64 tokens: not twelve micro-batches."""
    if comm.size > 4:
        pytest.skip("more stages than units")
    data = PaddedSequences([np.arange(6)] * 24)
    losses = {}
    for layout in ("pp:1f1b", "dp"):
        options = {"layout": layout, "batch_tokens": 64, "reproducible": reproducible}
        model, optimizer = transformer(20, 16, 2, 2, 8), AdamW(lr=0.01)
        with Engine(model, SoftmaxCrossEntropy(), comm, optimizer, **options) as engine:
            reports = [engine.step(batches) for batches in engine.batches(data)]
        assert [report.count for report in reports] == [60, 60]
        losses[layout] = [report.loss for report in reports]
    assert losses["dp"] == (losses["pp:1f1b"] if reproducible else pytest.approx(losses["pp:1f1b"]))


def test_replicas_train_on_overlapping_shares(comm):
    """Of six micro-batches each of three ranks has two, and one of the next; a test takes every sample once."""
    with ReplicaEngine(
        tiny_models.model(),
        tiny_models.Squares(),
        comm,
        SGD(rate=0.05),
        Settings(layout="local", tau=1, overlap=0.5),
    ) as engine:
        shares = comm.allgather(list(engine.train_share(2 * comm.size)))
        assert all(len(share) == min(3, 2 * comm.size) for share in shares)
        report = engine.step(tiny_models.batches(engine.train_share(2 * comm.size)))
        assert report.count == 5 * sum(map(len, shares))
        assert engine.evaluate(tiny_models.batches(engine.share(2 * comm.size))).count == 10 * comm.size
        engine.quiesce()

"""Pipelines whose stages share operators and sequences, on ranks that are threads: errors on one rank."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads

from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.nn.norm import LayerNorm
from parallel.optim.optimizers import AdamW
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.runtime.consistency_check import ParameterMismatch, StepFailed

TOKENS, LENGTH, HEADS, WIDTH, PARTS = 13, 8, 2, 8, 3
MESHES = ("pp=2,tp=2", "pp=2,cp=2", pytest.param("pp=2,cp=2,tp=2", marks=pytest.mark.full))


class FaultyNorm(LayerNorm):
    """Layer normalisation that raises an error in the pass that `fault` names."""

    def __init__(self, width, fault):
        super().__init__(width)
        self.fault = fault

    def forward(self, x, run):
        if "forward" in self.fault:
            raise ValueError("it is broken")
        return super().forward(x, run)

    def backward(self, dy, saved, grads):
        if "backward" in self.fault:
            raise ValueError("it is broken")
        return super().backward(dy, saved, grads)


def engine(comm, mesh, fault=(), **settings):
    model = transformer(TOKENS, LENGTH, 2, HEADS, WIDTH)
    model.items[1].items[0].inner.items[0] = FaultyNorm(WIDTH, fault)
    model.items[2].items[0].inner.items[0] = FaultyNorm(WIDTH, fault)
    settings = Settings(layout="pp:zb-h1", mesh=mesh, microbatches=PARTS, first_bytes=1, **settings)
    return Pipeline(model, SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings)


def batches(numbers):
    for number in numbers:
        x, y = np.random.default_rng(number).integers(0, TOKENS, (2, 1, LENGTH))
        yield number, x, y, np.array([number])


def ranks_of(mesh):
    return int(np.prod([int(axis[-1]) for axis in mesh.split(",")]))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_operator_that_raises_on_one_rank(mesh, where):
    """In either stage: no rank waits, nothing is updated, and the training goes on."""

    def rank_main(comm):
        fault = set()
        with engine(comm, mesh) as whole, engine(comm, mesh, fault) as made:
            for failing in (1, comm.Get_size() - 1):
                fault |= {where} if comm.Get_rank() == failing else set()
                with pytest.raises(StepFailed, match=rf"nothing was updated; rank {failing}: ValueError: it is broken"):
                    made.step(list(batches(made.share(PARTS))))
                fault.clear()
                report, expected = (one.step(list(batches(one.share(PARTS)))) for one in (made, whole))
                assert (report.loss, report.norm) == (expected.loss, expected.norm)

    run_threads(ranks_of(mesh), rank_main)


@pytest.mark.parametrize("mesh", MESHES)
def test_copies_are_compared_along_every_axis(mesh):
    """Another value of a gain on one rank of a stage: along cp it remains, along tp other gradients change too."""

    def rank_main(comm):
        with engine(comm, mesh, check_every=1) as made:
            made.step(list(batches(made.share(PARTS))))
            if comm.Get_rank() == 1:
                made.flat.by_name["1.0.inner.0.gain"].parameter.data[3] += 0.5
            with pytest.raises(ParameterMismatch, match=r"after step 1 parameter .* of rank"):
                made.step(list(batches(made.share(PARTS))))

    run_threads(ranks_of(mesh), rank_main)

"""Errors on one rank of a mesh: raised on all ranks, nothing is updated, and the training can go on."""

import numpy as np
import pytest
from support.tiers import default

from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.nn.norm import LayerNorm
from parallel.optim.optimizers import AdamW
from parallel.runtime.consistency_check import ParameterMismatch, StepFailed
from parallel.trainer.strategies import strategy_of

TOKENS, CONTEXT, HEADS, WIDTH = 29, 12, 12, 24


class Fault:
    """Pass in which a norm raises an error; shared by the copies of a model that is cut."""

    active = ""

    def expect_none(self, now):
        if self.active == now:
            raise ValueError("it is broken")


class FaultyNorm(LayerNorm):
    """Layer normalisation that raises an error in the pass named by its fault."""

    def __init__(self, width, fault):
        super().__init__(width)
        self.fault = fault

    def forward(self, x, run):
        self.fault.expect_none("forward")
        return super().forward(x, run)

    def backward(self, dy, saved, grads):
        self.fault.expect_none("backward")
        return super().backward(dy, saved, grads)


def model(fault, layers=1):
    """Transformer whose blocks, and the output, have a norm that can fail."""
    made = transformer(TOKENS, CONTEXT, layers, HEADS, WIDTH)
    for block in made.items[1:-1]:
        block.items[0].inner.items[0] = FaultyNorm(WIDTH, fault)
    made.items[-1].items[0] = FaultyNorm(WIDTH, fault)
    return made


def batches(numbers, at=None, what="x"):
    """Micro-batches of one sequence; `at` is the position of a token, or target, that is out of range."""
    for number in numbers:
        x, y = np.random.default_rng(number).integers(0, TOKENS, (2, 1, CONTEXT))
        if at is not None:
            {"x": x, "y": y}[what][0, at] = TOKENS
        yield number, x, y, np.array([number])


def engine(comm, mesh, fault=None, layers=1, **settings):
    settings = Settings(**{"first_bytes": 1, **mesh, **settings})
    kind = strategy_of(settings).engine_class(settings)
    return kind(model(fault or Fault(), layers), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings)


def meshes(ranks):
    """Settings of meshes along which operators exchange."""
    yield {"mesh": f"cp={ranks}", "sequence_parts": 2 * ranks}
    yield {"mesh": f"tp={ranks}"}
    yield {"mesh": f"tp={ranks}", "sequence_parallel": True, "tensor_shards": 2 * ranks}
    if ranks > 2 and ranks % 2 == 0:
        yield {"mesh": f"cp=2,tp={ranks // 2}"}


@pytest.mark.parametrize("layout", ["dp", "zero3"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_operator_that_raises_on_one_rank(comm, layout, where):
    last = comm.Get_size() - 1
    for mesh in meshes(comm.Get_size()):
        fault = Fault()
        with engine(comm, mesh, layout=layout) as whole, engine(comm, mesh, fault, layout=layout) as made:
            for _ in range(2):
                fault.active = where if comm.Get_rank() == last else ""
                with pytest.raises(StepFailed, match=rf"nothing was updated; rank {last}: ValueError: it is broken"):
                    made.step(list(batches(made.share(3))))
                fault.active = ""
                report, expected = (one.step(list(batches(one.share(3)))) for one in (made, whole))
                assert (report.loss, report.norm) == (expected.loss, expected.norm)


def pipelines(ranks):
    """Settings of pipelines whose stages are cut, or have parts of sequences, where there are ranks for it."""
    if ranks % 2:
        yield {"mesh": f"pp={ranks}"}
        return
    for names in (("tp",), ("cp",)) if ranks < 8 else (("cp", "tp"),):
        sizes = [2] * (len(names) - 1) + [ranks // 2 ** len(names)]
        mesh = ",".join(f"{name}={size}" for name, size in zip(names, sizes))
        yield {"mesh": f"pp=2,{mesh}"}
        if "cp" in names:
            shards = {"tensor_shards": sizes[-1]} if "tp" in names else {}
            yield {"mesh": f"pp=2,{mesh}", "reproducible": True, "sequence_parts": 4 * sizes[0], **shards}


@pytest.mark.parametrize("schedule", default(["1f1b", "zb-h1", "interleaved"], "zb-h1"))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stage_or_a_shard_that_raises(comm, schedule, where):
    """Errors are raised on all ranks, in that step; the pipeline goes on as one without errors."""
    last, layers = comm.Get_size() - 1, 4
    for mesh in pipelines(comm.Get_size()):
        options, fault = {**mesh, "layout": f"pp:{schedule}", "microbatches": 3}, Fault()
        with engine(comm, options, layers=layers) as whole, engine(comm, options, fault, layers) as made:
            for victim in dict.fromkeys((0, last)):
                fault.active = where if comm.Get_rank() == victim else ""
                with pytest.raises(StepFailed, match=rf"nothing was updated; rank {victim}: ValueError: it is broken"):
                    made.step(list(batches(made.share(3))))
                fault.active = ""
                report, expected = (one.step(list(batches(one.share(3)))) for one in (made, whole))
                assert (report.loss, report.norm) == (expected.loss, expected.norm)


def test_an_evaluation_that_fails_on_one_rank(comm):
    for mesh in meshes(comm.Get_size()):
        with engine(comm, mesh, fault := Fault()) as made:
            fault.active = "forward" if comm.Get_rank() == 0 else ""
            with pytest.raises(StepFailed, match="rank 0: ValueError: it is broken"):
                made.evaluate(list(batches(made.share(2))))
            fault.active = ""
            assert made.evaluate(list(batches(made.share(2)))).count == 2 * CONTEXT


@pytest.mark.parametrize(("what", "message"), [("x", "token 29 is not below 29"), ("y", "target 29 is not below 29")])
@pytest.mark.parametrize("at", [0, CONTEXT // 2])
def test_data_that_are_wrong_in_one_part(comm, what, message, at):
    """The part of one rank of cp has the token; the others are in the middle of an exchange."""
    with engine(comm, next(meshes(comm.Get_size()))) as made:
        with pytest.raises(StepFailed, match=message):
            made.step(list(batches(made.share(2), at, what)))
        assert made.step(list(batches(made.share(2)))).loss > 0


def test_copies_are_compared_along_every_axis(comm):
    """Other values of a norm's gain on one rank of cp remain; on one of tp they change other gradients too."""
    last = comm.Get_size() - 1
    for mesh in meshes(comm.Get_size()):
        with engine(comm, mesh, check_every=1) as made:
            made.step(list(batches(made.share(2))))
            if comm.Get_rank() == last and last:
                made.flat.by_name["1.0.inner.0.gain"].parameter.data[3] += 0.5
            if not last:
                continue
            with pytest.raises(ParameterMismatch, match=r"after step 1 parameter .* of rank"):
                made.step(list(batches(made.share(2))))

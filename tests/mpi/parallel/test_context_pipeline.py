"""Pipelines whose stages divide sequences over the ranks of an axis: the same bits as one rank, in every layout."""

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI
from support.training_states import differing, whole

from collectives import Communicator
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.dropout import Dropout
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build, transformer
from parallel.nn.operator import ArraySpec, Operator
from parallel.optim.optimizers import AdamW
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.trainer.strategies import strategy_of

pytestmark = pytest.mark.ranks(3)

TOKENS, CONTEXT, HEADS, COUNT, STEPS = 29, 12, 6, 4, 2


@pytest.fixture(scope="module")
def alone():
    with Communicator(MPI.COMM_SELF) as comm:
        yield comm


def gpt():
    return transformer(TOKENS, CONTEXT, 4, HEADS, 12, dropout=0.1)


def batches(numbers, step, vocabulary=TOKENS, lengths=(9, 12)):
    for number in numbers:
        random, length = np.random.default_rng([step, number]), lengths[number % len(lengths)]
        x, y = random.integers(0, vocabulary, (2, length)), random.integers(-3, vocabulary, (2, length))
        yield number, x, y, np.arange(2) + 2 * number


def train(comm, model=gpt, steps=STEPS, made_of=batches, **settings):
    """Losses and norms, an evaluation, and the state; checks ledger and forecast of pipelines."""
    settings = Settings(**{"clip": 0.3, "check_every": 1, "first_bytes": 1, "bucket_bytes": 5000, **settings})
    engine_class = strategy_of(settings).engine_class(settings)
    with engine_class(model(), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings) as made:
        reports = [made.step(list(made_of(made.share(COUNT), step))) for step in range(steps)]
        score = made.evaluate(list(made_of(made.share(COUNT), steps)), SoftmaxCrossEntropy().correct)
        assert made.ledger.allocated == made.ledger.predicted
        return [(report.loss, report.norm) for report in reports], score, whole(comm, made)


def meshes(ranks, contexts):
    """Meshes of so many ranks, with each of the sizes of cp that fits."""
    for context in contexts:
        for tensor in (1, 2):
            for stages in range(1, min(ranks, 4) + 1):
                replicas, rest = divmod(ranks, context * tensor * stages)
                if not rest and COUNT % replicas == 0:
                    yield {"mesh": f"pp={stages},zero1={replicas},cp={context},tp={tensor}"} | {
                        "microbatches": COUNT // replicas
                    }


@pytest.mark.parametrize("context", ["ring", "allgather"])
def test_a_mesh_trains_as_one_rank_does(comm, alone, context):
    """Sequences of two lengths; any number of ranks of cp."""
    expected, score, state = train(alone)
    for mesh in meshes(comm.Get_size(), (1, 2, 3)):
        own = {"context": context}
        found, same_score, same_state = train(comm, layout="pp:1f1b", **mesh, **own)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        assert same_score.loss == pytest.approx(score.loss, rel=1e-4) and same_score.measure == score.measure
        for name, tensor in state.items():
            np.testing.assert_allclose(same_state[name], tensor, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("schedule", "precision", "sequence"),
    [
        *(("zb-h1", "bf16", False), ("1f1b", "fp32", True)),
        pytest.param("zb-h1", "fp32", False, marks=pytest.mark.full),
        pytest.param("1f1b", "bf16", False, marks=pytest.mark.full),
        pytest.param("dualpipe", "fp32", False, marks=pytest.mark.full),
    ],
)
def test_the_same_bits_on_any_mesh(comm, alone, schedule, precision, sequence):
    """With several parts of a sequence on a rank, of a table that two stages share, too."""
    shared = {"precision": precision, "reproducible": True, "sequence_parts": 4, "tensor_shards": 2}
    shared["sequence_parallel"] = sequence
    made_of = partial(batches, lengths=(8,) if sequence else (9, 12))
    expected, score, state = train(alone, made_of=made_of, **shared)
    for mesh in meshes(comm.Get_size(), (1, 2, 4)):
        found = train(comm, made_of=made_of, layout=f"pp:{schedule}", **mesh, **shared)
        assert found[:2] == (expected, score), mesh
        assert differing(found[2], state) == [], mesh


class TwiceDropped(Operator):
    """Mean of two dropouts of x by one operator."""

    def __init__(self, drop):
        self.drop = drop

    def forward(self, x, run):
        pairs = [self.drop.forward(x, run) for _ in range(2)]
        return (pairs[0][0] + pairs[1][0]) * x.dtype.type(0.5), tuple(saved for _, saved in pairs)

    def backward(self, dy, saved, grads):
        return sum(self.drop.backward(dy * dy.dtype.type(0.5), one, grads) for one in saved)

    def place(self, axis, x, partial):
        return self.drop.place(axis, x, partial)


def one_dropout(recompute):
    """A transformer with one dropout for all its halves, which some use twice."""
    model, drop = transformer(TOKENS, CONTEXT, 4, HEADS, 12, dropout=0.2, recompute=recompute), Dropout(0.2)
    for number, unit in enumerate(model.items[1:-1]):
        for half in (unit.inner if recompute else unit).items:
            half.inner.items[-1] = TwiceDropped(drop) if number % 2 else drop
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_operators_with_several_uses_have_the_same_bits_on_any_mesh(comm, alone, recompute):
    """Uses on several stages of a pipeline, with parts of sequences and of features on several ranks."""
    shared = {"reproducible": True, "sequence_parts": 4, "tensor_shards": 2, "sequence_parallel": recompute}
    made_of = partial(batches, lengths=(8,))
    model = partial(one_dropout, recompute)
    expected, score, state = train(alone, model, made_of=made_of, **shared)
    for mesh in meshes(comm.Get_size(), (1, 2, 4)):
        found = train(comm, model, made_of=made_of, layout="pp:1f1b", **mesh, **shared)
        assert found[:2] == (expected, score), mesh
        assert differing(found[2], state) == [], mesh


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_after_twenty_steps(comm, alone, precision):
    """gpt:tiny on two stages, with as many ranks of cp and of tp as there are."""
    ranks = comm.Get_size()
    shared = {"precision": precision, "reproducible": True, "sequence_parts": 4, "tensor_shards": 2, "check_every": 5}

    def made_of(numbers, step):
        return batches(numbers, step, 64, (32,))

    def model():
        return build("gpt:tiny", (32,), 64, dropout=0.1)

    expected = train(alone, model, 20, made_of, **shared)
    for mesh in meshes(ranks, (2, 4) if ranks % 2 == 0 else (1,)):
        found = train(comm, model, 20, made_of, layout="pp:zb-h1", **mesh, **shared)
        assert found[:2] == expected[:2], mesh
        assert differing(found[2], expected[2]) == [], mesh


@pytest.mark.parametrize("reproducible", [False, True])
def test_forecast(comm, reproducible):
    """Exact, kind by kind, for every rank, from the length of the sequences."""
    ranks, spec = comm.Get_size(), ArraySpec((2, 9), np.dtype(np.int64))
    logical = {"reproducible": True, "sequence_parts": 4, "tensor_shards": 2} if reproducible else {}
    workload = Workload(comm.Get_rank(), ranks, lambda samples: (spec, spec), [(2,) * COUNT])
    for mesh in meshes(ranks, (1, 2, 4) if reproducible else (1, 2, 3)):
        settings = Settings(first_bytes=1, layout="pp:zb-h1", **mesh, **logical)
        forecast = Pipeline.forecast(gpt(), SoftmaxCrossEntropy(), AdamW(rate=0.01), workload, settings)
        with Pipeline(gpt(), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings) as made:
            made.step(list(batches(made.share(COUNT), 0, lengths=(9,))))
            assert forecast.predicted == made.ledger.predicted == made.ledger.allocated
            assert forecast.work == made.ledger.work


def test_batches_that_cannot_be_divided(comm):
    """Refused before anything runs, and the training goes on."""
    ranks = comm.Get_size()
    settings = Settings(layout="pp:1f1b", mesh=f"pp=1,cp={ranks}", microbatches=1, sequence_parts=2 * ranks)
    with Pipeline(gpt(), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings) as made:
        for shape, message in (((2, CONTEXT + 1), "at most 12 positions, found 13"), ((2,), "expected sequences")):
            with pytest.raises(RuntimeError, match=message):
                made.step([(0, np.zeros(shape, int), np.zeros(shape, int), np.arange(2))])
        assert made.step(list(batches(range(1), 0))).loss > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "pp=1,cp={n}", "sequence_parts": 7}, "sequence_parts: expected a multiple of cp, in .*; found 7"),
        ({"mesh": "pp={n}", "context": "ring"}, "context: ring is for sequences divided along cp; found pp="),
        ({"mesh": "pp=1,cp={n},sp=1"}, r"mesh: expected axes of pp, .*, cp, tp, ep, etp, found sp"),
        ({"mesh": "pp=2,cp={n}"}, r"mesh: .* is for . ranks, found .; pp=1,cp=. .*would fit"),
    ],
)
def test_what_does_not_go_together(comm, settings, message):
    ranks = comm.Get_size()
    settings = {**settings, "mesh": settings["mesh"].format(n=ranks)}
    if ranks > 1 or "multiple" not in message:
        with pytest.raises(ValueError, match=message):
            Pipeline(
                gpt(),
                SoftmaxCrossEntropy(),
                comm,
                AdamW(rate=0.01),
                Settings(layout="pp:1f1b", microbatches=1, **settings),
            )

"""Training on meshes with divided sequences: the same as data parallelism, in the same bits if reproducible."""

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI
from support.training_states import differing, whole

from collectives import Communicator
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import Settings
from parallel.nn.depths import DepthLayers
from parallel.nn.gated import LlamaOptions, gated_transformer
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build, mlp, transformer
from parallel.nn.operator import ArraySpec
from parallel.nn.placement import PlacementError
from parallel.optim.optimizers import AdamW
from parallel.sharding.context.ulysses_attention import refusal
from parallel.sharding.mesh import Mesh

pytestmark = pytest.mark.ranks(3)

TOKENS, CONTEXT, HEADS, COUNT = 37, 16, 12, 3


@pytest.fixture(scope="module")
def alone():
    with Communicator(MPI.COMM_SELF) as comm:
        yield comm


def gpt(recompute=False, context=CONTEXT):
    return transformer(TOKENS, context, 1, HEADS, 24, dropout=0.1, recompute=recompute)


def blocks_for_some_tokens():
    return DepthLayers(0.4, every=1).of(gpt(), 24)


def batches(numbers, step, vocabulary=TOKENS, lengths=(13, 16)):
    """Micro-batches of two sequences each; their length depends on the number."""
    for number in numbers:
        random, length = np.random.default_rng([step, number]), lengths[number % len(lengths)]
        x, y = random.integers(0, vocabulary, (2, length)), random.integers(-3, vocabulary, (2, length))
        yield number, x, y, np.arange(2) + 2 * number


def engine(comm, model=gpt, **settings):
    settings = Settings(**{"first_bytes": 1, "bucket_bytes": 5000, "clip": 0.3, "check_every": 1, **settings})
    return DataParallelEngine(model(), SoftmaxCrossEntropy(), comm, AdamW(rate=0.01), settings)


def train(comm, model=gpt, steps=2, made_of=batches, **settings):
    """Losses and norms of some steps, an evaluation, and the state; checks the memory ledger."""
    with engine(comm, model, **settings) as made:
        reports = [made.step(list(made_of(made.share(COUNT), step))) for step in range(steps)]
        score = made.evaluate(list(made_of(made.share(COUNT), steps)), SoftmaxCrossEntropy().correct)
        assert made.ledger.allocated == made.ledger.predicted
        return [(report.loss, report.norm) for report in reports], score, whole(comm, made)


def meshes(ranks):
    """Meshes of so many ranks on which two or more share sequences."""
    for context in range(2, ranks + 1):
        if ranks % context == 0:
            others = ranks // context
            yield from [f"dp={others},cp={context}"] + [f"cp={context},tp={others}"] * (others > 1)


@pytest.mark.parametrize(
    ("layout", "context"),
    [("dp", "ring"), ("zero1", "ulysses"), ("zero2", "auto"), ("zero3", "allgather"), ("dp-naive", "auto")],
)
def test_a_mesh_trains_as_replicas_do(comm, alone, layout, context):
    """Any number of ranks, with a cut by heads as well; blocks are computed again or not."""
    expected, score, state = train(alone)
    for mesh in meshes(comm.Get_size()):
        sizes = Mesh.parse(mesh).sizes
        if context == "ulysses" and HEADS // sizes.get("tp", 1) % sizes["cp"]:
            continue
        found, same_score, same_state = train(
            comm, lambda: gpt(recompute=layout == "zero2"), layout=layout, mesh=mesh, context=context
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        assert same_score.loss == pytest.approx(score.loss, rel=1e-4) and same_score.measure == score.measure
        for name, tensor in state.items():
            np.testing.assert_allclose(same_state[name], tensor, rtol=2e-3, atol=2e-5, err_msg=name)


def llama():
    return gated_transformer(TOKENS, CONTEXT, 1, HEADS, 48, kv_heads=HEADS // 2, dropout=0.1, llama=LlamaOptions(30.0))


@pytest.mark.parametrize("context", ["ring", "allgather", "ulysses"])
def test_rotary_positions(comm, alone, context):
    """Positions are those in the whole sequence. In float64, as AdamW enlarges differences of small gradients."""
    expected, score, state = train(alone, llama, precision="fp64")
    for mesh in meshes(comm.Get_size()):
        sizes = Mesh.parse(mesh).sizes
        tp = sizes.get("tp", 1)
        if context == "ulysses" and refusal(HEADS // tp, HEADS // 2 // tp, sizes["cp"]):
            continue
        found, same_score, same_state = train(comm, llama, mesh=mesh, context=context, precision="fp64")
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        assert same_score.loss == pytest.approx(score.loss, rel=1e-10)
        for name, tensor in state.items():
            np.testing.assert_allclose(same_state[name], tensor, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("layout", ["dp", "zero3"])
def test_blocks_for_some_tokens(comm, alone, layout):
    """Sequences are divided along cp, along tp, or both; tokens are chosen of whole ones."""
    expected, score, state = train(alone, blocks_for_some_tokens, made_of=of_many_tokens)
    for mesh in meshes(comm.Get_size()):
        sequence = {"sequence_parallel": True} if "tp" in Mesh.parse(mesh).sizes else {}
        found, same_score, same_state = train(
            comm, blocks_for_some_tokens, made_of=of_many_tokens, layout=layout, mesh=mesh, **sequence
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        assert same_score.loss == pytest.approx(score.loss, rel=1e-4) and same_score.measure == score.measure
        for name, tensor in state.items():
            np.testing.assert_allclose(same_state[name], tensor, rtol=2e-3, atol=2e-5, err_msg=name)


def of_many_tokens(numbers, step):
    """Micro-batches whose tokens all axes divide."""
    return batches(numbers, step, lengths=(16,))


@pytest.mark.parametrize(
    ("layout", "reproducible", "sequence"),
    [("dp", False, False), ("zero1", True, False), ("zero3", False, False), ("zero2", True, True)],
)
def test_forecast(comm, layout, reproducible, sequence):
    """Exact, kind by kind, for every rank, from the length of the sequences."""
    ranks = comm.Get_size()
    length = ranks * parts(ranks) if sequence else 13
    model = partial(gpt, context=length)

    def shapes(samples):
        return (ArraySpec((samples, length), np.dtype(np.int64)),) * 2

    logical = {"reproducible": True, "sequence_parts": parts(ranks), "tensor_shards": ranks} if reproducible else {}
    logical |= {"sequence_parallel": True} if sequence else {}
    workload = Workload(comm.Get_rank(), ranks, shapes, [(2,) * COUNT])
    for mesh in reproducible_meshes(ranks) if reproducible else meshes(ranks):
        settings = Settings(first_bytes=1, bucket_bytes=5000, layout=layout, mesh=mesh, **logical)
        forecast = DataParallelEngine.forecast(model(), SoftmaxCrossEntropy(), AdamW(rate=0.01), workload, settings)
        with engine(comm, model, layout=layout, mesh=mesh, **logical) as made:
            made.step(list(batches(made.share(COUNT), 0, lengths=(length,))))
            assert forecast.predicted == made.ledger.predicted == made.ledger.allocated
            assert forecast.work == made.ledger.work


def parts(ranks):
    """Parts of a sequence that the ranks of each of `reproducible_meshes` divide."""
    return 8 if ranks == 8 else 4


def reproducible_meshes(ranks):
    """Meshes whose sums are subtrees: cp is a power of two, and so are the shards of a rank."""
    return [mesh for mesh in meshes(ranks) if ranks & (ranks - 1) == 0] or [f"dp={ranks}"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("layout", "precision", "sequence"),
    [("dp", "fp32", False), ("zero1", "bf16", False), ("zero3", "fp32", False), ("zero2", "bf16", True)],
)
def test_the_same_bits_on_any_mesh(comm, alone, layout, precision, sequence):
    """Losses, norms, evaluation, weights and optimizer state of one rank with as many parts and shards."""
    ranks = comm.Get_size()
    shared = {"precision": precision, "reproducible": True, "sequence_parts": parts(ranks), "tensor_shards": ranks}
    model, made_of = gpt, batches
    if sequence:  # each part has a slice for every shard
        shared, length = {**shared, "sequence_parallel": True}, ranks * parts(ranks)
        model, made_of = partial(gpt, context=3 * length), partial(batches, lengths=(length, 3 * length))
    expected, score, state = train(alone, model, made_of=made_of, **shared)
    for mesh in reproducible_meshes(ranks):
        found = train(comm, model, made_of=made_of, layout=layout, mesh=mesh, **shared)
        assert found[:2] == (expected, score)
        assert differing(found[2], state) == []


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_after_twenty_steps(comm, alone, precision):
    """gpt:tiny: all ranks that the sequences' parts allow share them, the others are replicas."""
    size = comm.Get_size()
    context = max(ranks for ranks in (1, 2, 4) if size % ranks == 0)
    shared = {"precision": precision, "reproducible": True, "sequence_parts": 4, "check_every": 5}

    def made_of(numbers, step):
        return batches(numbers, step, 64, (32,))

    def model():
        return build("gpt:tiny", (32,), 64, dropout=0.1)

    expected = train(alone, model, 20, made_of, **shared)
    for layout in ("dp", "zero3"):
        found = train(comm, model, 20, made_of, mesh=f"dp={size // context},cp={context}", layout=layout, **shared)
        assert found[:2] == expected[:2]
        assert differing(found[2], expected[2]) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "cp={n}", "pool": True}, "pool: ranks that share sequences need the same micro-batches"),
        ({"mesh": "cp={n}", "sequence_parts": 11}, "sequence_parts: expected a multiple of cp, in cp=.; found 11"),
        ({"mesh": "dp={n}", "context": "ring"}, "context: ring is for sequences divided along cp; found dp="),
        ({"mesh": "cp={n}", "sequence_parts": 12}, r"sequence_parts: .* a power of two of parts, found \d+; "),
        ({"mesh": "cp={n}", "context": "ring"}, "context: reproducible training needs allgather, found ring"),
        ({"mesh": "dp=2,cp={n}"}, r"mesh: .* is for \d+ ranks, found .; .*dp=1,cp=. .*would fit"),
        ({"mesh": "cp={n},sp=1"}, "mesh: expected axes of dp, cp, tp, ep, etp, found sp"),
        ({"mesh": "cp={n},ep=11"}, "mesh: (routers choose within whole|expected ep to be a divisor of the . ranks)"),
    ],
)
def test_what_does_not_go_together(comm, settings, message):
    ranks = comm.Get_size()
    if ranks == 1 and message.startswith(("pool", "context: repro", "sequence_parts: expected a multiple")):
        settings = {**settings, "sequence_parts": 4}
        message = message if "multiple" not in message else ""
    if "power of two" in message:
        settings = {**settings, "sequence_parts": settings["sequence_parts"] * ranks}
    mesh = settings["mesh"].format(n=ranks)
    if message:
        with pytest.raises(ValueError, match=message):
            engine(comm, reproducible="pool" not in settings, **{**settings, "mesh": mesh})


def test_models_that_need_whole_sequences(comm):
    with pytest.raises(PlacementError, match=r"Flatten 0\.0: expected another placement along cp"):
        engine(comm, lambda: mlp([8, 4, 2]), mesh=f"cp={comm.Get_size()}", sequence_parts=2 * comm.Get_size())


def test_batches_that_cannot_be_divided(comm):
    """Refused before anything runs, and the training goes on."""
    ranks = comm.Get_size()
    with engine(comm, mesh=f"cp={ranks}", sequence_parts=2 * ranks) as made:
        for shape, message in (((2, CONTEXT + 1), "at most 16 positions, found 17"), ((2,), "expected sequences")):
            with pytest.raises(RuntimeError, match=message):
                made.step([(0, np.zeros(shape, int), np.zeros(shape, int), np.arange(2))])
        assert made.step(list(batches(range(1), 0))).loss > 0

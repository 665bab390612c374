"""Models whose ranks have parts of the sequence between cut operators: values, bytes, bits, sums of gradients."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conformance.thread_communicator import run_threads
from support.cut_models import TOKENS, ModelCase, expect_close, one_pass
from support.thread_ranks import ThreadAxis, run

from parallel.data.sampler import Batch
from parallel.engine.model_on_mesh import check_on_mesh, sequence_models
from parallel.engine.settings import Settings
from parallel.nn.gated import LlamaOptions, gated_transformer
from parallel.nn.kernels.storage import BFLOAT16
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp, transformer
from parallel.nn.norm import LayerNorm
from parallel.nn.operator import PassMode, name_all
from parallel.nn.placement import PlacementError, Replicate, Shard
from parallel.sharding.context.divide_model import divide
from parallel.sharding.context.models_by_length import LengthModel
from parallel.sharding.context.sequence_division import SequenceDivision
from parallel.sharding.device_mesh import DeviceMesh, MeshPlace
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.check import check_placements
from parallel.sharding.tensor.cut_model import cut
from parallel.sharding.tensor.exchange import tree_sum
from parallel.sharding.tensor.gradient_sums import GradientSums
from parallel.sharding.tensor.sequence import EqualParts

LENGTH, WIDTH = 24, 18


def tokens(random):
    return random.integers(0, TOKENS, (2, LENGTH))


CASES = {
    f"{layers} layers, recompute={recompute}": ModelCase(
        lambda layers=layers, recompute=recompute: transformer(
            TOKENS, LENGTH, layers, 9, WIDTH, dropout=0.2, recompute=recompute
        ),
        SoftmaxCrossEntropy,
        tokens,
        tokens,
    )
    for layers, recompute in ((0, False), (1, False), (2, True))
}
CASES["gated"] = ModelCase(
    lambda: gated_transformer(TOKENS, LENGTH, 1, 6, WIDTH, kv_heads=3, dropout=0.2), SoftmaxCrossEntropy, tokens, tokens
)
CASES["llama"] = ModelCase(
    lambda: gated_transformer(TOKENS, LENGTH, 1, 6, 24, kv_heads=3, dropout=0.2, llama=LlamaOptions(30.0)),
    SoftmaxCrossEntropy,
    tokens,
    tokens,
)


def with_one_gain():
    """Transformer in which both norms of a block have the same gain."""
    made = transformer(TOKENS, LENGTH, 1, 9, WIDTH)
    first, second = (half.inner.items[0] for half in made.items[1].items)
    second.gain = first.gain
    return made


CASES["one gain"] = ModelCase(with_one_gain, SoftmaxCrossEntropy, tokens, tokens)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("ranks", "shards"), [(1, 2), (2, 2), (3, 3), (4, 4), (8, 8), (2, 4), (3, 6)])
def test_equals_the_whole(case, ranks, shards):
    case = CASES[case]
    whole = one_pass(case, case.make(), case.loss())

    def rank_main(axis):
        model, loss = cut(case.make(), case.loss(), axis, shards, sequence=True)
        assert not check_placements(model, loss, {"dp": Shard(0), "tp": Replicate()}, {"dp"})["tp"]
        expect_close(one_pass(case, model, loss), model, whole, 1e-12)

    run(ranks, rank_main)


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(layers, ranks):
    """Forward an allgather and a reduce-scatter for each half-block, backward one more allgather; sums of gradients."""
    case = ModelCase(lambda: transformer(TOKENS, LENGTH, layers, 4, WIDTH - 2), SoftmaxCrossEntropy, tokens, tokens)
    width = WIDTH - 2

    def rank_main(axis):
        model, loss = cut(case.make(), case.loss(), axis, sequence=True)
        one_pass(case, model, loss)
        return axis.comm.calls

    values = 2 * LENGTH * 8
    gather, scatter = ("allgather", values * width // ranks), ("reduce_scatter", values * width)
    loss = [("allreduce", values)] * 3
    norms = ("allreduce", 2 * width * 8)
    block = ("allreduce", 6 * width * 8)  # gains and biases of two norms, biases of two row linear layers
    # head: the output gathers its input again; block: each half gathers dy and its input again
    backward = [gather, scatter, norms] + ([gather] * 2 + [scatter]) * 2 * layers
    embedding = [("allreduce", LENGTH * width * 8), gather]
    expected = [scatter, *[gather, scatter] * 2 * layers, gather, *loss, *backward, *embedding, *[block] * layers]
    for calls in run(ranks, rank_main):
        assert sorted(calls) == sorted(expected)
        sent = [call[1] * (ranks - 1) // (ranks if call[0] == "reduce_scatter" else 1) for call in calls]
        activations = sum(n for n, (name, _) in zip(sent, calls) if name != "allreduce")
        assert activations == (10 * layers + 5) * (ranks - 1) * values * width // ranks


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["f4", "bf16"])
def test_the_same_bits_on_any_number_of_ranks(case, dtype):
    case, dtype = CASES[case], BFLOAT16 if dtype == "bf16" else np.dtype(dtype)

    def rank_main(axis):
        model, loss = cut(case.make(), case.loss(), axis, 4, "tree", sequence=True)
        found = one_pass(case, model, loss, dtype)
        return found.loss, found.gradients

    (expected, gradients), *_ = run(1, rank_main)
    for ranks in (2, 4):
        for loss, found in run(ranks, rank_main):
            assert loss == expected
            for name, gradient in found.items():
                assert gradient.tobytes() == gradients[name].tobytes(), name


def test_a_missing_sum_of_gradients():
    """A norm on parts of the sequence, whose gradients nothing adds up."""

    def rank_main(axis):
        model, loss = cut(transformer(TOKENS, LENGTH, 1, 2, 8), SoftmaxCrossEntropy(), axis, sequence=True)
        assert all(isinstance(unit, GradientSums) for unit in model.items)
        model.items[1] = model.items[1].inner
        with pytest.raises(PlacementError, match=r"LayerNorm 1.0.inner.0: the gradient .* is a partial sum along tp"):
            check_placements(model, loss, {"tp": Replicate()}, {"dp"})

    run(2, rank_main)


def test_models_without_sequences():
    with pytest.raises(PlacementError, match="sequence_parallel: expected a model of sequences; GatherSequence"):
        run(2, lambda axis: cut(mlp([4, 4, 4]), SoftmaxCrossEntropy(), axis, sequence=True))


def test_a_length_that_the_ranks_do_not_divide():
    case = CASES["1 layers, recompute=False"]._replace(x=lambda random: random.integers(0, TOKENS, (2, 7)))

    def rank_main(axis):
        one_pass(case, *cut(case.make(), case.loss(), axis, sequence=True))

    with pytest.raises(ValueError, match="sequence_parallel: expected a multiple of 2 tokens, in tp=2"):
        run(2, rank_main)


def test_sums_over_slices_of_parts():
    """The gradient of a norm is the sum over the slices of each part, then over the parts."""
    norm, shards, parts = LayerNorm(5), 3, 4
    x, dy = np.random.default_rng(0).normal(size=(2, 2, LENGTH, 5)).astype("f4")
    name_all(norm)
    norm.gain.data, norm.bias.data = np.ones(5, "f4"), np.zeros(5, "f4")

    def gradients(operator, *places):
        found = {}

        def sink(parameter, compute):
            compute(found.setdefault(parameter.name, np.empty(parameter.shape, "f4")))

        _, saved = operator.forward(x[:, *places].copy(), PassMode())
        operator.backward(dy[:, *places].copy(), saved, sink)
        return found

    each = LENGTH // (shards * parts)
    slices = [gradients(norm, slice(at, at + each)) for at in range(0, LENGTH, each)]
    operator = EqualParts(norm, shards).divided(SequenceDivision("contiguous", LENGTH, 1, parts), 0)
    for name, gradient in gradients(operator).items():
        terms = [one[name] for one in slices]
        expected = tree_sum([tree_sum(terms[at : at + shards]) for at in range(0, len(terms), shards)])
        assert gradient.tobytes() == expected.tobytes()


@pytest.mark.parametrize("case", ["1 layers, recompute=False", "gated", "llama"])
@pytest.mark.parametrize("shards", [2, 4])
def test_slices_of_parts_on_two_axes(case, shards):
    """Saved bytes are those of the outlines, and bits those of one rank."""
    case, parts = CASES[case], 2

    def rank_main(mesh, comm):
        axes = DeviceMesh(comm, Mesh.parse(mesh), ("cp", "tp"))
        cp, tp = axes.axis("cp"), axes.axis("tp")
        model, loss = cut(case.make(), case.loss(), tp, shards, "tree", sequence=True)
        division = SequenceDivision("zigzag", LENGTH, cp.size, parts)
        random = np.random.default_rng(0)
        part = LengthModel(None, None, division, cp.rank).part(Batch(0, case.x(random), case.y(random), np.arange(2)))
        ours = case._replace(x=lambda random: part.x, y=lambda random: part.y)
        found = one_pass(ours, divide(model, cp, division, "allgather"), loss, np.dtype("f4"))
        return tp.rank, found.gradients

    ((_, expected),) = run_threads(1, lambda comm: rank_main("cp=1,tp=1", comm))
    for mesh in ("cp=2,tp=1", "cp=1,tp=2", "cp=2,tp=2"):
        found = run_threads(Mesh.parse(mesh).size, partial(rank_main, mesh))
        for name, gradient in expected.items():
            terms = [(rank, gradients[name]) for rank, gradients in found if name in gradients]
            total = tree_sum([gradient for rank, gradient in terms if rank == terms[0][0]])
            assert total.tobytes() == gradient.tobytes(), (mesh, name)


def test_tensors_with_several_uses():
    """Refused on slices of several parts: the order of sums over uses would depend on the ranks."""
    axis = ThreadAxis("tp", 0, 1, None)
    model, loss = cut(with_one_gain(), SoftmaxCrossEntropy(), axis, 2, "tree", sequence=True)
    own = Settings(tensor_shards=2, sequence_parallel=True)
    place = MeshPlace(Mesh.parse("cp=2,tp=1"), 0)
    sequence_models(model, loss, place, own)
    for change in ({"reproducible": True}, {"sequence_parts": 4}):
        with pytest.raises(ValueError, match=r"one use of every tensor .* parts of a sequence; found 2 of 1.0.inner.0"):
            sequence_models(model, loss, place, replace(own, **change))


@pytest.mark.parametrize(
    ("mesh", "shards", "parts", "fits"),
    [
        ("cp=2,tp=3", 3, 2, True),
        ("cp=2,tp=3", 3, 4, False),
        ("tp=2", 6, 2, False),
        ("cp=2", 3, 4, True),
        ("cp=2,tp=2", 4, 8, True),
    ],
)
def test_slices_that_are_no_subtree(mesh, shards, parts, fits):
    own = {"mesh": mesh, "tensor_shards": shards, "sequence_parts": parts}
    settings = [Settings(reproducible=True, sequence_parallel=True, **own)]
    others = [Settings(sequence_parallel=True, **own), Settings(reproducible=True, **own)]
    for one in others + settings * fits:
        check_on_mesh(one, Mesh.parse(mesh), "dp")
    if not fits:
        with pytest.raises(ValueError, match=f"several parts .* takes a power of two; found {shards}, and {mesh}"):
            check_on_mesh(*settings, Mesh.parse(mesh), "dp")

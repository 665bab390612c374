"""Models whose ranks have parts of the sequence between cut operators: values, bytes, bits, sums of gradients."""

import numpy as np
import pytest
from support.cut_models import TOKENS, ModelCase, expect_close, one_pass
from support.thread_ranks import run

from parallel.nn.gated import gated_transformer
from parallel.nn.kernels.storage import BFLOAT16
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp, transformer
from parallel.nn.placement import PlacementError, Replicate, Shard
from parallel.tensor.check import check_placements
from parallel.tensor.cut_model import cut
from parallel.tensor.gradient_sums import GradientSums

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
    with pytest.raises(PlacementError, match="expected a value sharded along dimension 1 along tp, found a replicated"):
        run(2, lambda axis: cut(mlp([4, 4, 4]), SoftmaxCrossEntropy(), axis, sequence=True))


def test_a_length_that_the_ranks_do_not_divide():
    case = CASES["1 layers, recompute=False"]._replace(x=lambda random: random.integers(0, TOKENS, (2, 7)))

    def rank_main(axis):
        one_pass(case, *cut(case.make(), case.loss(), axis, sequence=True))

    with pytest.raises(ValueError, match="expected a sequence of a multiple of 2 tokens"):
        run(2, rank_main)

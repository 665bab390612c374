"""Transformers whose sequences are divided: every gradient against the whole model, dropout masks, the same bits."""

import ml_dtypes
import numpy as np
import pytest
from support import thread_ranks
from support.context_cases import ALGORITHMS

from collectives.selection.cost_model import BUILT_IN
from parallel.data.sampler import Batch
from parallel.nn.compose import Sequential
from parallel.nn.depths import DepthLayers
from parallel.nn.dropout import Dropout
from parallel.nn.flat_params import FlatParams
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp, transformer
from parallel.nn.operator import ArraySpec, PassMode, nbytes_of
from parallel.nn.placement import PlacementError, Shard
from parallel.runtime.tree_sum import TreeNode, TreeSum, VectorPool
from parallel.sharding.context.context_attention import ContextAttention
from parallel.sharding.context.cost_formulas import fastest
from parallel.sharding.context.divide_model import divide
from parallel.sharding.context.models_by_length import RANK_FLOPS, LengthModel, ModelsByLength, attention_layers
from parallel.sharding.context.sequence_division import DIVISIONS, SequenceDivision
from parallel.sharding.tensor.check import check_placements
from parallel.sharding.tensor.cut_model import cut

LENGTH, VOCABULARY, HEADS = 24, 11, 12


def model(depths=0.0, **options):
    made = transformer(VOCABULARY, LENGTH, 2, HEADS, 24, **options)
    return DepthLayers(depths, every=1).of(made, 24) if depths else made


def batch():
    """Targets of which some do not count, unevenly over the ranks."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, VOCABULARY, (2, 3, LENGTH))
    y[:, :7] = -1
    return Batch(0, x, y, np.array([5, 1, 9]))


def part_of(batch, axis, division):
    """The rank's tokens of a micro-batch."""
    return LengthModel(None, None, division, axis.rank).part(batch)


def trained(whole, made, part, dtype, loss=None):
    """Loss, number of targets, and gradients in order of the parameters, of one micro-batch."""
    flat = FlatParams(whole)
    vector = np.zeros(flat.length)
    flat.initialise(vector, 1)
    flat.bind(vector.astype(dtype))
    loss, gradients = loss or SoftmaxCrossEntropy(), {}

    def sink(parameter, compute):
        term = np.full(parameter.shape, np.nan, np.float64 if dtype == np.float64 else np.float32)
        compute(term)
        gradients[parameter] = gradients[parameter] + term if parameter in gradients else term

    scores, saved = made.forward(part.x, PassMode(seed=3, samples=part.samples))
    total, state = loss.forward(scores, part.y)
    made.backward(loss.backward(1.0, state), saved, sink)
    return total, loss.count(part.y), [gradients[parameter] for parameter in whole.parameters()]


def parts(ranks, algorithm, name, dtype, logical=0, **options):
    """What every rank comes to."""

    def rank_main(axis):
        whole, division = model(**options), SequenceDivision(name, LENGTH, axis.size, logical)
        made = divide(whole, axis, division, algorithm)
        part = part_of(batch(), axis, division)
        return trained(whole, made, part, dtype)

    return thread_ranks.run(ranks, rank_main, "cp")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_gradient(algorithm, ranks):
    """With dropout and a tied table: losses and counts are sums over the ranks, and so are all gradients."""
    whole = model(dropout=0.2)
    loss, count, gradients = trained(whole, whole, batch(), np.float64)
    for name in DIVISIONS:
        found = parts(ranks, algorithm, name, np.float64, dropout=0.2)
        assert sum(one[0] for one in found) == pytest.approx(loss, rel=1e-12)
        assert sum(one[1] for one in found) == count
        for at, expected in enumerate(gradients):
            total = sum(one[2][at] for one in found)
            np.testing.assert_allclose(total, expected, rtol=0, atol=1e-12 * max(1, abs(expected).max()))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("depths", [0.05, 0.4, 1.0])
def test_every_gradient_of_blocks_for_some_tokens(depths, ranks):
    """Two tokens, ten and all of 24 are chosen; gradients of gates and predictors are sums over the ranks too."""
    options = {"depths": depths, "dropout": 0.2}
    whole = model(**options)
    loss, _, gradients = trained(whole, whole, batch(), np.float64)
    for name in DIVISIONS:
        found = parts(ranks, "ring", name, np.float64, **options)
        assert sum(one[0] for one in found) == pytest.approx(loss, rel=1e-12)
        for at, expected in enumerate(gradients):
            total = sum(one[2][at] for one in found)
            np.testing.assert_allclose(total, expected, rtol=0, atol=1e-12 * max(1, abs(expected).max()))


@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_for_some_tokens_in_use(ranks):
    """Predictors choose, another number of tokens of every sequence."""

    def bound(seed):
        whole = model(depths=0.4)
        flat = FlatParams(whole)
        vector = np.zeros(flat.length)
        flat.initialise(vector, seed)
        flat.bind(vector)
        predictors = [parameter for parameter in whole.parameters() if parameter.name.endswith("predictor")]
        for parameter in predictors:
            parameter.data[:-1] = np.random.default_rng(seed).standard_normal(parameter.data[:-1].shape)
        return whole

    use, x = PassMode(training=False, samples=np.arange(3)), batch().x
    expected = bound(1).forward(x, use)[0]

    def rank_main(axis):
        division = SequenceDivision("zigzag", LENGTH, axis.size)
        positions = division.positions(axis.rank)
        return positions, divide(bound(1), axis, division).forward(x[:, positions], use)[0]

    for positions, y in thread_ranks.run(ranks, rank_main, "cp"):
        np.testing.assert_allclose(y, expected[:, positions], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_every_gradient_by_parts(options):
    """Four parts on two ranks: the tied table's gradient is the sum of both uses, blocks recomputed or not."""
    whole = model(**options)
    _, _, gradients = trained(whole, whole, batch(), np.float64)
    found = parts(2, "allgather", "zigzag", np.float64, logical=4, **options)
    for at, expected in enumerate(gradients):
        np.testing.assert_allclose(sum(one[2][at] for one in found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name, dtype, options",
    [
        ("zigzag", np.float32, {"dropout": 0.1}),
        ("zigzag", ml_dtypes.bfloat16, {"dropout": 0.1}),
        ("contiguous", np.float32, {"recompute": True}),
    ],
)
def test_same_bits_for_any_number_of_ranks(name, dtype, options):
    """Losses, and gradients added by the tree over the ranks."""
    found = []
    for ranks in (1, 2, 4):
        each = parts(ranks, "allgather", name, dtype, logical=4, **options)
        sums = []
        for at in range(len(each[0][2])):
            tree = TreeSum(VectorPool(list))
            for rank, one in enumerate(each):
                tree.push(TreeNode(0, rank), one[2][at], ours=True)
            sums.append(tree.total().tobytes())
        found.append((sum(one[0] for one in each), *sums))
    assert len(set(found)) == 1


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("name", DIVISIONS)
def test_dropout_masks_are_parts_of_the_whole(name, width):
    whole, x = Sequential([Dropout(0.4)]), np.ones((3, 19, width))
    divided = []
    for rank in range(3):
        division = SequenceDivision(name, 19, 3)
        made = divide(whole, thread_ranks.ThreadAxis("cp", rank, 3, None), division)
        run = PassMode(seed=7, samples=np.array([2, 0, 11]))
        divided.append((division.positions(rank), made.forward(x[:, division.positions(rank)], run)[0]))
    expected = whole.forward(x, PassMode(seed=7, samples=np.array([2, 0, 11])))[0]
    for positions, y in divided:
        assert np.array_equal(y, expected[:, positions])


def test_a_failed_pass_leaves_nothing_in_tied_tables():
    whole = model()
    axis, division = thread_ranks.ThreadAxis("cp", 0, 1, None), SequenceDivision("zigzag", LENGTH, 1, 4)
    made = divide(whole, axis, division, "allgather")
    part = part_of(batch(), axis, division)
    expected = trained(whole, made, part, np.float32)

    def breaks(parameter, compute):
        compute(np.empty(parameter.shape, np.float32))
        if parameter.name.startswith("2"):
            raise FloatingPointError("broken off")

    scores, saved = made.forward(part.x, PassMode(samples=part.samples))
    with pytest.raises(FloatingPointError):
        made.backward(np.ones_like(scores), saved, breaks)
    found = trained(whole, made, part, np.float32)
    assert all(np.array_equal(one, other) for one, other in zip(found[2], expected[2]))


def test_saved_activations_are_divided():
    """Four ranks save a quarter each of what one rank saves, so a sequence may be four times as long."""
    saved = []
    for ranks in (1, 4):
        axis, division = thread_ranks.ThreadAxis("cp", 0, ranks, None), SequenceDivision("zigzag", 4096, ranks)
        made = divide(transformer(VOCABULARY, 4096, 2, HEADS, 24, dropout=0.1), axis, division)
        saved.append(nbytes_of(made.outline(ArraySpec((3, 4096 // ranks), np.dtype(np.int64))).saved))
    assert saved[0] == 4 * saved[1]


def test_all_gradients_are_partial_sums():
    """So the placements say, and the check refuses a mesh whose engine does not sum them over the axis."""
    axis, division = thread_ranks.ThreadAxis("cp", 0, 2, None), SequenceDivision("zigzag", LENGTH, 2, 4)
    made, loss, inputs = divide(model(dropout=0.1), axis, division), SoftmaxCrossEntropy(), {"cp": Shard(1)}
    assert check_placements(made, loss, inputs, {"cp"}) == {"cp": set(made.parameters())}
    with pytest.raises(PlacementError, match="is a partial sum along cp, not summed"):
        check_placements(made, loss, inputs, ())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_of_a_model_cut_by_heads(algorithm):
    """Tensor parallelism first: two logical shards of every operator, then two parts of the sequence."""
    tp = thread_ranks.ThreadAxis("tp", 0, 1, None)

    def rank_main(axis):
        shards, loss = cut(model(dropout=0.2), SoftmaxCrossEntropy(), tp, shards=2)
        division = SequenceDivision("zigzag", LENGTH, axis.size)
        part = part_of(batch(), axis, division)
        return trained(shards, divide(shards, axis, division, algorithm), part, np.float64, loss)

    (loss, count, gradients), *_ = thread_ranks.run(1, rank_main, "cp")
    whole = model(dropout=0.2)
    assert (loss, count) == pytest.approx(trained(whole, whole, batch(), np.float64)[:2], rel=1e-12)
    found = thread_ranks.run(2, rank_main, "cp")
    assert sum(one[0] for one in found) == pytest.approx(loss, rel=1e-12)
    for at, expected in enumerate(gradients):
        np.testing.assert_allclose(sum(one[2][at] for one in found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "make, length, algorithm, error, message",
    [
        (lambda: mlp([8, 4, 2]), 8, "ring", PlacementError, "Flatten 0.0: expected another placement along cp"),
        (model, 32, "ring", ValueError, "length: expected at most 24 positions, found 32"),
        (model, 24, "star", ValueError, "expected one of ring, allgather, ulysses; found 'star'"),
        (lambda: transformer(5, 24, 1, 3, 6), 24, "ulysses", ValueError, r"divides the 3 heads \(1, 3\), found 2"),
    ],
)
def test_refused(make, length, algorithm, error, message):
    axis = thread_ranks.ThreadAxis("cp", 0, 2, None)
    with pytest.raises(error, match=message):
        divide(make(), axis, SequenceDivision("zigzag", length, 2), algorithm)


def test_models_by_length():
    """One model for each length, of shared parameters; batches that are no sequences are refused."""
    axis, whole = thread_ranks.ThreadAxis("cp", 1, 2, None), model()
    models = ModelsByLength(whole, SoftmaxCrossEntropy(), axis, 2, "ring")
    short, long = models.of(9), models.of(LENGTH)
    assert models.of(9) is short and short.division.size(1) == 4 and long.division.size(1) == 12
    assert short.model.parameters() == long.model.parameters() == whole.parameters()
    for x, y in ((np.zeros((2, 8)), np.zeros((2, 7))), (np.zeros(8), np.zeros(8))):
        with pytest.raises(ValueError, match="micro-batch 3: expected sequences to divide over cp"):
            models.expect(Batch(3, x, y, np.arange(2)))
    with pytest.raises(ValueError, match="at most 24 positions, found 25"):
        models.expect(Batch(0, np.zeros((2, 25)), np.zeros((2, 25)), np.arange(2)))
    with pytest.raises(ValueError, match="context: expected auto, ring, allgather, ulysses; found 'star'"):
        ModelsByLength(whole, SoftmaxCrossEntropy(), axis, 2, "star")


def test_tokens_of_a_rank_that_are_divided_again():
    """Of every rank, so that all refuse the batch."""
    for rank in range(2):
        axis = thread_ranks.ThreadAxis("cp", rank, 2, None)
        models = ModelsByLength(model(), SoftmaxCrossEntropy(), axis, 2, "ring", multiple=4)
        models.expect(Batch(0, np.zeros((2, 16)), np.zeros((2, 16)), np.arange(2)))
        with pytest.raises(
            ValueError,
            match=r"a multiple of 4 tokens in every part along cp \(sequence_parallel\); found \[5, 4\], of 9",
        ):
            models.expect(Batch(0, np.zeros((2, 9)), np.zeros((2, 9)), np.arange(2)))


def test_choice_by_cost():
    """That of the formulas, for the heads of this rank and the length."""
    axis = thread_ranks.ThreadAxis("cp", 0, 4, None)
    whole = transformer(VOCABULARY, 2048, 2, HEADS, 24)
    models = ModelsByLength(whole, SoftmaxCrossEntropy(), axis, 4)
    for length in (64, 2048):
        works = attention_layers(whole, SequenceDivision("zigzag", length, 4))
        assert [work.heads for work in works] == [HEADS, HEADS]
        name = fastest(works[0], BUILT_IN.shared, RANK_FLOPS)
        found = [one for _, one in models.of(length).model.walk() if isinstance(one, ContextAttention)]
        assert {type(one) for one in found} == {ALGORITHMS[name]} and len(found) == 2

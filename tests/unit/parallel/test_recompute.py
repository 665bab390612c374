"""Recomputed activations: the same gradients, and the bytes of the closed forms, whole and cut over ranks."""

import numpy as np
import pytest
from support.cut_models import ModelCase, one_pass
from support.thread_ranks import run

from parallel.nn.compose import Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build, transformer
from parallel.nn.operator import ArraySpec, nbytes_of, set_names
from parallel.nn.recompute import Recompute
from parallel.sharding.tensor.cut_model import cut

BATCH, LENGTH, HEADS, WIDTH, TOKENS = 2, 72, 4, 16, 11
QUERIES = 64
"""Queries of a block of the attention, of which only keys up to its last are stored."""
X = ArraySpec((BATCH, LENGTH), np.dtype(np.int64))


def gpt(layers=1, dropout=0.1, **options):
    return transformer(TOKENS, LENGTH, layers, HEADS, WIDTH, dropout=dropout, **options)


def block_bytes(kind, ranks, sequence, itemsize=4):
    """Closed form of a block's saved activations: sbh(4 + 12/t) elements and two masks, and the probabilities.

    With sequence parallelism the first is divided too (Korthikanti et al., 2022, equations 2 to 4). Means and standard
    deviations of the norms are 4 bytes each.
    """
    tokens, parts = BATCH * LENGTH, ranks if sequence else 1
    if kind == "full":
        return tokens * WIDTH * itemsize // parts
    pairs = QUERIES * QUERIES + (LENGTH - QUERIES) * LENGTH
    scores = BATCH * HEADS * pairs * itemsize // ranks * (kind == "none")
    elements = tokens * WIDTH * 4 // parts + tokens * WIDTH * 12 // ranks
    return elements * itemsize + tokens * (2 * WIDTH + 16) // parts + scores


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_saved_bytes_are_those_of_the_closed_form(kind, ranks, sequence):
    def rank_main(axis):
        model, _ = cut(gpt(layers=2, recompute=kind), SoftmaxCrossEntropy(), axis, sequence=sequence)
        for parameter in model.parameters():
            parameter.dtype = np.dtype(np.float32)
        hidden = model.items[0].outline(X).y
        first, second = (nbytes_of(model.items[at].outline(hidden).saved) for at in (1, 2))
        assert first == second
        return first

    assert run(ranks, rank_main) == [block_bytes(kind, ranks, sequence)] * ranks


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_shared_operator_has_its_first_path_as_name(first, second):
    """Names are seeds of dropout masks, and are as without the wrapper."""
    shared = Dropout(0.5)
    set_names(Sequential([Recompute(shared) if wrapped else shared for wrapped in (first, second)]))
    assert shared.name == "0"


@pytest.mark.parametrize("recompute", ["selective", "full", "full,none", "selective,full"])
def test_the_same_bits(recompute):
    def case(**options):
        def tokens(random):
            return random.integers(0, TOKENS, (BATCH, LENGTH))

        return ModelCase(lambda: gpt(layers=2, **options), SoftmaxCrossEntropy, tokens, tokens)

    plain, again = (one_pass(one, one.make(), one.loss(), "f4") for one in (case(), case(recompute=recompute)))
    assert plain.loss == again.loss and plain.gradients.keys() == again.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert gradient.tobytes() == again.gradients[name].tobytes(), name


@pytest.mark.parametrize(
    ("model", "recompute", "message"),
    [
        ("gpt:tiny", "some", "recompute: expected none, selective, full, or one .* found 'some'"),
        ("gpt:tiny", "full,none,full", "for each of 2 blocks; found 'full,none,full'"),
        ("mlp", "selective", "recompute: expected none or full for mlp, found 'selective'"),
    ],
)
def test_wrong_choices(model, recompute, message):
    with pytest.raises(ValueError, match=message):
        build(model, (8,), 3, recompute=recompute)

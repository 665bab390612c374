"""Predictions of layouts that threads cannot run, and of cut models that generate text, on the ranks of an MPI job."""

import pytest
from support.differential.columns import COLUMNS
from support.differential.predictions import prediction_problem
from support.differential.rules import trainable
from support.differential.tasks import GPT, MIXTURE, MLP
from support.tiers import combinations

from parallel import nn
from parallel.cli.generate import cut_over
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.operator import name_all
from parallel.nn.rewrite import operators_in
from parallel.nn.router import RouterSettings

pytestmark = pytest.mark.ranks(1, 2, 3)

CASES = [
    (task, column)
    for column in COLUMNS
    for task in (GPT, MLP, MIXTURE)
    if not column.threads and trainable(task, column)
]


@pytest.mark.parametrize(("task", "column"), combinations(CASES), ids=lambda one: getattr(one, "name", str(one)))
def test_scores_of_every_layout(comm, task, column):
    if column.ranks != comm.size:
        pytest.skip(f"for {column.ranks} ranks")
    found = comm.allgather(prediction_problem(comm, task, column))
    assert found == [""] * comm.size


MODELS = {
    "gpt": lambda: nn.transformer(13, 16, 2, 6, 12),
    "gated": lambda: nn.gated_transformer(13, 16, 2, 6, 12),
    "mixture": lambda: nn.transformer(13, 16, 2, 6, 12, experts=ExpertLayers(6, RouterSettings(choices=2))),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5, "seed": 2}], ids=str)
def test_tokens_of_a_cut_model(comm, name, options):
    """Those of the whole one, on all ranks, each of which has a part of the weights."""
    model = MODELS[name]()
    for parameter in name_all(model):
        parameter.data = 8 * parameter.first(seed=0)
    size = sum(one.size for one in model.parameters())
    expected = list(nn.generate(model, [1, 2], 40, **options))
    made, whole = cut_over(comm, model)
    assert all(one.continues for one in operators_in(made))
    assert list(nn.generate(made, [1, 2], 40, whole=whole, **options)) == expected
    held = sum(one.size for one in made.parameters() if one.has_values)
    assert comm.size == 1 or held < 0.8 * size

"""Attributes of operators and losses, assigned after an engine was made: obeyed as on one rank, or refused."""

import zlib
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import fields, replace
from numbers import Number

import numpy as np
import pytest
from conformance import thread_meeting
from conformance.thread_communicator import run_threads
from support.differential.columns import Column
from support.differential.rules import trainable
from support.differential.tasks import GATED_TASKS, GPT, MIXTURE, MLP, gpt, mixture
from support.tiers import default

from parallel import SGD, Engine, nn
from parallel.nn.attention_mask import AttentionMask
from parallel.nn.depths import DepthLayers
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.operator import Operator
from parallel.nn.rewrite import linked, operators_in
from parallel.nn.router import RouterSettings


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Ranks that wait for so many seconds for each other have lost each other."""
    monkeypatch.setattr(thread_meeting, "PATIENCE", 30.0)


class Scaled(nn.Operator):
    """Operator of a user, with an attribute of its class."""

    factor = 1.0
    mixes = ()

    def __init__(self):
        self.table = {"more": 1.0}

    def forward(self, x, run):
        factor = self.factor * self.table["more"]
        return x * np.asarray(factor, x.dtype), factor

    def backward(self, dy, saved, grads):
        return dy * np.asarray(saved, dy.dtype)


def with_scaled(model):
    """The model with a user's operator at the end of its first unit."""
    model.items[0] = nn.Sequential([*model.items[0].items, Scaled()])
    return model


TASKS = {
    "gpt": replace(GPT, model=lambda: with_scaled(gpt(dropout=0.3)()), loss=lambda: SoftmaxCrossEntropy(0.1)),
    "gated": GATED_TASKS[0],
    "mixture": replace(MIXTURE, model=mixture(jitter=0.2, z_loss=0.1, shared=True)),
    "depths": replace(GPT, model=lambda: DepthLayers(0.5, 1).of(gpt()(), 8)),
    "mlp": replace(MLP, model=lambda: nn.mlp([6, 8, 8, 8, 5], dropout=0.3)),
}
MESHES = [
    Column(2, {"mesh": "tp=2"}),
    Column(2, {"mesh": "cp=2"}),
    Column(4, {"mesh": "dp=2,tp=2", "sequence_parallel": True}),
    Column(4, {"mesh": "cp=2,tp=2", "sequence_parallel": True, "context": "ring"}),
    Column(2, {"mesh": "tp=2", "tensor_shards": 4, "reproducible": True}),
    Column(4, {"mesh": "dp=2,tp=2,ep=4"}),
    Column(4, {"mesh": "cp=2,tp=2", "layout": "zero1"}),
    Column(4, {"mesh": "pp=2,tp=2", "layout": "pp:1f1b"}),
    Column(1, {"products": "fp8"}),
    Column(2, {"fake_quant": "int8"}),
    Column(1, {"fake_quant_inputs": "int8"}),
    Column(2, {"prune": 0.3, "steps": 9}),
]
"""Engines that make copies of operators."""


def others(value):
    """Other values of an attribute."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, AttentionMask):
        return [replace(value, window=3)]
    if isinstance(value, RouterSettings):
        return [made for one in fields(value) for made in changed(value, one.name)]
    if isinstance(value, Number):
        return [value - 1 if value > 1 else value + 1] if isinstance(value, int) else [value * 0.5 + 0.05]
    return []


def changed(value, name):
    """Copies of a record in which one field has another value, as far as there are any."""
    for other in others(getattr(value, name)):
        with suppress(ValueError):
            yield replace(value, **{name: other})


def attributes(kind, one):
    """(class, attribute, other value) of what a user may assign."""
    names = {name: getattr(one, name) for name in (*vars(one), *(("factor",) if kind is Scaled else ()))}
    public = {name: value for name, value in names.items() if not name.startswith("_") and name != "name"}
    return [(kind, name, other) for name, value in public.items() for other in others(value)]


def cases(task):
    """Of the first operator of every class in the task's model, and of its loss."""
    first = {type(one): one for one in reversed([*operators_in(task.model()), task.loss()])}
    return [case for kind, one in first.items() for case in attributes(kind, one)]


CASES = {
    f"{name} {kind.__name__}.{attribute}={at}": (name, kind, attribute, other)
    for name, task in TASKS.items()
    for at, (kind, attribute, other) in enumerate(cases(task))
}
IN_OTHER_TASKS = {
    label
    for label, (name, kind, attribute, _) in CASES.items()
    if name != next(one for one, some, other, _ in CASES.values() if (some, other) == (kind, attribute))
}


def play(comm, task, column, kind, attribute, other):
    """Losses and weights of steps, the second and later of which come after the assignment; or the error."""
    settings = {"precision": "fp64", "micro_batch": 2, "batch": 8, **column.settings}
    model, loss = task.model(), task.loss()
    try:
        with Engine(model, loss, comm, SGD(lr=0.1), **settings) as engine:
            found = [engine.step(*task.batch(0, 8)).loss]
            for one in [*operators_in(model), loss]:
                if type(one) is kind:
                    setattr(one, attribute, other)
            found += [engine.step(*task.batch(number, 8)).loss for number in (1, 2)]
            return [*found, engine.evaluate(*task.batch(9, 8)).loss, *engine.state_dict().values()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def alone(column):
    """Column of one rank with the same transforms, and the same order of sums."""
    kept = ("products", "fake_quant", "fake_quant_inputs", "prune", "steps")
    return Column(1, {name: value for name, value in column.settings.items() if name in kept})


def columns_of(label):
    """Engines that can train the task of a case, in another order for every case."""
    fitting = [column for column in MESHES if trainable(TASKS[CASES[label][0]], column)]
    return sorted(fitting, key=lambda column: zlib.crc32(f"{label} {column}".encode()))


@pytest.mark.parametrize("label", default(list(CASES), *(one for one in CASES if one not in IN_OTHER_TASKS)))
def test_an_assigned_attribute_is_obeyed_or_refused(label):
    check(label, columns_of(label)[:1])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("label", CASES)
def test_with_all_engines(label):
    check(label, columns_of(label)[1:])


def check(label, columns):
    name, *case = CASES[label]
    task, wrong = TASKS[name], []
    for column in columns:
        (expected,) = run_threads(1, lambda comm, column=column: play(comm, task, alone(column), *case))
        found = run_threads(column.ranks, lambda comm, column=column: play(comm, task, column, *case))
        wrong += [f"{column}: {text}" for one in found if (text := difference(one, expected))]
    assert not wrong, "\n".join(wrong)


def difference(found, expected):
    """What is wrong with the outcome on a rank: another one than on one rank, where it is no refusal."""
    if isinstance(found, str):
        return "" if "Error" in found or "StepFailed" in found else found
    if isinstance(expected, str):
        return f"expected {expected}, found a result"
    off = [float(np.abs(np.asarray(a) - b).max(initial=0)) for a, b in zip(found, expected)]
    return f"differs by {max(off):.2g} from one rank" if max(off) > 1e-6 else ""


def test_most_are_obeyed():
    """Also attributes of a class, which an operator has not assigned yet."""
    column, task, refused = Column(4, {"mesh": "cp=2,tp=2", "sequence_parallel": True}), TASKS["gpt"], {}
    for name, kind, attribute, other in CASES.values():
        if name == "gpt" and attribute in ("rate", "eps", "factor", "smoothing", "tanh", "heads"):
            found = run_threads(4, lambda comm, case=(kind, attribute, other): play(comm, task, column, *case))
            refused[attribute] = isinstance(found[0], str)
    assert [name for name, one in refused.items() if one] == ["heads"] and len(refused) == 6


def test_links_end_with_the_engine():
    (model,) = run_threads(1, lambda comm: gpt()())

    def run(comm):
        with Engine(model, SoftmaxCrossEntropy(), comm, SGD(lr=0.1), tensor_shards=2) as engine:
            with pytest.raises(ValueError, match=r"CausalAttention .*: heads cannot be assigned while an eng"):
                model.items[1].items[0].inner.items[2].heads = 2
            assert model.items[1].items[0].inner.items[2].heads == 4
        model.items[1].items[0].inner.items[2].heads = 2
        return engine

    run_threads(1, run)


def test_a_refusal_changes_nothing():
    """Neither the operator nor the first of its copies."""
    original, first, second = Linear(3, 4), Linear(3, 4), Linear(3, 4)
    shared = original.columns
    linked(first, original).first = linked(linked(second, first), original).first = original.first
    second.first = 7
    with pytest.raises(ValueError, match="first cannot be assigned"):
        original.first = True
    assert (original.first, first.first, original.columns) == (False, False, shared)


def test_copies_of_users_are_not_linked():
    original = Linear(3, 4)
    made = linked(Linear(3, 4), original)
    for one in (copy(original), deepcopy(original)):
        one.first = True
        assert "_copies" not in vars(one)
    assert not made.first and isinstance(made, Operator)

"""Hyperparameters that are assigned after the engine was made: obeyed from the next step on, or refused."""

from dataclasses import fields

import numpy as np
import pytest
from conformance.thread_communicator import run_threads
from mpi4py import MPI
from support.differential.columns import Column
from support.differential.tasks import MLP

from parallel import LAMB, SGD, Adam, AdamW, Engine, LRSchedule, ParamGroup, RankMismatch, StepFailed

OPTIMIZERS = {
    "sgd": lambda **more: SGD(**{"rate": 0.1, "momentum": 0.9, "ema": 0.5, **more}),
    "plain sgd": lambda **more: SGD(**{"rate": 0.1, **more}),
    "adam": lambda **more: Adam(**{"rate": 0.01, **more}),
    "adamw": lambda **more: AdamW(**{"rate": 0.01, "ema": 0.5, "groups": [{"params": "*.bias", "lr": 0.1}], **more}),
    "lamb": lambda **more: LAMB(**{"rate": 0.01, **more}),
}
OTHERS = {
    "rate": [0.03, LRSchedule("cosine", rate=0.2, steps=9)],
    "lr": [0.02],
    "decay": [0.3],
    "weight_decay": [0.2],
    "groups": [[{"params": "1.*", "lr": 0.0, "weight_decay": 0.5}], (ParamGroup("*.weight", rate=0.5),), ()],
    "ema": [0.9, 0.0],
    "momentum": [0.5, 0.0],
    "nesterov": [True],
    "beta1": [0.5],
    "beta2": [0.7],
    "betas": [(0.3, 0.6)],
    "eps": [1e-2],
}
CASES = [
    (kind, name, value)
    for kind, make in OPTIMIZERS.items()
    for name, values in OTHERS.items()
    for value in values
    if hasattr(make(), name)
]
REFUSED = [("sgd", "ema", 0.0), ("sgd", "momentum", 0.0), ("plain sgd", "ema", 0.9), ("plain sgd", "momentum", 0.5)]
REFUSED += [("plain sgd", "nesterov", True), ("adam", "ema", 0.9), ("adamw", "ema", 0.0), ("lamb", "ema", 0.9)]
COLUMNS = [
    Column(1, {"layout": "dp"}),
    Column(2, {"layout": "zero1"}),
    Column(2, {"layout": "zero3"}),
    Column(2, {"layout": "pp:1f1b", "mesh": "pp=2"}),
]


def test_every_hyperparameter_is_assigned():
    public = {one.name for kind in (SGD, Adam, AdamW, LAMB) for one in fields(kind) if one.init}
    assert public | {"lr", "weight_decay", "betas"} == OTHERS.keys()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("column", COLUMNS, ids=str)
@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=str)
def test_a_value_is_that_of_the_next_step(kind, name, value, column, tmp_path):
    """As of an optimizer that was made with it, and goes on from a checkpoint."""
    make = OPTIMIZERS[kind]

    def run(comm):
        def engine(optimizer):
            return Engine(MLP.model(), MLP.loss(), comm, optimizer, micro_batch=2, **column.settings)

        folder, optimizer = tmp_path / "checkpoint", make()
        with engine(optimizer) as made:
            made.step(*MLP.batch(0, 8))
            made.save(folder)
            if (kind, name, value) in REFUSED:
                before = optimizer.describe()
                with pytest.raises(ValueError, match=f"^{name}: expected|^{name}: the optimizer has the state vectors"):
                    setattr(optimizer, name, value)
                assert optimizer.describe() == before
                return None
            setattr(optimizer, name, value)
            found = [made.step(*MLP.batch(at, 8)).norm for at in (1, 2)], made.state_dict()
        with engine(make(**{name.replace("lr", "rate"): value})) as made:
            made.load(folder)
            return found, ([made.step(*MLP.batch(at, 8)).norm for at in (1, 2)], made.state_dict())

    for pair in run_threads(column.ranks, run):
        if pair is not None:
            (norms, found), (others, expected) = pair
            assert norms == others and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("lr", -1, ValueError),
        ("lr", "0.1", ValueError),
        ("decay", float("inf"), ValueError),
        ("betas", (0.5, 1.0), ValueError),
        ("beta2", 1.0, ValueError),
        ("eps", 0, ValueError),
        ("groups", {"params": "*"}, TypeError),
        ("learning_rate", 0.1, TypeError),
        ("amsgrad", True, TypeError),
    ],
)
def test_what_the_constructor_refuses_is_refused(name, value, error):
    optimizer = AdamW(lr=0.01)
    before = optimizer.describe()
    with pytest.raises(error, match=r"expected|unexpected"):
        setattr(optimizer, name, value)
    assert optimizer.describe() == before and not hasattr(optimizer, "amsgrad")


class Counting(SGD):
    """Optimizer of a user's, with a constructor and an attribute of its own."""

    def __init__(self):
        super().__init__(rate=0.1)

    def update(self, *args, **options):
        self.calls = getattr(self, "calls", 0) + 1
        super().update(*args, **options)


class Tagged(Engine):
    """Engine of a user's, with an attribute of its own."""

    def step(self, *args, **options):
        self.tag = "used"
        return super().step(*args, **options)


def test_derived_classes_have_attributes_of_their_own():
    optimizer = Counting()
    with Tagged(MLP.model(), MLP.loss(), MPI.COMM_SELF, optimizer) as engine:
        engine.step(*MLP.batch(0, 8))
        with pytest.raises(AttributeError):
            engine.inner = None
    assert optimizer.calls == 1 and engine.tag == "used"
    optimizer.lr = 0.2
    assert optimizer.rate == 0.2
    with pytest.raises(ValueError, match="decay: expected"):
        optimizer.decay = -1


def test_a_group_without_parameters_fails_the_step_on_all_ranks():
    def run(comm):
        optimizer = SGD(lr=0.1)
        with Engine(MLP.model(), MLP.loss(), comm, optimizer, layout="zero2", micro_batch=2) as engine:
            engine.step(*MLP.batch(0, 8))
            optimizer.groups = [{"params": "0.wieght", "lr": 1.0}]
            with pytest.raises(StepFailed, match=r"nothing was updated; rank 0: ValueError: groups: \['0.wieght'\] is"):
                engine.step(*MLP.batch(1, 8))
            optimizer.groups = [{"params": "0.*", "lr": 1.0}] if comm.Get_rank() else []
            with pytest.raises(RankMismatch, match=r"optimizer's groups"):
                engine.step(*MLP.batch(1, 8))
            optimizer.groups = []
            engine.step(*MLP.batch(1, 8))

    run_threads(2, run)


@pytest.mark.parametrize("name", ["settings", "optimizer", "model", "inner", "remarks", "clip"])
def test_attributes_of_an_engine_cannot_be_assigned(name):
    def run(comm):
        error = pytest.raises(AttributeError, match=f"^{name}: expected it in the constructor of an engine")
        with Engine(MLP.model(), MLP.loss(), comm, SGD(lr=0.1)) as engine, error:
            setattr(engine, name, None)

    run_threads(1, run)

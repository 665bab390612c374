"""Fingerprints: texts of values, what changes a digest and what does not, and meshes whose ranks are threads."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from conformance.thread_communicator import run_threads

from parallel import AdamW, Engine, RankMismatch, nn
from parallel.engine.fingerprint import Fingerprint, text_of
from parallel.nn.models import build

PAIRS = {
    "numbers": (1.0, 1.5),
    "arrays": (np.zeros(3), np.array([0, 0, 1e-30])),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtypes": (np.zeros(2, np.float32), np.zeros(2, np.int32)),
    "texts": ({"1": 0}, {1: 0}),
    "constants": (lambda x: x + 1, lambda x: x + 2),
    "defaults": (lambda x, a=1: x + a, lambda x, a=2: x + a),
    "names": (lambda x: np.sin(x), lambda x: np.cos(x)),
    "inner functions": (lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x]),
    "closures": ((lambda a: lambda x: x + a)(1), (lambda a: lambda x: x + a)(2)),
    "partial functions": (functools.partial(np.power, 2), functools.partial(np.power, 3)),
    "builtin functions": (np.sin, np.cos),
    "classes": (nn.ReLU, nn.GELU),
    "nesting": ((1, (2, 3)), ((1, 2), 3)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_texts_of_values_that_differ(what):
    one, other = PAIRS[what]
    assert text_of(one) != text_of(other)
    assert text_of(one) == text_of(one)


@dataclass
class Record:
    size: int
    _cache: object = None


def adding(number):
    return lambda x: x + number


@pytest.mark.parametrize(
    "make",
    [
        lambda: Record(3, object()),
        lambda: adding(2),
        lambda: {"a", "b", "c"},
        lambda: np.float64(0.1),
        lambda: object(),
        lambda: [object()],
        lambda: functools.partial(adding, 1),
        lambda: np.arange(6).reshape(2, 3).T,
    ],
)
def test_texts_of_equal_values(make):
    """Without addresses, and of the values alone."""
    assert text_of(make()) == text_of(make())


def test_numbers_of_numpy_and_strides_do_not_count():
    assert text_of(np.float64(0.1)) == text_of(0.1)
    assert text_of(np.arange(6).reshape(2, 3).T) == text_of(np.ascontiguousarray(np.arange(6).reshape(2, 3).T))


def test_recursive_values_end():
    endless = []
    endless.append(endless)
    assert text_of(endless) == text_of(endless)


class Counting(nn.Linear):
    """Operator with state of one rank."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self._calls, self.means, self.history, self.alpha = 0, np.zeros(outputs), [], 0.5

    def forward(self, x, run):
        self._calls += 1
        self.means += 1
        self.history.append(len(x))
        return super().forward(x, run)


def parts():
    model = nn.Sequential(Counting(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    return model, nn.SoftmaxCrossEntropy(), AdamW(lr=0.1, groups=[{"params": "0.*", "lr": 0.2}])


def make_changes():
    """Functions that change a property, and those that do not."""
    return {
        "rate": lambda model, loss, optimizer: setattr(optimizer, "lr", 0.3),
        "eps": lambda model, loss, optimizer: setattr(optimizer, "eps", 1e-3),
        "frozen": lambda model, loss, optimizer: model.requires_grad_(False),
        "decay": lambda model, loss, optimizer: setattr(model.items[0].weight, "decay", False),
        "loss": lambda model, loss, optimizer: setattr(loss, "smoothing", 0.1),
        "weights of the loss": lambda model, loss, optimizer: setattr(loss, "weights", np.ones(2)),
        "attribute": lambda model, loss, optimizer: setattr(model.items[0], "alpha", 0.25),
        "attribute, to an array": lambda model, loss, optimizer: setattr(model.items[0], "alpha", np.ones(2)),
        "new attribute": lambda model, loss, optimizer: setattr(model.items[0], "beta", 1),
        "operator": lambda model, loss, optimizer: model.items.__setitem__(1, nn.GELU()),
        "order": lambda model, loss, optimizer: model.items.insert(1, model.items.pop(2)),
        "more": lambda model, loss, optimizer: model.items.append(nn.ReLU()),
    }, {
        "nothing": lambda model, loss, optimizer: None,
        "values": lambda model, loss, optimizer: setattr(model.items[0].weight, "data", np.ones((3, 4))),
        "hook": lambda model, loss, optimizer: model.items[0].weight.register_hook(print),
        "method": lambda model, loss, optimizer: setattr(model.items[0], "forward", print),
        "call": lambda model, loss, optimizer: model.items[0].means.__iadd__(1),
        "means": lambda model, loss, optimizer: setattr(model.items[0], "means", np.ones(4)),
        "history": lambda model, loss, optimizer: model.items[0].history.append(3),
        "underscore": lambda model, loss, optimizer: setattr(model.items[0], "_calls", 7),
    }


CHANGES, OTHERS = make_changes()


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_a_digest(what):
    model, loss, optimizer = parts()
    found = Fingerprint(model, loss, optimizer)
    before = found.digest()
    assert before == found.digest() == Fingerprint(*parts()).digest()
    CHANGES[what](model, loss, optimizer)
    assert found.digest() != before
    model, loss, optimizer = parts()
    CHANGES[what](model, loss, optimizer)
    if what != "attribute, to an array":
        assert found.digest() == Fingerprint(model, loss, optimizer).digest()


@pytest.mark.parametrize("what", OTHERS)
def test_no_change_of_a_digest(what):
    model, loss, optimizer = parts()
    found = Fingerprint(model, loss, optimizer)
    before = found.digest()
    OTHERS[what](model, loss, optimizer)
    assert found.digest() == before
    model.items[2].rate = 0.25  # all is looked at again
    assert found.digest() != before
    model.items[2].rate = 0.5
    assert found.digest() == before


class Weighted(nn.SoftmaxCrossEntropy):
    """Loss with attributes of several kinds."""

    def __init__(self):
        super().__init__()
        self.weights, self.table, self.names, self.record = np.ones(3), {"a": [1.0]}, {"x"}, Record(3)


IN_PLACE = {
    "array": lambda loss: loss.weights.__setitem__(1, 2.0),
    "dict": lambda loss: loss.table.__setitem__("a", 2.0),
    "list in a dict": lambda loss: loss.table["a"].append(2.0),
    "set": lambda loss: loss.names.add("y"),
    "record": lambda loss: setattr(loss.record, "size", 4),
}


@pytest.mark.parametrize("what", IN_PLACE)
def test_changes_in_place_of_a_digest(what):
    """Also in a step in which nothing else has changed."""
    loss = Weighted()
    found = Fingerprint(nn.Linear(3, 2), loss, AdamW(lr=0.1))
    before = found.digest()
    assert found.digest() == before
    IN_PLACE[what](loss)
    assert found.digest() != before
    other = Weighted()
    IN_PLACE[what](other)
    assert found.digest() == Fingerprint(nn.Linear(3, 2), other, AdamW(lr=0.1)).digest()


def test_moments_count():
    found = Fingerprint(*parts())
    assert found.digest([("steps", 1)]) != found.digest([("steps", 2)])


# ------------------------------------------------------------------------------------------ ranks of meshes

X = np.random.default_rng(0).integers(0, 32, (8, 16))
Y = np.random.default_rng(1).integers(0, 32, (8, 16))
MESHES = {
    "dp=2,tp=2": {},
    "dp=2,cp=2": {},
    "cp=2,tp=2": {},
    "dp=4,ep=2": {"experts": "4"},
    "pp=2,dp=2": {"layout": "pp:1f1b"},
    "pp=2,tp=2": {"layout": "pp:gpipe"},
    "zero3=2,pp=2": {"layout": "pp:1f1b"},
}


def engine(comm, mesh, experts=None, **options):
    model = build("gpt:tiny" if experts is None else "gpt-moe:tiny", (16,), 32, dropout=0.1, experts=experts)
    optimizer = AdamW(lr=0.01)
    return model, optimizer, Engine(model, nn.SoftmaxCrossEntropy(), comm, optimizer, mesh=mesh, **options)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [1, 3])
def test_meshes(mesh, rank):
    def trained(comm):
        model, optimizer, made = engine(comm, mesh, **MESHES[mesh])
        made.step(X, Y)
        if comm.Get_rank() == rank:
            optimizer.lr = 0.02
        with pytest.raises(RankMismatch, match=rf"rate: 0\.01; rank {rank} has optimizer's rate: 0\.02"):
            made.step(X, Y)
        optimizer.lr = 0.02
        if comm.Get_rank() == rank:
            model.parameters()[3].requires_grad = False
        with pytest.raises(RankMismatch, match=rf"rank {rank} has requires_grad of .*: False"):
            made.evaluate(X, Y)
        model.parameters()[3].requires_grad = False
        loss = made.step(X, Y).loss
        made.close()
        return loss, made.steps

    found = run_threads(4, trained)
    assert len(set(found)) == 1
    assert found[0][1] == 2


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if any(axis in mesh for axis in ("tp", "cp", "pp"))])
def test_batches_of_meshes(mesh):
    """Ranks 2 and 3, or 1 and 3, have the same micro-batches; later ones differ in one number."""

    def trained(comm):
        *_, made = engine(comm, mesh, **MESHES[mesh])
        made.step(X, Y)
        other = X.copy()
        other[-1, -1] ^= comm.Get_rank() == 3
        with pytest.raises(RankMismatch, match=r"have the same differ: rank.* inputs of micro-batch .*rank 3 has"):
            made.step(other, Y)
        made.step(X, Y)
        made.close()
        return made.steps

    assert run_threads(4, trained) == [2] * 4

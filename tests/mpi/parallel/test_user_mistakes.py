"""Mistakes in a user's program with `Engine`: each gives an error that names it, on all ranks, and no rank waits."""

import numpy as np
import pytest

from parallel import AdamW, ArrayDataset, Engine, nn
from parallel.runtime.consistency_check import RankMismatch, StepFailed

X = np.random.default_rng(0).standard_normal((12, 1, 4, 4)).astype(np.float32)
Y = np.arange(12) % 3


class Scaled(nn.Operator):
    """Channels times learned factors."""

    def __init__(self, channels):
        self.scale = nn.Parameter((channels, 1, 1), nn.constant(1.0), decay=False)

    def forward(self, x, run):
        return x * self.scale.data, x

    def backward(self, dy, x, grads):
        grads(self.scale, lambda out: (dy * x).sum(axis=(0, 2, 3), out=out[:, 0, 0]))
        return dy * self.scale.data


def model(operator=Scaled, features=2 * 16, outputs=3):
    head = nn.Sequential(nn.Flatten(), nn.Linear(features, outputs))
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), operator(2), head)


def nested(operator):
    """The operator in a unit with others."""
    made = model(operator)
    return nn.Sequential(nn.Sequential(made.items[:2]), made.items[2])


@pytest.fixture(params=["dp", "zero3", "pp"])
def train(comm, request):
    """train(model, x, y, ...): make an engine, train and test; skipped where there are more ranks than units."""
    if request.param == "pp" and comm.size > 2:
        pytest.skip("two units")

    def train(made=None, x=X, y=Y, loss=None, optimizer=None, batches=None, **options):
        parts = made or model(), loss or nn.SoftmaxCrossEntropy(), comm, optimizer or AdamW(lr=0.01)
        engine = Engine(*parts, **{"layout": request.param, **options})
        try:
            for batch in engine.batches(*batches) if batches else [None]:
                engine.step(x, y) if batch is None else engine.step(batch)
            return engine.evaluate(x, y)
        finally:
            engine.inner.close()

    return train


class NoResult(Scaled):
    def forward(self, x, run):
        x * self.scale.data


class NothingSaved(Scaled):
    def forward(self, x, run):
        return x * self.scale.data


class NoGradient(Scaled):
    def backward(self, dy, x, grads):
        super().backward(dy, x, grads)


class OtherShape(Scaled):
    def backward(self, dy, x, grads):
        return super().backward(dy, x, grads)[:, :1]


class ArrayGiven(Scaled):
    def backward(self, dy, x, grads):
        grads(self.scale, (dy * x).sum(axis=(0, 2, 3)))
        return dy


class PlainArray(Scaled):
    def __init__(self, channels):
        self.scale = np.ones((channels, 1, 1), np.float32)

    def forward(self, x, run):
        return x * self.scale, x

    def backward(self, dy, x, grads):
        grads(self.scale, lambda out: np.copyto(out, 1))
        return dy


class NoBackward(nn.Operator):
    def __init__(self, channels):
        pass

    def forward(self, x, run):
        return x, None


OPERATORS = {
    NoResult: r"NoResult [01.]+: expected forward to return \(y, saved\).*; found NoneType",
    NothingSaved: r"NothingSaved [01.]+: expected forward to return \(y, saved\).*; found ndarray",
    NoGradient: r"(Conv2d 0|NoGradient 0.1): expected .* gradient.*, found None",
    OtherShape: r"OtherShape 1: expected a gradient of the input's shape|cannot reshape",
    ArrayGiven: "grads: expected a Parameter and a function that writes its gradient, found Parameter and ndarray",
    PlainArray: "grads: expected a Parameter and a function that writes its gradient, found ndarray and function",
    NoBackward: r"NoBackward [01.]+ has no backward",
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("made", [model, nested])
def test_operator(train, operator, made):
    with pytest.raises(StepFailed, match=OPERATORS[operator]):
        train(made(operator))


CHANGED = X.copy()
CHANGED[3] = np.nan
STEPS = {
    "features": ({"made": lambda: model(features=5)}, r"Linear 2.1: expected an array of shape \(batch, ..., 5\)"),
    "outputs": ({"made": lambda: model(outputs=2)}, "target 2 is not below 2"),
    "axes": ({"x": X[:, 0]}, r"Conv2d 0: expected an array of shape \(batch, 1, height, width\)"),
    "integers": ({"x": (10 * X).astype(int)}, "Conv2d 0: expected floating-point numbers, as x.astype"),
    "NaN": ({"x": CHANGED}, "not a finite number|not finite"),
    "empty": ({"x": X[:0], "y": Y[:0]}, "x, y: expected at least one sample, found none"),
    "lengths": ({"y": Y[:7]}, "expected equal lengths, found 12 inputs, 7 targets"),
    "labels": ({"y": Y + 1}, "target 3 is not below 3"),
    "floats": ({"y": Y.astype("f4")}, "expected targets that are integers"),
    "one hot": ({"y": np.eye(3, dtype=int)[Y]}, r"expected targets of shape \(.*,\), found shape \(.*, 3\)"),
    "column": ({"y": Y[:, None]}, r"expected targets of shape \(.*,\), found shape \(.*, 1\)"),
}


@pytest.mark.parametrize("mistake", STEPS)
def test_step(train, mistake):
    arguments, told = STEPS[mistake]
    with pytest.raises(StepFailed, match=told):
        train(**{name: value() if callable(value) else value for name, value in arguments.items()})


class Unreadable:
    """Data set that cannot read some samples, which one rank has."""

    def __len__(self):
        return len(X)

    def take(self, indices):
        if 5 in indices:
            raise OSError("sample 5 cannot be read")
        return X[indices], Y[indices]


def test_data_that_one_rank_cannot_read(train):
    with pytest.raises(StepFailed, match="sample 5 cannot be read"):
        train(batches=(Unreadable(), 4))


def test_batches_of_not_divisible_numbers(train):
    train(x=X[:7], y=Y[:7])
    train(batches=(ArrayDataset(X, Y), 5))


ARGUMENTS = {
    "x is a number": ({"x": 3.0}, TypeError, "x: expected an array of numbers with an axis of samples first"),
    "x is a dict": ({"x": {"image": X}}, TypeError, "x: expected an array of numbers .* found dict"),
    "x is ragged": ({"x": [[1.0], [1.0, 2.0]]}, TypeError, "x: expected an array of numbers .* found list"),
    "x has objects": ({"x": np.array([None] * 12)}, TypeError, "x: expected an array of numbers .* found object"),
    "layout": ({"layout": "ddp"}, ValueError, "layout: expected one of .*, found 'ddp'"),
    "option": ({"batch_size": 4}, ValueError, "batch_size: expected an option of engines; perhaps batch"),
    "option of the optimizer": ({"lr": 0.1}, ValueError, "lr: .* the optimizer has it"),
    "rate": ({"learning_rate": 0.1}, ValueError, "learning_rate: .* the optimizer has it"),
    "nothing like it": ({"zq": 1}, ValueError, "zq: expected an option of engines; they are layout, precision"),
    "two sizes": ({"micro_batch": 2, "accumulate": 3}, ValueError, "found micro_batch and accumulate"),
    "class as model": ({"made": Scaled}, TypeError, "model: expected an operator"),
    "list as model": ({"made": [nn.Flatten()]}, TypeError, "model: expected an operator"),
    "class as loss": ({"loss": nn.SoftmaxCrossEntropy}, TypeError, "loss: expected an object with forward"),
    "function as loss": ({"loss": np.subtract}, TypeError, "loss: expected an object with forward"),
    "class as optimizer": ({"optimizer": AdamW}, TypeError, "optimizer: expected an optimizer"),
    "tuple as data": ({"batches": ((X, Y), 4)}, TypeError, "data.take.indices., .*; found a tuple$"),
    "batch of 0": ({"batches": (ArrayDataset(X, Y), 0)}, ValueError, "batch: expected a number from 1 on, found 0"),
}


@pytest.mark.parametrize("mistake", ARGUMENTS)
def test_arguments(train, mistake):
    arguments, error, told = ARGUMENTS[mistake]
    with pytest.raises(error, match=told):
        train(**arguments)


def test_ranks_with_own_batches(comm, train):
    if comm.size == 1:
        pytest.skip("one rank")
    with pytest.raises(RankMismatch, match="rank 0 has x: float32 of shape"):
        train(x=X + comm.rank)


class FailsOnOneRank(Scaled):
    """Raises on the rank that has set it so."""

    _fails = False

    def backward(self, dy, x, grads):
        if self._fails:
            raise KeyError("here")
        return super().backward(dy, x, grads)


@pytest.mark.parametrize("layout", ["local", "sgp"])
def test_failure_of_a_replica_before_an_average(comm, layout):
    """The end of the block raises it on all ranks, where no exchange of weights has."""
    made = model(FailsOnOneRank)
    made.items[1]._fails = comm.rank == comm.size - 1
    options = {"layout": layout, "tau": 50}
    engine = Engine(made, nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), **options)
    with pytest.raises(StepFailed, match="here"), engine:
        engine.step(X, Y)


def test_state(comm, tmp_path):
    with Engine(model(), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01)) as engine:
        with pytest.raises(ValueError, match="facts: epoch: expected a value for JSON"):
            engine.save(tmp_path, epoch=np.int64(3) if comm.rank == 0 else 3)
        with pytest.raises(ValueError, match="state: expected a mapping from names to arrays, found a list"):
            engine.load_state_dict(list(engine.state_dict()))


def test_optimizer():
    with pytest.raises(
        TypeError, match=r"AdamW: too many positional arguments; .*the engine has the model's parameters"
    ):
        AdamW(model().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"AdamW: missing a required argument: 'rate'; expected keywords, such as lr"):
        AdamW()
    with pytest.raises(ValueError, match="rate: expected a number from 0 on, or a schedule, found"):
        AdamW(lr="0.1")
    with pytest.raises(TypeError, match="groups: expected a list of dicts"):
        AdamW(lr=0.1, groups={"params": "0.*"})
    with pytest.raises(TypeError, match="ParamGroup: got an unexpected keyword argument 'rates'"):
        AdamW(lr=0.1, groups=[{"params": "0.*", "rates": 1}])


class Tensor:
    """Array-like as a tensor of PyTorch, whose dtype has no kind."""

    dtype = "torch.float32"

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __len__(self):
        return len(self.array)

    def __getitem__(self, at):
        return Tensor(self.array[at])

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)


def test_tensors_and_lists_are_taken(train):
    expected = train().loss
    assert train(x=Tensor(X), y=Tensor(Y)).loss == expected
    assert train(x=X.astype(float).tolist(), y=Y.tolist()).loss == expected


def test_construction():
    with pytest.raises(TypeError, match="shape: expected a tuple of int, found 3"):
        nn.Parameter(3, nn.constant(1.0))
    with pytest.raises(TypeError, match=r"init: expected a function of \(random generator, shape\)"):
        nn.Parameter((3,), np.ones(3))
    with pytest.raises(TypeError, match="Sequential: expected operators, found"):
        nn.Sequential(nn.Flatten(), np.tanh)
    with pytest.raises(ValueError, match="x has 12 samples, y has 7"):
        ArrayDataset(X, Y[:7])

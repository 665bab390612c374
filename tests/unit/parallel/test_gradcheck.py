"""The gradient checker finds what is wrong, and says what."""

import numpy as np
import pytest

from parallel.nn.compose import Sequential
from parallel.nn.gradcheck import GradientMismatch, check, check_loss
from parallel.nn.linear import Linear
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.operator import ArraySpec, Operator, OperatorOutline, Parameter, constant, nbytes_of
from parallel.nn.trial_outline import loss_outline

X = np.arange(1.0, 7).reshape(2, 3)


class Scale(Operator):
    """y = factor x, done right; what is wrong comes by subclasses."""

    def __init__(self):
        self.factor = Parameter((), constant(2.0))

    def forward(self, x, run):
        return x * self.factor.data, x

    def backward(self, dy, saved, grads):
        grads(self.factor, lambda out: np.sum(dy * saved, out=out))
        return dy * self.factor.data

    def outline(self, x):
        return OperatorOutline(ArraySpec(x.shape, x.dtype), x)


class WrongDx(Scale):
    def backward(self, dy, saved, grads):
        return super().backward(dy, saved, grads) * 1.001


class WrongGradient(Scale):
    def backward(self, dy, saved, grads):
        grads(self.factor, lambda out: np.sum(dy, out=out))
        return dy * self.factor.data


class NoGradient(Scale):
    def backward(self, dy, saved, grads):
        return dy * self.factor.data


class Returns(Scale):
    def backward(self, dy, saved, grads):
        grads(self.factor, lambda out: (dy * saved).sum())
        return dy * self.factor.data


class ReturnsAnArray(Linear):
    def backward(self, dy, saved, grads):
        grads(self.weight, lambda out: saved.T @ dy)
        grads(self.bias, lambda out: dy.sum(axis=0, out=out))
        return dy @ self.weight.data.T


class ReturnsAView(Scale):
    """As it may: NumPy's functions return their `out`."""

    def backward(self, dy, saved, grads):
        grads(self.factor, lambda out: [np.sum(dy * saved, out=out.reshape(())), None])
        return dy * self.factor.data


class Twice(Scale):
    def backward(self, dy, saved, grads):
        for half in (dy[:1], dy[1:]):
            grads(self.factor, lambda out, half=half: np.sum(half * saved[: len(half)], out=out))
        return dy * self.factor.data


class Adds(Scale):
    def backward(self, dy, saved, grads):
        grads(self.factor, lambda out: np.add(out, (dy * saved).sum(), out=out))
        return dy * self.factor.data


class WritesSaved(Scale):
    def backward(self, dy, saved, grads):
        dx = super().backward(dy, saved, grads)
        saved *= 2
        return dx


class WritesDy(Scale):
    def backward(self, dy, saved, grads):
        super().backward(dy, saved, grads)
        dy *= self.factor.data
        return dy


class SavesMore(Scale):
    def forward(self, x, run):
        return x * self.factor.data, x.copy()

    def outline(self, x):
        return OperatorOutline(ArraySpec(x.shape, x.dtype), ())


class SavesAnother(Scale):
    """As much as was foretold, but not the input itself."""

    def forward(self, x, run):
        y = x * self.factor.data
        return y, y

    def backward(self, dy, saved, grads):
        return super().backward(dy, saved / self.factor.data, grads)

    def outline(self, x):
        return OperatorOutline(ArraySpec(x.shape, x.dtype), ArraySpec(x.shape, x.dtype))


class AnotherShape(Scale):
    def outline(self, x):
        return OperatorOutline(ArraySpec((*x.shape, 1), x.dtype), x)


class ShapeOfDx(Scale):
    def backward(self, dy, saved, grads):
        return super().backward(dy, saved, grads)[:, :1]


class Forgets(Scale):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)

    def forward(self, x, run):
        return x * self.factor.data * self.random.random(), x


def test_right():
    assert 0 < check(Scale(), X) < 1e-9
    assert check(ReturnsAView(), X) == check(Scale(), X)
    assert check(Scale(), X[:0]) == 0


@pytest.mark.parametrize(
    "operator, message",
    [
        (WrongDx, "gradient by x, along direction 0: differences give"),
        (WrongGradient, "gradient by factor, along direction 0"),
        (NoGradient, "factor is held 1 times, and its gradient came 0 times"),
        (Returns, "backward: Returns: the gradient of factor was returned; expected it in the array"),
        (lambda: Sequential([ReturnsAnArray(3, 2)]), "ReturnsAnArray 0: the gradient of 0.weight was returned"),
        (Twice, "backward of Twice: factor is held 1 times, and its gradient came 2 times"),
        (Adds, "gradient by factor"),
        (WritesSaved, "backward wrote into dy or what was saved"),
        (WritesDy, "backward wrote into dy or what was saved"),
        (SavesMore, "expected 0 bytes saved, found 48"),
        (SavesAnother, "expected 96 bytes saved, found 48"),
        (AnotherShape, "expected a result"),
        (ShapeOfDx, "expected dx of shape"),
        (Forgets, "different results"),
    ],
)
def test_wrong(operator, message):
    with pytest.raises(GradientMismatch, match=message):
        check(operator(), X)


def test_the_point_is_left_as_it_was():
    x = X.copy()
    check(Linear(3, 2), x)
    assert np.array_equal(x, X)


LOSSES = [
    (SoftmaxCrossEntropy, (4, 5), np.array([1, -1, 4, 0])),
    (SoftmaxCrossEntropy, (2, 3, 5), np.array([[1, 2, 3], [-1, -1, 4]])),
    (SoftmaxCrossEntropy, (0, 5), np.zeros(0, np.int64)),
    (MSE, (2, 3), np.ones((2, 3))),
    (MSE, (0, 3), np.ones((0, 3))),
]


@pytest.mark.parametrize("loss, shape, targets", LOSSES)
def test_losses(loss, shape, targets):
    check_loss(loss(), np.random.default_rng(0).standard_normal(shape), targets)


class Distances:
    """Sum of absolute differences, without an outline."""

    def count(self, targets):
        return len(targets)

    def forward(self, y, targets):
        return float(abs(y - targets).sum()), np.sign(y - targets)

    def backward(self, scale, saved):
        return scale * saved


def test_a_loss_without_an_outline():
    """Optional, as that of operators; engines find the saved arrays in a pass on zeros."""
    assert check_loss(Distances(), X, X + 1) < 1e-6
    specs = [ArraySpec(x.shape, x.dtype) for x in (X, X)]
    assert nbytes_of(loss_outline(Distances(), *specs).saved) == X.nbytes


def test_counts():
    targets = np.array([1, -1, 2])
    assert SoftmaxCrossEntropy().count(targets) == 2 and MSE().count(np.ones((2, 3))) == 6
    assert SoftmaxCrossEntropy().correct(np.eye(3)[[1, 1, 0]], targets) == 1


@pytest.mark.parametrize(
    "loss, targets, message",
    [
        (SoftmaxCrossEntropy(), np.array([1, 5]), "target 5 is not below 5"),
        (SoftmaxCrossEntropy(), np.array([1, 2, 3]), r"targets of shape \(2,\)"),
        (SoftmaxCrossEntropy(), np.array([1.0, 2.0]), "integers"),
        (MSE(), np.ones((2, 4)), r"targets of shape \(2, 5\)"),
    ],
)
def test_wrong_targets(loss, targets, message):
    with pytest.raises(ValueError, match=message):
        loss.forward(np.zeros((2, 5)), targets)


def test_wrong_loss():
    class Wrong(MSE):
        def backward(self, scale, saved):
            return super().backward(2 * scale, saved)

    with pytest.raises(GradientMismatch, match="gradient by y"):
        check_loss(Wrong(), X, X + 1)

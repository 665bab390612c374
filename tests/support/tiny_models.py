"""A small model of operators of its own, for tests of the engine: nothing but NumPy or CuPy, and of odd sizes."""

import numpy as np

from parallel.nn.compose import Recompute, Residual, Sequential
from parallel.nn.operator import ArraySpec, Operator, OperatorOutline, Parameter, constant, normal


class Dense(Operator):
    """y = tanh(x W + b); W may be another's, transposed."""

    def __init__(self, inputs, outputs, weight=None, transposed=False):
        self.weight = weight or Parameter((inputs, outputs), normal(0.3))
        self.bias = Parameter((outputs,), constant(0.0), decay=False)
        self.transposed = transposed

    def _matrix(self):
        return self.weight.data.T if self.transposed else self.weight.data

    def forward(self, x, run):
        y = (x @ self._matrix() + self.bias.data).astype(x.dtype)
        y[...] = y / (1 + abs(y))
        return y, (x, y)

    def backward(self, dy, saved, grads):
        x, y = saved
        dz = (dy * (1 - abs(y)) ** 2).astype(dy.dtype)

        def weight(out):
            product = dz.T @ x if self.transposed else x.T @ dz
            out[...] = product

        def bias(out):
            out[...] = dz.sum(0)

        grads(self.weight, weight)
        grads(self.bias, bias)
        return (dz @ self._matrix().T).astype(dy.dtype)

    def outline(self, x):
        y = ArraySpec((*x.shape[:-1], self.bias.shape[0]), x.dtype)
        return OperatorOutline(y, (x, y), 2 * x.shape[0] * self.weight.size)


class Squares:
    """Half the sum of squares of the distance."""

    def count(self, y):
        return len(y)

    def forward(self, scores, y):
        distance = scores - y.astype(scores.dtype)
        return 0.5 * float((distance.astype("f8") ** 2).sum()), distance

    def outline(self, y, targets):
        distance = ArraySpec(y.shape, y.dtype)
        return OperatorOutline(ArraySpec((), np.dtype("f8")), distance)

    def backward(self, scale, saved):
        return (saved * saved.dtype.type(scale)).astype(saved.dtype)


def model(width=20, depth=3, tied=True, recompute=False):
    """Inputs of 7, outputs of 7; the last unit's matrix is the first one's, transposed, if tied."""
    first = Dense(7, width)
    wrap = Recompute if recompute else (lambda unit: unit)
    inner = [wrap(Residual(Sequential([Dense(width, 33), Dense(33, width)]))) for _ in range(depth)]
    last = Dense(width, 7, first.weight, transposed=True) if tied else Dense(width, 7)
    return Sequential([first, *inner, last])


def batches(numbers, step=0, size=5, dtype="f8"):
    """Micro-batches of these numbers: the same for whoever makes them."""
    made = []
    for number in numbers:
        random = np.random.default_rng([step, number])
        x = random.normal(size=(size, 7)).astype(dtype)
        made.append((number, x, np.tanh(x[:, ::-1]).astype(dtype), np.arange(size) + size * number))
    return made

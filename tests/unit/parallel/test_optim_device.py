"""Optimisers on arrays that are not NumPy's: as CuPy's do, they answer to NumPy's functions, but show it no memory."""

import numpy as np
import pytest

from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.nn.operator import Parameter, constant
from parallel.optim.grad_norm import block_squares
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.optimizers import LAMB, SGD, Adam, AdamW


class Foreign:
    """An array out of NumPy's reach. Whoever mixes it with host memory, or asks for its buffer, fails."""

    def __init__(self, host):
        self.host = host
        self.dtype, self.shape, self.ndim = host.dtype, host.shape, host.ndim

    def __len__(self):
        return len(self.host)

    def __getitem__(self, key):
        return Foreign(self.host[key])

    def __setitem__(self, key, value):
        self.host[key] = open_(value)

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to a NumPy array")

    def __array_ufunc__(self, ufunc, method, *inputs, out):
        assert method == "__call__"
        getattr(ufunc, method)(*map(open_, inputs), out=tuple(map(open_, out)))
        return out[0]

    def __array_function__(self, function, types, args, kwargs):
        assert function in (np.zeros_like, np.empty_like)
        return Foreign(function(self.host, *args[1:], **kwargs))

    def reshape(self, *shape):
        return Foreign(self.host.reshape(*shape))

    def get(self):
        return self.host.copy()


def open_(value):
    assert isinstance(value, Foreign | float), f"host memory met a device's: {type(value)}"
    return value.host if isinstance(value, Foreign) else value


SPAN = Span(0, 8 * BLOCK)
PLACES = [
    ParamSpan(Parameter((5 * BLOCK,), constant(0.0)), Span(0, 5 * BLOCK)),
    ParamSpan(Parameter((3 * BLOCK,), constant(0.0), decay=False), Span(5 * BLOCK, 8 * BLOCK)),
]


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(rate=0.1, decay=0.1),
        SGD(rate=0.1, momentum=0.5, nesterov=True),
        Adam(rate=0.1, decay=0.1),
        AdamW(rate=0.1),
        LAMB(rate=0.1),
    ],
    ids=lambda optimizer: optimizer.describe()["name"],
)
def test_the_same_bits_as_on_the_host(optimizer):
    results = []
    for wrap, unwrap in ((np.copy, np.copy), (lambda x: Foreign(x.copy()), Foreign.get)):
        first = np.random.default_rng(0).normal(size=SPAN.size).astype(np.float32)
        weights, gradient = wrap(first), wrap(first[::-1])
        stored = wrap(np.zeros(SPAN.size, np.float16))
        piece = OptimizerSpan(SPAN, weights, gradient, optimizer.fresh(weights), PLACES, stored)
        for step in range(3):
            optimizer.update([piece], step, 0.5, lambda sums: sums)
        vectors = [piece.weights, piece.stored, *piece.state.values()]
        results.append([unwrap(vector).tobytes() for vector in vectors] + [block_squares(weights).tobytes()])
    assert results[0] == results[1]

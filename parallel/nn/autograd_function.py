"""Functions of NumPy arrays as operators, differentiated by the package `autograd`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parallel.nn.array_checks import is_float
from parallel.nn.operator import Parameter, PassMode, parts_of
from parallel.nn.taped import TapedOperator
from quant.types import Array


class AutogradFunction(TapedOperator):
    """Operator of a function ``function(x, **weights)``, as `parallel.nn.from_autograd`."""

    def __init__(self, function: Callable[..., Array], weights: Mapping[str, Parameter]):
        if not callable(function):
            raise TypeError(f"function: expected a function of arrays, found {type(function).__name__}")
        for name, value in weights.items():
            if not isinstance(value, Parameter):
                raise TypeError(f"{name}: expected an nn.Parameter, found {type(value).__name__}")
        super().__init__(getattr(function, "__qualname__", type(function).__name__), weights, {})
        self.function = function

    def _recorded(self, x: Array, weights: Mapping[str, np.ndarray], run: PassMode) -> tuple[Array, Any]:
        from autograd.builtins import tuple as traced_tuple
        from autograd.core import make_vjp

        if not run.training:
            return self.function(*parts_of(x), **weights), None
        inputs = parts_of(x)
        floats = [at for at, one in enumerate(inputs) if is_float(one)]
        names = [name for name in weights if self.weights[name].requires_grad]

        def call(values: Any) -> Any:
            given = dict(zip(floats, values[: len(floats)]))
            here = dict(weights) | dict(zip(names, values[len(floats) :]))
            y = self.function(*(given.get(at, one) for at, one in enumerate(inputs)), **here)
            return traced_tuple(y) if type(y) is tuple else y  # a plain one would be a constant

        vjp, y = make_vjp(call, (*(inputs[at] for at in floats), *(weights[name] for name in names)))
        return y, (vjp, floats, names, type(x) is tuple, len(inputs))

    def _gradients(self, record: Any, dy: Array) -> tuple[Array, Mapping[str, np.ndarray | None]]:
        vjp, floats, names, is_tuple, length = record
        found = vjp(dy)
        of_inputs = dict(zip(floats, found))
        dx = tuple(of_inputs.get(at) for at in range(length))
        return dx if is_tuple else dx[0], dict(zip(names, found[len(floats) :]))

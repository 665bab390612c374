"""Measurement of each unit's forward and backward times, for cutting the model into stages."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallel.nn.operator import Operator, Parameter, PassMode, nbytes_of
from parallel.optim.precision import Precision
from parallel.pipeline.schedule.stage_partition import LayerCost
from parallel.runtime.vector_memory import namespace
from quant.types import Array

TIMES = 3
"""Repetitions per measurement; the shortest time counts."""


def measure(
    units: Sequence[Operator], loss: Any, x: Array, y: Array, recipe: Precision, *, states: int, device: str = "cpu"
) -> list[LayerCost]:
    """Measure seconds and bytes of each unit for a micro-batch in training; those of the last include the loss.

    `x` and `y` are in the model's dtypes, `states` is the number of the optimizer's state vectors. The parameters must
    be named, and keep the values that they have; weights of one unit at a time are allocated.
    """
    xp = namespace(device)
    x, y, layers = xp.asarray(x), xp.asarray(y), []
    for unit in units:
        before = {one: one.data if one.has_values else None for one in unit.parameters()}
        for parameter in before:
            parameter.bind(xp.asarray(parameter.first(0)).astype(recipe.storage))
        x, layer = _layer(unit, x, loss if unit is units[-1] else None, y, recipe, states, device)
        layers.append(layer)
        for parameter, values in before.items():
            parameter.release()
            parameter.data = values
    return layers


def _layer(
    unit: Operator, x: Array, loss: Any, y: Array, recipe: Precision, states: int, device: str
) -> tuple[Array, LayerCost]:
    later: list[tuple[Parameter, Callable[[Array], object]]] = []
    found: dict[str, Any] = {}
    xp = namespace(device)
    mode = PassMode(samples=np.arange(len(x)))

    def forward() -> None:
        found["y"], found["saved"] = unit.forward(x, mode)
        if loss is not None:
            found["loss"] = loss.forward(found["y"], y)[1]

    def backward() -> None:
        later.clear()
        dy = xp.ones_like(found["y"]) if loss is None else loss.backward(1.0, found["loss"])
        unit.backward(dy, found["saved"], lambda parameter, compute: later.append((parameter, compute)))

    def weights() -> None:
        for parameter, compute in later:
            compute(xp.empty(parameter.shape, recipe.wide))

    F, B, W = (_shortest(run, device) for run in (forward, backward, weights))
    size = sum(parameter.size for parameter in unit.parameters())
    kept = sum(recipe.bytes_per_parameter(states).values()) * size
    saved = nbytes_of((found["saved"], found.get("loss")))
    return found["y"], LayerCost(F, B, W, saved, kept)


def _shortest(run: Callable[[], None], device: str) -> float:
    def timed() -> float:
        began = time.perf_counter()
        run()
        if device == "cuda":
            namespace(device).cuda.get_current_stream().synchronize()
        return time.perf_counter() - began

    return min(timed() for _ in range(TIMES))

"""Check of a model's placements on a mesh, before anything runs."""

from collections.abc import Collection, Mapping
from typing import Any

from parallel.nn.array_checks import holders_of
from parallel.nn.operator import Operator, Parameter
from parallel.nn.placement import Placement, PlacementError, Replicate, Shard


def check_placements(
    model: Operator, loss: Any, inputs: Mapping[str, Placement], summed: Collection[str]
) -> dict[str, set[Parameter]]:
    """Walk the model and its loss along every axis. Return the parameters whose gradients are partial sums along each.

    Parameters
    ----------
    model, loss
        A loss without a method `place` takes whole values, or some of the samples.
    inputs : mapping of str to Placement
        Placement of the model's input along each axis.
    summed : collection of str
        Axes over which the engine sums gradients.

    Raises
    ------
    PlacementError
        If an operator, or the loss, cannot take what it would get (the message names it and the axis), or a replicated
        parameter has partial gradients along an axis over which nothing sums them.
    """
    partial: dict[str, set[Parameter]] = {}
    for axis, placement in inputs.items():
        y = model.place(axis, placement, partial.setdefault(axis, set()))
        if hasattr(loss, "place"):
            loss.place(axis, y)
        elif y not in (Replicate(), Shard(0), Shard(1)):
            raise PlacementError(f"{type(loss).__name__}: expected {Replicate()} along {axis}, found {y}")
        for parameter in model.parameters():
            if axis in summed or parameter not in partial[axis]:
                continue
            where = holders_of(model, parameter)
            raise PlacementError(f"{where}: the gradient of {parameter.name} is a partial sum along {axis}, not summed")
    return partial

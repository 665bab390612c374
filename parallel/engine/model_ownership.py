"""Ownership of parameters: each belongs to one open engine; between engines its values belong to the model.

An engine starts from the values that the parameters have, those of an earlier engine or a user's, and else from the
initialisers. When it is closed, parameters keep their values if every rank has all of them.
"""

from __future__ import annotations

import gc
from weakref import WeakKeyDictionary, ref

import numpy as np

from collectives import Communicator
from parallel.nn.operator import Init, Operator, Parameter
from parallel.nn.rewrite import unlink
from parallel.runtime.consistency_check import raise_together
from parallel.runtime.vector_memory import to_host
from quant.types import Array

_owners: WeakKeyDictionary[Parameter, ref[ModelOwnership]] = WeakKeyDictionary()


def expect_free(comm: Communicator, model: Operator) -> None:
    """Raise ValueError on all ranks if an open engine has a parameter of the model. Collective."""
    raise_together(comm, _problem(model.parameters()))


def _problem(parameters: list[Parameter]) -> ValueError | None:
    if _first_taken(parameters) is not None:  # perhaps of an engine that is not in use any more, in a circle
        gc.collect()
    taken = _first_taken(parameters)
    if taken is None:
        return None
    parameter, owner = taken
    return ValueError(
        f"model: parameter {parameter.name} belongs to an open engine of layout {owner.layout}; expected one engine at "
        "a time (close the other one first), or a model with parameters of its own (copy.deepcopy)"
    )


def _first_taken(parameters: list[Parameter]) -> tuple[Parameter, ModelOwnership] | None:
    for parameter in parameters:
        owner = _owners[parameter]() if parameter in _owners else None
        if owner is not None:
            return parameter, owner
    return None


class ModelOwnership:
    """Parameters of a model while they belong to an engine. Construction is collective.

    ValueError on all ranks if one belongs to another open engine. Until `begin`, the initialisers of parameters that
    have values return these, so that every layout, also one that cuts the model, starts from them.

    Attributes
    ----------
    layout : of the engine
    remarks : on where the parameters start, if not where an earlier engine has left them
    """

    def __init__(self, comm: Communicator, model: Operator, layout: str):
        self.layout, self._model, self._parameters = layout, [model], model.parameters()
        raise_together(comm, _problem(self._parameters))
        for parameter in self._parameters:
            _owners[parameter] = ref(self)
        self._given = {parameter: parameter.data for parameter in self._parameters if parameter.has_values}
        self._inits: dict[Parameter, Init] = {}
        self.remarks = self._remarks()

    def _remarks(self) -> tuple[str, ...]:
        lost = [one for one in self._parameters if one.trained_in and one not in self._given]
        if not lost:
            return ()
        return (
            f"parameter {lost[0].name} starts at its initial values: an engine of layout {lost[0].trained_in} has "
            "trained it, and left no values in the model; load_state_dict continues from the state_dict of that "
            "engine, and so does an engine of its model_on_one_rank()",
        )

    def start(self) -> None:
        """Let initialisers return the values that parameters have."""
        for parameter, values in self._given.items():
            self._inits[parameter], parameter.init = parameter.init, _same_values(values)

    def begin(self) -> None:
        """The engine has its values: initialisers are the model's again, and the values before are not needed."""
        self._restore()
        self._given = {}
        for parameter in self._parameters:
            parameter.trained_in, parameter.was_copied = self.layout, False

    def name(self, layout: str) -> None:
        """Name the layout of which the engine is a part."""
        self.layout = layout
        for parameter in self._parameters:
            parameter.trained_in = layout

    def _restore(self) -> None:
        for parameter, init in self._inits.items():
            parameter.init = init
        self._inits = {}

    def is_whole(self, comm: Communicator) -> bool:
        """True if every rank has the values of all parameters. Collective."""
        return all(comm.allgather(all(parameter.has_values for parameter in self._parameters)))

    def keep(self) -> None:
        """Let `release` leave copies of the values that the parameters have now, in host memory of their own."""
        self._given = {one: _on_host(one.data) for one in self._parameters if one.has_values}

    def release(self) -> None:
        """Leave the parameters to the next engine: with the values of `keep`, else without.

        An engine that was not made leaves them as they were.
        """
        self._restore()
        values = self._given
        for parameter in self._parameters:
            parameter.release()
            if parameter in values:
                parameter.data = values[parameter]
            del _owners[parameter]
        for model in self._model:
            unlink(model)
        self._model, self._parameters, self._given = [], [], {}


def _on_host(values: Array) -> np.ndarray:
    return values.copy() if isinstance(values, np.ndarray) else to_host(values)


def _same_values(values: Array) -> Init:
    return lambda random, shape: np.asarray(to_host(values), np.float64).reshape(shape)

"""Parameters: the logical ones, which users hold, and the shards that are derived from them.

A user sets properties of a logical parameter: `requires_grad`, `decay`, hooks, its group in an optimizer. Where a
tensor is cut, ranks hold shards of it. A shard has values of its own and reads every property from its logical
parameter at the time of use, so that properties hold in every layout and may change between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast
from zlib import crc32

import numpy as np

from parallel.nn.placement import Placement, Replicate, TensorCut
from quant.types import Array

Init = Callable[["np.random.Generator", tuple[int, ...]], np.ndarray]
"""Initial values of a parameter of this shape."""


GradientHook = Callable[[Array], Any]
"""Function of a gradient that may change it in place or return another one (else None)."""


class HookHandle:
    """Result of `Parameter.register_hook`, by which the hook is removed."""

    def __init__(self, hooks: list[GradientHook], hook: GradientHook):
        self._hooks: list[GradientHook] | None = hooks
        self._hook = hook

    def remove(self) -> None:
        """End the calls of the hook, registered once; no-op if they have ended."""
        hooks, self._hooks = self._hooks, None
        places = [place for place, each in enumerate(hooks or ()) if each is self._hook]
        if hooks and places:
            del hooks[places[0]]


class ParameterNotGathered(RuntimeError):
    """Raised when a parameter is used whose values are not in this rank's memory."""


@dataclass(eq=False)
class Parameter:
    """Trainable tensor: shape, initialiser, and values (`data`), which sharded layouts keep only while in use.

    Parameters
    ----------
    shape : tuple of int
    init : callable (random generator, shape) -> array
        Initial values. The generator is seeded with the parameter's name: they do not depend on layout or model.
    decay : bool
        True if weight decay applies; usually False for biases and gains. May be changed between steps, on all ranks
        alike.
    requires_grad : bool
        False for a frozen parameter: engines compute no gradient and do not update it. May be changed between steps, on
        all ranks alike; so memory of its gradient and optimizer state stays allocated, and checkpoints have the state.

    Attributes
    ----------
    name : str
        Set by `name_all`: path of attributes and numbers from the model, such as ``"3.mlp.0.weight"``.
    uses : int
        Occurrences in the model's tree, normally gradients per backward pass; 2 for tied embeddings.
    terms : int
        Gradients per use in a backward pass: with more than one, those of the parts of a sequence are handed in apart.
    dtype : dtype
        Storage dtype of the current or last values; before the first, float32 or as an engine has set it.
    hooks : list of callable
        As of `register_hook`, called in this order.
    is_held : bool
        True while an engine has the values (`bind`).
    was_read : bool
        True after `data` was read; engines reset it after their own passes.
    trained_in : str
        Layout of the engine that has the values, or had them last and left none; "" if there is none.
    was_copied : bool
        True of a copy that was made while an engine had the values, until an engine has those of the copy.
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = True
    requires_grad: bool = True
    name: str = field(default="", init=False)
    uses: int = field(default=0, init=False)
    terms: int = field(default=1, init=False)
    dtype: np.dtype = field(default=np.dtype(np.float32), init=False)
    hooks: list[GradientHook] = field(default_factory=list, init=False, repr=False)
    is_held: bool = field(default=False, init=False, repr=False)
    was_read: bool = field(default=False, init=False, repr=False)
    trained_in: str = field(default="", init=False, repr=False)
    was_copied: bool = field(default=False, init=False, repr=False)
    _data: Array = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        shape, init = cast(Any, self.shape), cast(Any, self.init)
        if not isinstance(shape, tuple | list):
            raise TypeError(f"shape: expected a tuple of int, found {shape!r}")
        if not callable(init):
            found = type(init).__name__
            raise TypeError(
                f"init: expected a function of (random generator, shape), as nn.constant(1.0); found {found}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Copy the parameter, with its values if they are in memory; no engine has the copy."""
        made: Parameter = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(deepcopy(vars(self), memo))
        made.was_copied |= self.is_held
        made.is_held = made.was_read = False
        return made

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def logical(self) -> Parameter:
        """Parameter that users hold: this one, or of a shard the whole tensor's."""
        return self

    @property
    def label(self) -> str:
        """Name, and of a shard the indices along the dimension that is cut: ``"1.0.weight[0:16,64:80]"``."""
        cut = self.cut
        if cut is None or cut.local_shape == cut.shape:
            return self.name
        return f"{self.name}[{','.join(f'{start}:{stop}' for start, stop in cut.ranges)}]"

    @property
    def cut(self) -> TensorCut | None:
        """Part of the logical tensor that a shard is; None of a whole tensor."""
        return None

    @property
    def placement(self) -> Placement:
        """Along the axis of its cut: `Replicate()`, `Shard(dim)`, or `Copies(dim, ranks)`."""
        return Replicate() if self.cut is None else self.cut.placement

    @property
    def data(self) -> Array:
        """Values, an array of `shape`; ParameterNotGathered if they are not in memory.

        Between steps, elements may be changed and values assigned, on all ranks alike. An engine trains on from them.
        """
        if self._data is None:
            raise ParameterNotGathered(self._absence())
        self.was_read = True
        return self._data

    @data.setter
    def data(self, values: Array) -> None:
        if values is not None and values.shape != self.shape:
            raise ValueError(f"parameter {self.name}: expected an array of shape {self.shape}, found {values.shape}")
        if not self.is_held:
            self._set(values)
            self.trained_in = ""
        elif values is None:
            raise ValueError(f"parameter {self.name}: expected an array, as an engine has its values; found None")
        else:
            self.data[...] = values

    @property
    def has_values(self) -> bool:
        """True if the values are in memory."""
        return self._data is not None

    def bind(self, values: Array) -> None:
        """Set an engine's array, of `shape`, as the values, or None while they are not in this rank's memory.

        Values that are then assigned to `data` are written into the array, so that the engine has them.
        """
        self.is_held, self.was_read = True, False
        self._set(values)

    def release(self) -> None:
        """End `bind`: the parameter has no values until some are assigned."""
        self.is_held = self.was_read = False
        self._set(None)

    def _set(self, values: Array) -> None:
        self._data = values
        self.dtype = self.dtype if values is None else values.dtype

    def _absence(self) -> str:
        """Message of the error if the values are not in memory."""
        if not self.name:
            return (
                f"a parameter of shape {self.shape} has no values, and no name: expected it, or the operator that "
                "holds it, as an attribute of an operator of the model, or in a list or tuple that is one"
            )
        if self.is_held:
            return (
                f"parameter {self.name} of shape {self.shape} has no values here: this rank's engine has them only "
                "while they are in use, or has a part of them, or other ranks have them. `Engine.model_on_one_rank()` "
                "and `Engine.state_dict()` have whole tensors, `Engine.load_state_dict(values, strict=False)` sets some"
            )
        return (
            f"parameter {self.name} of shape {self.shape} has no values here: an engine gives it some; without an "
            "engine, `parallel.nn.flat_params.FlatParams(model).bind(vector)` does"
        )

    def register_hook(self, hook: GradientHook) -> HookHandle:
        """Call ``hook(gradient)`` with each gradient of the parameter, before gradients are added.

        The array has the parameter's shape: the gradient of one use in one micro-batch, of the sum of losses times the
        loss scale. The hook may change it in place, or return another of the same shape. `remove` of the result ends
        the calls. TypeError if the hook is no function. A step in which it returns anything else fails.

        Where a tensor is cut, the parts of its gradient are gathered for the hook, and all ranks that have a part call
        it with the same array. Ranks must register the same hooks.
        """
        if not callable(hook):
            raise TypeError(f"hook: expected a function of a gradient, found {type(hook).__name__}")
        self.hooks.append(hook)
        return HookHandle(self.hooks, hook)

    def first(self, seed: int) -> np.ndarray:
        """Initial values, float64 of `shape`; they depend only on `seed` and the logical tensor's name and shape."""
        values = self.init(np.random.default_rng([seed, crc32(self.name.encode())]), self.shape)
        return np.asarray(values, np.float64).reshape(self.shape)


def _of_logical(name: str) -> Any:
    """Property that a shard reads from its logical parameter, and sets there."""
    return property(
        lambda shard: getattr(shard.logical, name), lambda shard, value: setattr(shard.logical, name, value)
    )


class ParameterShard(Parameter):
    """Part of a logical parameter. It has values of its own; all properties that users set are the logical parameter's.

    Parameters
    ----------
    logical : Parameter
    cut : TensorCut
    axis : MeshAxis
        Along which the tensor is cut.
    sharers : range
        Ranks of the axis that have the parts of the tensor.
    """

    name = _of_logical("name")
    init = _of_logical("init")
    decay = _of_logical("decay")
    requires_grad = _of_logical("requires_grad")
    hooks = _of_logical("hooks")

    def __init__(self, logical: Parameter, cut: TensorCut, axis: Any, sharers: range):
        self._logical, self._cut, self.axis, self.sharers = logical, cut, axis, sharers
        self.shape, self.dtype = cut.local_shape, logical.dtype
        self.uses, self.terms = 0, 1
        self.is_held = self.was_read = False
        self._data = None

    @property
    def logical(self) -> Parameter:
        return self._logical

    @property
    def cut(self) -> TensorCut:
        return self._cut

    def first(self, seed: int) -> np.ndarray:
        values: np.ndarray = self.cut.take(self.logical.first(seed))
        return values


def normal(deviation: float) -> Init:
    """Initialiser: normal distribution with mean 0 and this standard deviation."""
    return lambda random, shape: random.normal(0.0, deviation, shape)


def constant(value: float) -> Init:
    """Initialiser: all elements equal to `value`."""
    return lambda random, shape: np.full(shape, value)

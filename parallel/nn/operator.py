"""Interface of operators (layers): parameters, forward and backward pass, outline (predicted sizes and flops).

`forward` returns its result and everything `backward` needs (there is no tape), so any number of micro-batches may be
active at once, and recomputation is a small wrapper. `backward` passes each parameter's gradient to a *sink*, as a
function that computes it; the sink decides when and into which memory. Kinds of data parallelism differ in the sink
only. To add an operator, write a subclass of `Operator` in a module of `parallel.nn`, and its kernels, if any, in
`parallel.nn.kernels`; there is no registry.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np

from parallel.nn.buffer import StateBuffer as StateBuffer
from parallel.nn.parameter import Init as Init
from parallel.nn.parameter import Parameter as Parameter
from parallel.nn.parameter import ParameterNotGathered as ParameterNotGathered
from parallel.nn.parameter import constant as constant
from parallel.nn.parameter import normal as normal
from parallel.nn.pass_mode import PassMode as PassMode
from parallel.nn.placement import Partial, Placement, PlacementError, Replicate, Shard
from quant.types import Array


class GradientSink(Protocol):
    """Interface of a gradient sink: callable (parameter, compute), where ``compute(array)`` writes the gradient.

    `compute` overwrites the given array (of the parameter's shape) with the gradient of one use of the parameter in one
    micro-batch; returning it instead is an error (`parallel.nn.array_checks`). The sink calls it once, now or later.
    Several gradients of a parameter in one backward pass of its unit are added.
    """

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None: ...


class ArraySpec(NamedTuple):
    """Shape and dtype of an array, without values. The same object used twice stands for one array, counted once."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parts_of(x: Any) -> tuple[Any, ...]:
    """Arrays (or specs) of an operator's input, result or gradient: those of a tuple, or the only one.

    >>> parts_of((1, 2)), parts_of(3)
    ((1, 2), (3,))
    """
    return x if type(x) is tuple else (x,)


def spec_of(x: Any) -> Any:
    """Spec of an array, or specs of a tuple; None for None."""
    if type(x) is tuple:
        return tuple(map(spec_of, x))
    return None if x is None else ArraySpec(tuple(x.shape), x.dtype)


class OperatorOutline(NamedTuple):
    """Predicted result shape, saved activations, flops and temporary memory of an operator, from its input's shape.

    Attributes
    ----------
    y : ArraySpec
        Result.
    saved : nested tuples of ArraySpec (and other values)
        What `forward` saves. A saved input appears as its own spec, so that shared arrays count once.
    flops : int
        Multiplications and additions of the forward pass's matrix products and convolutions.
    work : int
        Peak bytes of temporaries of either pass with the reference kernels, besides x, y, dx, dy and `saved`.
    recomputed : int
        Those of the flops that the backward pass computes again.
    skipped : int
        Those of the 2 x `flops` of a backward pass that are not needed: the gradient of the model's input.
    """

    y: ArraySpec
    saved: Any
    flops: int = 0
    work: int = 0
    recomputed: int = 0
    skipped: int = 0

    @property
    def training_flops(self) -> int:
        """FLOPs of a forward and a backward pass, without recomputed ones."""
        return 3 * self.flops - self.skipped


Member: TypeAlias = "Parameter | StateBuffer | Operator"
"""Value of an attribute of an operator that belongs to the model."""

_ABSENT = object()

PASSES = ("forward", "onward", "backward")
"""Methods of a pass, which copies have of their own: they may exchange with other ranks."""


class Operator:
    """Base class of layers. Parameters, buffers and operators in attributes, lists, tuples and dicts belong to it.

    Subclasses implement `forward` and `backward`, and may implement `outline`. Arrays have the storage dtype (float32,
    float64, or a half type); operators compute wider where needed. Inputs and results may be tuples of arrays; those of
    integers have the gradient None.
    """

    name: str = ""
    mixes: tuple[int, ...] | None = None
    """Dimensions of the input over which one element of the result is computed; None: all but the batch."""
    exchanges: bool = False
    """True if a pass waits for other ranks along a mesh axis."""

    writes_records: bool = False
    """True if forward passes write `PassMode.terms` or `PassMode.records`."""

    @property
    def continues(self) -> bool:
        """True if a pass takes `PassMode.past`: results at a position depend on earlier ones in it only, or on none.

        Of an operator on sequences of shape (batch, positions, ...); those in it have a value of their own.
        """
        return self.mixes is not None and 1 not in self.mixes

    chooses_tokens: bool = False
    """True if only some tokens reach the operators in it."""

    fixed: Sequence[str] = ()
    """Names of attributes by which an operator is cut or divided: of one with copies they cannot be assigned."""

    if not TYPE_CHECKING:  # which knows the attributes without it

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute, also of the copies that engines have of the operator (`parallel.nn.rewrite.linked`).

            ValueError, with nothing changed, if a copy was made for the value before, or has one of its own.
            """
            copies = self._copies_with(name) if "_copies" in vars(self) else ()
            object.__setattr__(self, name, value)
            for one in copies:
                object.__setattr__(one, name, value)

    def _copies_with(self, name: str) -> list[Operator]:
        """Copies, and their copies, that have the same value of an attribute; none of the name and private ones."""
        if name == "name" or name.startswith("_"):
            return []
        before, found = vars(self).get(name, _ABSENT), list[Operator]()
        for one in filter(None, (copy() for copy in vars(self).get("_copies", ()))):
            if name in (*PASSES, *one.fixed) or vars(one).get(name, _ABSENT) is not before:
                raise ValueError(
                    f"{type(self).__name__} {self.name}: {name} cannot be assigned while an engine has the model, as "
                    "it was cut, divided or built by that; expected it before the engine is made"
                )
            found += [one, *one._copies_with(name)]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Attributes, for `copy` and `pickle`; links to copies that engines have are those of this object."""
        return {name: value for name, value in vars(self).items() if name not in ("_copies", "_original")}

    def __call__(self, x: Any) -> Array:
        """Result for inputs x, an array or a tuple, outside of a training: without dropout, by the present values.

        Floating-point inputs are converted to the dtype of the parameters. ParameterNotGathered if a parameter has no
        values here: `parallel.Engine.model_on_one_rank` returns a model that has all.
        """
        dtypes = {one.dtype for one in self.parameters()}
        parts = tuple(_input(one, dtypes) for one in parts_of(x))
        given = parts if type(x) is tuple else parts[0]
        return forward_of(self, given, PassMode(training=False, samples=np.arange(len(parts[0]))))[0]

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Return (result y, values `saved` for `backward`). Must modify neither x nor the operator."""
        raise NotImplementedError(f"{type(self).__name__} {self.name} has no forward")

    def onward(self, x: Array, run: PassMode, after: Operator | None) -> tuple[Array, tuple[Any, ...]]:
        """Forward pass, which subclasses may fuse with the next operator `after`: (y, tuple of saved values).

        If fused, y is the result of `after`, and there are two saved values, equal to those of separate passes.
        """
        y, saved = forward_of(self, x, run)
        return y, (saved,)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Return dx, the input's gradient (None: not needed), from dy; pass the parameters' gradients to `grads`.

        Must not modify dy or saved values: `grads` may compute from them later.
        """
        raise NotImplementedError(f"{type(self).__name__} {self.name} has no backward")

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Predicted result, saved arrays, flops and temporary bytes for an input of the shape and dtype of `x`.

        By default from a forward pass on zeros, which leaves out flops and temporaries.
        """
        from parallel.nn.trial_outline import trial_outline

        return trial_outline(self, x)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        """Placement of the result along a mesh axis, from that of the input; PlacementError if it cannot take that.

        Adds to `partial` the replicated parameters whose gradients are terms of a sum over the axis.
        """
        mixed = isinstance(x, Shard) and (x.dim != 0 if self.mixes is None else x.dim in self.mixes)
        if mixed or isinstance(x, Partial):
            raise self.refuse(axis, x)
        if x != Replicate():
            partial.update(value for _, value in self.members() if isinstance(value, Parameter))
        return x

    def refuse(self, axis: str, x: Placement, expected: str = "another placement") -> PlacementError:
        """Error that names the operator and the axis along which it cannot take the placement `x`."""
        return PlacementError(f"{type(self).__name__} {self.name}: expected {expected} along {axis}, found {x}")

    def members(self) -> Iterator[tuple[str, Member]]:
        """Yield (name, value) of parameters, buffers and operators in attributes, lists, tuples and dicts (`items.0`).

        In the order of attributes and items; containers may be nested (`DEPTH`). All ranks must have the same order.
        Members of an operator with an empty name have paths as if they were this one's.
        """
        for name, value in vars(self).items():
            if isinstance(value, _SEARCHED):
                yield from _members_in(value, name)

    def walk(self, path: str = "") -> Iterator[tuple[str, Member]]:
        """Yield (path, value) of all members of this operator and those below it; shared ones repeatedly."""
        for name, value in self.members():
            here = f"{path}.{name}" if path and name else path or name
            yield here, value
            if isinstance(value, Operator):
                yield from value.walk(here)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze (False) or release all parameters of this operator and those below it; returns the operator."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def parameters(self) -> list[Parameter]:
        """All parameters of this operator and those below it, once each, in order of first occurrence."""
        found = {id(value): value for _, value in self.walk() if isinstance(value, Parameter)}
        return list(found.values())


def forward_of(operator: Operator, x: Array, run: PassMode) -> tuple[Array, Any]:
    """Result of ``operator.forward(x, run)``; TypeError if it is not an array, or tuple of some, and saved values."""
    made: Any = operator.forward(x, run)
    results: Sequence[Any] = parts_of(made[0]) if isinstance(made, tuple) and len(made) == 2 else ()
    if not results or not all(hasattr(one, "dtype") for one in results):
        found = f"{len(made)} values" if isinstance(made, tuple) and len(made) != 2 else type(made).__name__
        name = f"{type(operator).__name__} {operator.name}"
        raise TypeError(
            f"{name}: expected forward to return (y, saved): an array, and what backward needs; found {found}"
        )
    y, saved = made
    return y, saved


def name_all(model: Operator) -> list[Parameter]:
    """As `set_names`; also count the uses of every parameter."""
    parameters = set_names(model)
    for parameter in parameters:
        parameter.uses, parameter.terms = 0, 1
    for _, value in model.walk():
        if isinstance(value, Parameter):
            value.uses += 1
    return parameters


def set_names(model: Operator) -> list[Parameter]:
    """Set `name` of every operator, parameter and buffer to its first path in the model; return the parameters.

    ValueError if an operator holds others, or parameters, outside of the tree, as in a set, or if two parameters would
    have the same name.
    """
    first: dict[int, tuple[str, Member]] = {}
    for path, value in model.walk():
        first.setdefault(id(value), (path, value))
    _expect_in_tree(model, first)
    for path, value in reversed(first.values()):  # wrappers of one operator name that too: the first comes last
        value.name = path
    parameters = [value for _, value in first.values() if isinstance(value, Parameter)]
    names = Counter(parameter.name for parameter in {parameter.logical for parameter in parameters})
    if double := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"parameters: expected different names, found two that are {double[0]}")
    return parameters


DEPTH = 3
"""Nesting depth up to which containers are searched."""


def _input(x: Any, dtypes: set[np.dtype]) -> Array:
    """Array of an input, floating-point numbers in the dtype of the parameters if they have one."""
    x = x if hasattr(x, "__cuda_array_interface__") else np.asarray(x)
    return x.astype(*dtypes, copy=False) if len(dtypes) == 1 and x.dtype.kind == "f" else x


_NAMED = (Parameter, StateBuffer, Operator)
_CONTAINERS = (dict, list, tuple)
_SEARCHED = _NAMED + _CONTAINERS


def _members_in(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Member]]:
    """Yield (path, value) of `value` itself, or of the members in it if it is a container."""
    if isinstance(value, _NAMED):
        yield path, value
    elif depth < DEPTH and isinstance(value, _CONTAINERS):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, _SEARCHED):
                yield from _members_in(item, f"{path}.{key}", depth + 1)


def _expect_in_tree(model: Operator, found: dict[int, tuple[str, Member]]) -> None:
    """Raise ValueError if an attribute holds an operator or parameter that is not in `found`, as one inside a set."""
    there = {id(model): ("", model), **found}
    operators = [(path, value) for path, value in there.values() if isinstance(value, Operator)]
    for path, operator in operators:
        for name, value in vars(operator).items():
            if id(value) in there:
                continue
            # `members` may leave out an operator for what is in it, as that of `Recompute` does.
            for item in value.parameters() if isinstance(value, Operator) else _held_by(value):
                if id(item) not in there:
                    raise ValueError(
                        f"{type(operator).__name__} {path or '(the model)'}: {name} holds a {type(item).__name__} in a "
                        f"{type(value).__name__}, and `members` does not find it; expected it as an attribute, or in "
                        f"lists, tuples and dicts at most {DEPTH} deep"
                    )


def _held_by(value: Any, depth: int = 0) -> Iterator[Member]:
    """Yield `value`, if it is a member, and those in it, if it is a container, also where too deep."""
    if isinstance(value, _NAMED):
        yield value
    elif depth <= DEPTH and isinstance(value, (*_CONTAINERS, set, frozenset)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _held_by(item, depth + 1)


def sum_flops(outlines: Sequence[OperatorOutline]) -> dict[str, int]:
    """Sums of the FLOPs of several operators, by name of the outline's field."""
    return {name: sum(getattr(one, name) for one in outlines) for name in ("flops", "recomputed", "skipped")}


def arrays_of(saved: Any) -> dict[int, Any]:
    """Distinct arrays (or specs) in nested tuples, as {id: array}; a view counts as the array that it views."""
    if isinstance(saved, ArraySpec):
        return {id(saved): saved}
    if isinstance(saved, list | tuple):
        return {key: value for item in saved for key, value in arrays_of(item).items()}
    if hasattr(saved, "nbytes") and hasattr(saved, "dtype"):
        while isinstance(getattr(saved, "base", None), type(saved)):  # the last base may be a buffer, no array
            saved = saved.base
        return {id(saved): saved}
    return {}


def nbytes_of(saved: Any) -> int:
    """Total bytes of all distinct arrays (or specs) in nested tuples; a view counts as the whole array it views."""
    return sum(value.nbytes for value in arrays_of(saved).values())

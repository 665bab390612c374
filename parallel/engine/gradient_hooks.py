"""Hooks of gradients, which are called with whole gradients of logical parameters, and gradients of frozen parameters.

The gradient of a tensor that is cut comes in parts: from the shards of a rank one after another, and on several ranks.
For a hook the parts of one use are put together, on all ranks that have some, and each shard takes its part of what the
hook returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from parallel.nn import kernels
from parallel.nn.operator import GradientSink, Parameter
from parallel.nn.parameter import ParameterShard
from parallel.runtime.validation import is_real
from parallel.sharding.tensor.exchange import allreduce_among
from quant.types import Array

Compute = Callable[[Array], object]


class HookedGradients:
    """Gradient sink of the backward pass of a unit, before the sink of a layout.

    Skips the gradients of frozen parameters, and calls the hooks of others. `finish` ends the pass: gradients of shards
    with hooks are handed on then, as those of all parts of a tensor must be known. `errors`, a `PassErrors`, notes
    errors of gradients and hooks, after which a rank goes on with its exchanges; None: they are raised.
    """

    def __init__(self, sink: GradientSink, errors: Any = None):
        self._sink, self._errors = sink, errors
        self._parts: dict[Parameter, list[tuple[ParameterShard, Compute]]] = {}

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        if not parameter.requires_grad:
            return
        if not parameter.hooks:
            self._sink(parameter, compute)
        elif isinstance(parameter, ParameterShard):
            guarded = compute if self._errors is None else self._errors.guarded(compute)
            self._parts.setdefault(parameter.logical, []).append((parameter, guarded))
        else:
            self._sink(parameter, partial(self._write_changed, parameter, compute))

    def finish(self) -> None:
        for parts in self._parts.values():
            for use in _by_use(parts):
                gradient = _WholeGradient(use, self._call_hooks)
                for number, (shard, _) in enumerate(use):
                    self._sink(shard, partial(gradient.write, number))

    def _write_changed(self, parameter: Parameter, compute: Compute, out: Array) -> None:
        """Write the gradient of a whole tensor, as the hooks leave it."""
        compute(out)
        self._call_hooks(parameter, out)

    def _call_hooks(self, parameter: Parameter, gradient: Array) -> None:
        try:
            for hook in (*parameter.hooks,):  # a hook may remove itself
                if (changed := hook(gradient)) is not None:
                    gradient[...] = _expect_gradient(changed, gradient)
        except BaseException as error:
            error.add_note(f"in a hook of {parameter.name}")
            if self._errors is None:
                raise
            self._errors.add(error)


def _expect_gradient(changed: Any, gradient: Array) -> Array:
    """Return the result of a hook; TypeError or ValueError unless it can take the place of the gradient."""
    if not hasattr(changed, "dtype"):
        raise TypeError(f"hook: expected an array or None as its result, found {type(changed).__name__}")
    if changed.shape != gradient.shape or not is_real(changed):
        found = f"one of {changed.dtype} of shape {changed.shape}"
        raise ValueError(
            f"hook: expected an array of real numbers of shape {gradient.shape} as its result, found {found}"
        )
    return changed


class _Use(NamedTuple):
    """Gradient of one shard in one use of a logical parameter."""

    shard: ParameterShard
    compute: Compute


def _by_use(parts: list[tuple[ParameterShard, Compute]]) -> list[list[_Use]]:
    """Gradients of this rank's shards of a tensor by use: the first of every shard, then the second of every shard."""
    uses: list[list[_Use]] = []
    counts: dict[ParameterShard, int] = {}
    for shard, compute in parts:
        number = counts[shard] = counts.get(shard, -1) + 1
        if number == len(uses):
            uses.append([])
        uses[number].append(_Use(shard, compute))
    return uses


class _WholeGradient:
    """Gradient of one use of a tensor in parts. It is gathered and passed to the hooks at the first part asked for."""

    def __init__(self, parts: list[_Use], call_hooks: Callable[[Parameter, Array], None]):
        self._parts, self._call_hooks = parts, call_hooks
        self._values: Array = None

    def write(self, number: int, out: Array) -> None:
        """Write the part of a shard."""
        if self._values is None:
            self._values = self._gathered(out)
            self._call_hooks(self._parts[0].shard.logical, self._values)
        self._parts[number].shard.cut.get(self._values, out)

    def _gathered(self, like: Array) -> Array:
        """Sum over the ranks of arrays with their parts in place; of copies of a part, the first counts."""
        first = self._parts[0].shard
        whole = kernels.array_namespace(like).zeros(first.logical.shape, like.dtype)
        for shard, compute in self._parts:
            part = kernels.array_namespace(like).empty(shard.shape, like.dtype)
            compute(part)
            if shard.cut.holders[0] == shard.axis.rank:
                shard.cut.put(part, whole)
        (total,) = allreduce_among(first.axis, [whole], [first.sharers])
        return total

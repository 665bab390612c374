"""Errors of operators between exchanges: the rank goes on with zeros, so that no other rank waits for it.

Along ``tp`` and ``cp`` operators exchange in the middle of a pass. A rank on which one raises must make the same
exchanges as the others until the end of the step, where errors are raised on all ranks before anything is updated.
Operators between exchanges are therefore guarded: after an error zeros take the place of the result or gradient. An
operator or loss with exchanges computes its operands of them by `parallel.sharding.tensor.exchange.Operands`.
Exceptions of any kind count, such as SystemExit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import float_type, named
from parallel.nn.compose import Wrapper
from parallel.nn.expert_group import ExpertGroup
from parallel.nn.operator import (
    ArraySpec,
    GradientSink,
    Operator,
    OperatorOutline,
    Parameter,
    PassMode,
    parts_of,
    spec_of,
)
from parallel.nn.placement import Placement
from parallel.nn.rewrite import operators_in, replaced
from quant.types import Array


class PassErrors:
    """First error of guarded operators since the last `take`."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def add(self, error: BaseException) -> None:
        """Note an error of computations; that of an exchange is raised, as this rank cannot go on with the others."""
        if getattr(error, "left_collective", False):
            raise error
        self.first = self.first or error

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context that ends with an error in it, which is noted."""
        try:
            yield
        except BaseException as error:
            self.add(named(error))

    def sink(self, grads: GradientSink) -> GradientSink:
        """Wrap a gradient sink: zeros take the place of a gradient whose function, or hook, raises an error."""
        return lambda parameter, compute: grads(parameter, self.guarded(compute))

    def guarded(self, compute: Callable[[Array], object]) -> Callable[[Array], object]:
        """The function of a gradient, which may be called after the pass; zeros take the place of a failed one."""

        def guarded(out: Array) -> object:
            try:
                return compute(out)
            except BaseException as error:
                self.add(named(error))
                _write_zeros(out)
                return None

        return guarded

    def take(self) -> BaseException | None:
        """Return the error, or None, and forget it."""
        found, self.first = self.first, None
        return found

    def guard(self, model: Operator, loss: Any) -> tuple[Operator, Any]:
        """Copy of a model, and loss, in which the largest operators without exchanges are guarded."""

        def replacement(operator: Operator) -> Operator | None:
            exchanges = any(one.exchanges for one in operators_in(operator))
            return None if exchanges else GuardedOperator(operator, self)

        ours = replaced(model, replacement)
        for group in (one for one in operators_in(ours) if isinstance(one, ExpertGroup)):
            group.errors = self
        if getattr(loss, "exchanges", False):
            loss.errors = self
        return ours, GuardedLoss(loss, self)


class _Like:
    """Spec and namespace of an array, or a tuple of some, to make zeros in its place."""

    def __init__(self, x: Array):
        self.spec, self._namespace = spec_of(x), kernels.array_namespace(parts_of(x)[0])

    def zeros(self, spec: Any = None) -> Array:
        made = tuple(self._namespace.zeros(*one) for one in parts_of(spec or self.spec))
        return made if type(spec or self.spec) is tuple else made[0]


class _Failed:
    """Saved value of a forward pass that has raised an error."""


FAILED = _Failed()


class _LikeInner:
    """Object whose other attributes are those of the object `inner` in it."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet, as in a copy
            raise AttributeError(name)
        return getattr(self.inner, name)


class GuardedOperator(_LikeInner, Wrapper):
    """Operator without exchanges; an error of a pass is noted in `errors`, and zeros take the place of its result.

    Their shape is known from the outline, which is computed before the first exchange of a step with such inputs.
    """

    def __init__(self, inner: Operator, errors: PassErrors):
        super().__init__(inner)
        self._errors, self.mixes = errors, inner.mixes
        self._results: dict[ArraySpec, ArraySpec] = {}  # by input

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        like = _Like(x)
        try:
            y, saved = self.inner.forward(x, run)
        except BaseException as error:
            y = like.zeros(self._results.get(like.spec) or self.inner.outline(like.spec).y)
            self._errors.add(named(error))
            saved = FAILED
        return y, (like, saved)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        like, inner = saved
        handed_in: set[int] = set()

        def sink(parameter: Parameter, compute: Callable[[Array], object]) -> None:
            handed_in.add(id(parameter))
            grads(parameter, self._errors.guarded(compute))

        try:
            if inner is not FAILED:
                return self.inner.backward(dy, inner, sink)
        except BaseException as error:
            self._errors.add(named(error))
        for parameter in self.inner.parameters():  # a sum over ranks must have as many terms on all
            if id(parameter) not in handed_in:
                grads(parameter, _write_zeros)
        return None if float_type(like.spec) is None else like.zeros()

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        return self.inner.place(axis, x, partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        found = self.inner.outline(x)
        self._results[x] = found.y
        return found


def _write_zeros(out: Array) -> None:
    out[...] = 0


class GuardedLoss(_LikeInner):
    """Loss; an error of a pass is noted in `errors`, and the gradient is zero."""

    def __init__(self, inner: Any, errors: PassErrors):
        self.inner, self.errors = inner, errors

    def forward(self, y: Array, targets: Array) -> tuple[Any, Any]:
        try:
            total, saved = self.inner.forward(y, targets)
        except BaseException as error:
            self.errors.add(named(error, self.inner))
            total, saved = 0.0, FAILED
        return total, (_Like(y), saved)

    def backward(self, scale: float, saved: Any) -> Array:
        like, inner = saved
        try:
            if inner is not FAILED:
                return self.inner.backward(scale, inner)
        except BaseException as error:
            self.errors.add(named(error, self.inner))
        return like.zeros()

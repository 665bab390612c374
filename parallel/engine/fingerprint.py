"""Fingerprint of an engine's parts: names and values of everything that must be equal on all ranks.

Ranks compare all of it when an engine is made (`agreed`), and a digest of what may change in every step
(`Fingerprint.digest`). Not compared is what one rank may have alone: gradient hooks, the settings `RUN_FIELDS`,
attributes whose names begin with an underscore, functions in place of methods (as those that measure time), and, after
the engine was made, arrays, lists and dicts of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from numbers import Number
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator
from parallel.nn.operator import Operator, Parameter, name_all
from parallel.optim.optimizer import Optimizer
from parallel.optim.param_groups import ParamGroup
from parallel.runtime.consistency_check import (
    Facts,
    RankMismatch,
    array_digest,
    call_together,
    check_equal,
    digest,
    facts_digest,
    raise_difference,
)

COPIED = (
    "the model was copied while an open engine had the values, not the same on all ranks; copy it before the engine "
    "is made, or after it is closed"
)
"""Cause of a difference between values."""


def agreed(
    comm: Communicator, model: Operator, loss: Any, optimizer: Optimizer, seed: int, more: Facts = ()
) -> Fingerprint:
    """Fingerprint of an engine's parts, equal on all ranks, as are `more` facts, which come first. Collective.

    `seed` is that of initial values. RankMismatch on all ranks if they differ. An error of an argument, such as a group
    of the optimizer without parameters of the model, is raised on all ranks too.
    """

    def described() -> tuple[Fingerprint, Facts]:
        made = Fingerprint(model, loss, optimizer)
        values = made.values(seed) if comm.Get_size() > 1 else ()
        return made, [*more, *made.structure(), *made.properties(), *values]

    made, facts = call_together(comm, described)
    try:
        check_equal(comm, facts)
    except RankMismatch as error:
        for one in model.parameters():
            if one.was_copied and any(f" {what} of {one.name}: " in str(error) for what in ("values", "init")):
                error.args = (f"{error}; {COPIED}",)
        raise
    return made


class _Attributes(NamedTuple):
    """Attributes of an operator, loss or optimizer; names of public ones: compared in every step, and others."""

    label: str
    values: Mapping[str, Any]
    watched: Sequence[str]
    others: Sequence[str]


class Fingerprint:
    """Facts of a model, loss and optimizer that must be equal on all ranks."""

    def __init__(self, model: Operator, loss: Any, optimizer: Optimizer):
        self._model, self._loss, self._optimizer = model, loss, optimizer
        optimizer.check(name_all(model))
        self._look()

    def structure(self) -> Facts:
        """Parameters, operators and their arrays, which stay the same, or are state of one rank, in training."""
        arrays = [
            (f"{part.label}.{name}", text_of(part.values[name]))
            for part in self._parts
            for name in part.others
            if not isinstance(part.values[name], Operator | Parameter)
        ]
        return [*((f"parameter {one.name}", one.shape) for one in self._parameters), *self._places, *arrays]

    def values(self, seed: int) -> Facts:
        """Values at the start: those that parameters have, else of users' initialisers, else the initialisers."""
        return [_values_of(one, seed) for one in self._parameters]

    def properties(self) -> Facts:
        """Flags of parameters, and attributes of operators, loss and optimizer that users may change."""
        flags = [
            (f"{what} of {one.name}", getattr(one, what))
            for one in self._parameters
            for what in ("requires_grad", "decay")
        ]
        attributes = [
            (f"{part.label}.{name}" if part.label != OPTIMIZER else f"{OPTIMIZER}'s {name}", text_of(part.values[name]))
            for part in self._parts
            for name in part.watched
        ]
        kinds = [("loss", _kind(self._loss)), ("optimizer's name", type(self._optimizer).__name__.lower())]
        return [*self._places, *flags, *kinds, *attributes]

    def digest(self, moment: Facts = ()) -> int:
        """Digest of `properties` and of facts of the `moment`, such as a learning rate; below 2^32."""
        now = self._snapshot()
        if not _is_same(now, self._seen):
            self._look()
        return digest(repr(moment).encode(), self._digest)

    def raise_difference(self, comm: Communicator, moment: Facts = ()) -> None:
        """Raise RankMismatch on all ranks, whose digests differ. Collective."""
        raise_difference(comm, [*self.properties(), *moment], [range(comm.Get_size())])

    def compare(self, comm: Communicator, moment: Facts = ()) -> None:
        """Raise RankMismatch on all ranks if their properties, or facts of the moment, differ. Collective."""
        if len(set(comm.allgather(self.digest(moment)))) > 1:
            self.raise_difference(comm, moment)

    def _look(self) -> None:
        """Find the parameters and attributes that there are, and the digest of their values."""
        first: dict[int, str] = {}
        self._places: list[tuple[str, str]] = []
        self._parameters: list[Parameter] = []
        self._lists: list[Sequence[Any]] = []
        self._parts: list[_Attributes] = []
        for path, one in [("", self._model), *self._model.walk()]:
            known = first.setdefault(id(one), path)
            label = f"{type(one).__name__} {path}".rstrip()
            self._places.append((path or "model", _kind(one) if known == path else f"the same as {known}"))
            if known != path:
                continue
            if isinstance(one, Parameter):
                self._parameters.append(one)
            else:
                self._parts.append(_attributes(label, one, _is_plain))
                self._lists += (value for value in vars(one).values() if _holds_operators(value))
        self._parts.append(_attributes("loss", self._loss, lambda _: True))
        self._parts.append(_attributes(OPTIMIZER, self._optimizer, lambda _: True))
        self._seen = self._snapshot()
        self._digest = facts_digest(self.properties())

    def _snapshot(self) -> list[Any]:
        """Objects that are equal as long as the properties are: quick to make and compare, since most are identical.

        Of values that may change in place these are texts.
        """
        flags: list[Any] = [(one.requires_grad, one.decay) for one in self._parameters]
        values = [
            (len(part.values), *(_state_of(part.values.get(name)) for name in part.watched)) for part in self._parts
        ]
        return [*flags, *values, *map(tuple, self._lists)]


OPTIMIZER = "optimizer"

FIXED = (Number, str, bytes, Enum, type(None), np.generic, np.dtype, type, ModuleType, FunctionType, ParamGroup)
"""Types of objects whose text stays the same, but for variables that a function closes over."""


def _state_of(value: Any) -> Any:
    """Object that is another one once the text of a value is: the value, or of one that may change in place its text.

    Arrays on a device are the values themselves, since a look at their elements would wait for the device.
    """
    if isinstance(value, FIXED):
        return value
    if isinstance(value, tuple | frozenset) and all(isinstance(one, FIXED) for one in value):
        return value
    return value if hasattr(value, "__cuda_array_interface__") else text_of(value)


def _values_of(parameter: Parameter, seed: int) -> tuple[str, str]:
    if parameter.has_values:
        return f"values of {parameter.name}", array_text(parameter.data)
    if (getattr(parameter.init, "__module__", None) or "").partition(".")[0] == __package__.partition(".")[0]:
        return f"init of {parameter.name}", text_of(parameter.init)  # these functions depend on nothing else
    return f"initial values of {parameter.name}", array_text(parameter.first(seed))


def _attributes(label: str, owner: Any, is_watched: Callable[[Any], bool]) -> _Attributes:
    """Attributes of an object; those with values that `is_watched` are compared in every step."""
    values = getattr(owner, "__dict__", {})
    public = [name for name in values if not name.startswith("_") and name != "name"]
    public = [name for name in public if not (callable(values[name]) and hasattr(type(owner), name))]
    watched = [name for name in public if is_watched(values[name])]
    return _Attributes(label, values, watched, [name for name in public if name not in watched])


def _holds_operators(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, Operator) for one in value)


def _is_plain(value: Any) -> bool:
    """True for values that are no state of one rank, and no containers of operators."""
    return not isinstance(value, Operator | Parameter | list | dict | set) and not hasattr(value, "__array__")


def _is_same(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except ValueError:  # an attribute is another array
        return False


DEPTH = 4
"""Levels of containers, functions and records in a value that are compared."""


def text_of(value: Any, depth: int = 0) -> str:
    """Text that is equal on ranks whose values are: without addresses, and for arrays and code with digests.

    >>> text_of({"rate": 0.1, "of": (np.float64(1.5), None)})
    "{'rate': 0.1, 'of': (1.5, None)}"
    >>> text_of(lambda x: 2 * x) == text_of(lambda x: 3 * x)
    False
    """
    if isinstance(value, np.generic):
        value = value.item()  # else 1.5 and np.float64(1.5) would differ
    if isinstance(value, str):
        return value if depth == 0 else repr(value)
    if value is None or isinstance(value, Number | bytes | Enum | np.dtype):
        return str(value) if isinstance(value, np.dtype) else repr(value)
    if isinstance(value, type | ModuleType):
        return getattr(value, "__qualname__", value.__name__)
    if depth >= DEPTH:  # also the end of a value that contains itself
        return _kind(value)
    return _compound(value, partial(text_of, depth=depth + 1))


def _compound(value: Any, inner: Callable[[Any], str]) -> str:
    """Text of a container, function, array or record, with those of the values in it."""
    if isinstance(value, Parameter):
        return f"Parameter {value.name}"
    if isinstance(value, ParamGroup):
        return inner(value.described())
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inner(key)}: {inner(one)}' for key, one in value.items())}}}"
    if isinstance(value, set | frozenset):  # its order differs: processes hash strings differently
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, list | tuple):
        text = ", ".join(map(inner, value))
        return f"({text})" if isinstance(value, tuple) else f"[{text}]"
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return array_text(value)
    if isinstance(value, MethodType):
        return f"{inner(value.__func__)} of {_kind(value.__self__)}"
    if isinstance(value, FunctionType):
        return _function_text(value, inner)
    if isinstance(value, partial):
        return f"partial {inner(value.func)} of {inner(value.args)}, {inner(value.keywords)}"
    if is_dataclass(value) and not isinstance(value, Operator):
        own = {one.name: getattr(value, one.name) for one in fields(value) if not one.name.startswith("_")}
        return f"{_kind(value)} {inner(own)}"
    return _kind(value)


def _function_text(function: FunctionType, inner: Callable[[Any], str]) -> str:
    cells = function.__closure__ or ()
    held = [cell.cell_contents for cell in cells if _has_contents(cell)]
    given = [*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    code = digest("\n".join(_code_lines(function.__code__)).encode())
    return f"{function.__qualname__} with code {code:08x}" + (f" and {inner(given)}" if given else "")


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable without a value yet
        return False


def _code_lines(code: CodeType) -> Iterator[str]:
    """Instructions, names and constants of code, at any depth."""
    yield from (code.co_code.hex(), *code.co_names)
    for constant in code.co_consts:
        yield from _code_lines(constant) if isinstance(constant, CodeType) else [text_of(constant)]


def array_text(array: Any) -> str:
    return f"{array.dtype} of shape {tuple(array.shape)}, hash {array_digest(array):08x}"


def _kind(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__

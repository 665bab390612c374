"""Parameter groups: a learning rate or weight decay for some of the parameters. Hyperparameters by PyTorch's names."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, cast

from parallel.nn.operator import Parameter
from parallel.optim.lr_schedules import Rate, describe, rate_at

TORCH_NAMES = {"lr": ("rate",), "weight_decay": ("decay",), "betas": ("beta1", "beta2")}
"""PyTorch's names of hyperparameters, and this package's names of the same values."""


def from_torch(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with PyTorch's names replaced. TypeError if a value is given twice, or `betas` are no pair.

    >>> from_torch({"lr": 0.1, "betas": (0.9, 0.99)})
    {'rate': 0.1, 'beta1': 0.9, 'beta2': 0.99}
    """
    values = dict(given)
    for name, names in TORCH_NAMES.items():
        if name not in given:
            continue
        value = values.pop(name)
        parts = tuple(value) if len(names) > 1 and isinstance(value, Iterable) else (value,)
        # both names at once would be ambiguous, even with equal values
        if len(parts) != len(names) or not given.keys().isdisjoint(names):
            found = "both" if len(parts) == len(names) else repr(value)
            raise TypeError(f"{name}: expected {name} or {' and '.join(names)}, found {found}")
        values |= zip(names, parts)
    return values


class GroupArguments(TypedDict, total=False):
    """Types of the keyword arguments of `ParamGroup` besides `params`, by either name."""

    rate: Rate | None
    lr: Rate | None
    decay: float | None
    weight_decay: float | None


class OptimizerArguments(TypedDict, total=False):
    """Types of the keyword arguments of every optimizer, by either name. `rate` or `lr` is required."""

    rate: Rate
    lr: Rate
    decay: float
    weight_decay: float
    groups: Sequence["ParamGroup | Mapping[str, Any]"]
    ema: float


class TorchNames(type):
    """Metaclass of classes whose constructors also take hyperparameters by PyTorch's names (`TORCH_NAMES`)."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        values, made = from_torch(given), cast(Any, cls)
        try:
            signature(made.__init__).bind(None, *args, **values)
        except TypeError as error:
            hint = " (the engine has the model's parameters)" if args else ""
            raise TypeError(f"{cls.__name__}: {error}; expected keywords, such as lr=0.01{hint}") from None
        return super().__call__(*args, **values)


@dataclass(frozen=True, eq=False)
class ParamGroup(metaclass=TorchNames):
    """Learning rate and weight decay of some parameters, in place of the optimizer's own.

    Parameters
    ----------
    params : str, or iterable of str and Parameter
        Parameters, such as ``model.items[0].parameters()``, or patterns of their names, such as ``"0.*"``.
    rate, lr : float or schedule, optional
        None for the optimizer's own.
    decay, weight_decay : float, optional
        For all parameters of the group, biases too. None for the optimizer's own, without biases and gains.
    """

    params: Iterable[Parameter | str]
    rate: Rate | None = None
    decay: float | None = None

    if TYPE_CHECKING:

        def __init__(self, params: Iterable[Parameter | str], **given: Unpack[GroupArguments]) -> None: ...

    def __post_init__(self) -> None:
        params = (self.params,) if isinstance(self.params, str | Parameter) else tuple(self.params)
        for one in params:
            if not isinstance(one, str | Parameter):
                raise TypeError(f"params: expected parameters or patterns of names, found {one!r}")
        object.__setattr__(self, "params", params)
        if self.decay is not None and not 0 <= self.decay < math.inf:
            raise ValueError(f"decay: expected a number from 0 on, found {self.decay}")

    @classmethod
    def of(cls, group: Any) -> "ParamGroup":
        """Group of a dict with PyTorch's keys. TypeError for anything else."""
        if not isinstance(group, ParamGroup | Mapping):
            found = type(group).__name__
            raise TypeError(f'groups: expected a list of dicts, as {{"params": "0.*", "lr": 1e-3}}; found a {found}')
        return group if isinstance(group, ParamGroup) else cls(**group)

    def has(self, parameter: Parameter) -> bool:
        """True if the parameter belongs to the group. It must have its name."""
        return any(
            fnmatchcase(parameter.name, one) if isinstance(one, str) else one is parameter.logical
            for one in self.params
        )

    def described(self) -> dict[str, Any]:
        """Names or patterns, rate and decay."""
        names = [one if isinstance(one, str) else one.name for one in self.params]
        return {"params": names, "rate": self.rate, "decay": self.decay}

    def describe(self) -> dict[str, Any]:
        """As `described`, for a checkpoint."""
        return self.described() | {"rate": self.rate and describe(self.rate)}


class RateClock(NamedTuple):
    """Time of an update for the learning rate: the schedule's `step`, and the number of updates that share its rate.

    `known` are the learning rates then (`GroupTable.rates`), if schedules have been called already.
    """

    step: int
    parts: int = 1
    known: tuple[float, ...] = ()


class Tuning(NamedTuple):
    """Hyperparameters of a parameter in an update.

    Attributes
    ----------
    number : int
        Of its learning rate in `GroupTable.rates`.
    decay : float
        Weight decay.
    trains : bool
        False if it is frozen.
    missed : int
        Earlier updates of the engine that were none of the parameter, as it was frozen.
    """

    number: int
    decay: float
    trains: bool
    missed: int = 0


def frozen_of(parameters: Iterable[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if not parameter.requires_grad]


class MissedUpdates(dict[Parameter, int]):
    """Number of an engine's updates that each parameter has missed while frozen. Others have missed none.

    By logical parameter. Bias corrections count the parameter's own updates: the engine's minus these.
    """

    def count(self, frozen: Iterable[Parameter], updates: int) -> None:
        """Count updates of the engine during which these parameters were frozen."""
        for parameter in frozen if updates else ():
            self[parameter] = self.get(parameter, 0) + updates

    def state(self) -> dict[str, int]:
        """Numbers by name, for a checkpoint."""
        return {parameter.name: missed for parameter, missed in self.items()}

    def load(self, state: Mapping[str, int], parameters: Iterable[Parameter]) -> None:
        """Restore numbers that `state` returned, as checked by `checked_missed`."""
        self.clear()
        self.update((parameter, state[parameter.name]) for parameter in parameters if parameter.name in state)


def merged_missed(states: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """State of `MissedUpdates`, merged from states of parts of the parameter vector. Parts may share parameters."""
    merged: dict[str, int] = {}
    for state in states:
        merged |= {name: max(missed, merged.get(name, 0)) for name, missed in state.items()}
    return merged


def checked_missed(state: Any, parameters: Iterable[Parameter], updates: int) -> Mapping[str, int]:
    """A state of `MissedUpdates` after some updates. ValueError if it is none, or of other parameters."""
    names = {parameter.name for parameter in parameters}
    if not isinstance(state, Mapping) or not names.issuperset(state):
        raise ValueError(f"missed: expected numbers by name of a parameter, found {state!r}")
    for name, missed in state.items():
        if type(missed) is not int or not 0 <= missed <= updates:
            raise ValueError(f"missed: expected 0 to {updates} updates of {name}, found {missed!r}")
    return state


class GroupTable:
    """Groups of an optimizer: learning rates, and the hyperparameters of a parameter by the first group that has it."""

    def __init__(self, groups: Sequence[ParamGroup]):
        self.groups = groups
        self._numbers: dict[Parameter, int] = {}

    def tuning(self, parameter: Parameter, decay: float, missed: Mapping[Parameter, int]) -> Tuning:
        """Hyperparameters of a parameter, where `decay` is the optimizer's. Rate 0 is the optimizer's own."""
        number, logical = 0, parameter.logical
        if self.groups:
            # patterns are matched once per parameter
            if logical not in self._numbers:
                has = (number for number, group in enumerate(self.groups, 1) if group.has(logical))
                self._numbers[logical] = next(has, 0)
            number = self._numbers[logical]
        own = self.groups[number - 1].decay if number else None
        decay = own if own is not None else decay if logical.decay else 0.0
        return Tuning(number, decay, logical.requires_grad, missed.get(logical, 0) if logical.requires_grad else 0)

    def rates(self, rate: Rate, clock: RateClock) -> list[float]:
        """Learning rates at `clock`, by the number in `Tuning`: the optimizer's `rate`, then the groups'."""
        if clock.known:
            return list(clock.known)
        own = (rate if group.rate is None else group.rate for group in self.groups)
        return [rate_at(one, clock.step) / clock.parts for one in (rate, *own)]

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Raise ValueError if a group has none of the parameters, as after a typing error in a name."""
        for group in self.groups:
            if not any(group.has(parameter) for parameter in parameters):
                some = ", ".join(parameter.name for parameter in parameters[:6])
                raise ValueError(f"groups: {group.describe()['params']} is no parameter of the model, which has {some}")

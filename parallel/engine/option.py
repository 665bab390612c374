"""Declaration of an option of trainings: meaning, default, range, layouts that use it, command-line argument."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

MODEL, OPTIMIZER, PROGRAM = "the model", "the optimizer", "the training program"
"""Values of `Option.owner`."""

TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (float, int)}
TYPES["bool | str"] = (bool, str)
TYPES |= {f"{name} | None": (*types, type(None)) for name, types in TYPES.items()}
"""Accepted types, by a field's annotation."""


@dataclass(frozen=True)
class Option:
    """Declaration of one option, the only place of these facts. Created by `option`."""

    default: Any  # None leaves the value open
    meaning: str  # text for users; {names} and {default} are filled in
    metavar: str | None = None  # placeholder of the value in --help
    least: float | None = None  # smallest number
    below: float | None = None  # all numbers are smaller
    choices: Collection[str] = ()  # all values, if there are few
    names: Collection[str] = ()  # values that `meaning` lists
    flag: str | None = None  # name of the argument if it is not `name`; "" if the command line has none
    former: str = ""  # earlier name of the argument, which is also accepted
    bare: str | None = None  # value of the argument without a value, for an option that --no-... resets
    layouts: Collection[str] = ()  # that use the option; empty for all
    owner: str = ""  # what has the value in place of an engine's settings; "" for an option of engines
    one_run: bool = False  # a restart does not take the value from the checkpoint, and ranks may differ in it
    name: str = ""  # of the field
    kind: str = ""  # annotation of the field

    @property
    def argument(self) -> str:
        return "--" + (self.name.replace("_", "-") if self.flag is None else self.flag)

    @property
    def help(self) -> str:
        return self.meaning.format(names=", ".join(self.names), default=self.default)

    def check(self, value: Any) -> None:
        """Raise ValueError, which begins with the option's name, for a value of a wrong type or out of range."""
        types: Any = TYPES[self.kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):  # bool is a subclass of int
            raise ValueError(f"{self.name}: expected {self.kind}, found {value!r}")
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name}: expected one of {', '.join(self.choices)}; found {value!r}")
        if self.least is not None and not self.least <= value < math.inf:  # so written that NaN fails
            raise ValueError(f"{self.name}: expected a number from {self.least:g} on, found {value:g}")
        if self.below is not None and value >= self.below:
            limits = f"from {self.least or 0:g} to below {self.below:g}"
            raise ValueError(f"{self.name}: expected a number {limits}, found {value:g}")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add the option's argument to a parser or a group of one; None if it is not given."""
        if self.flag == "":
            return
        kind = self.kind.removesuffix(" | None")
        facts: dict[str, Any] = {"dest": self.name, "help": self.help}
        if kind == "bool":
            parser.add_argument(self.argument, action=argparse.BooleanOptionalAction, **facts)
        elif self.bare is not None:
            parser.add_argument(self.argument, nargs="?", const=self.bare, metavar=self.metavar, **facts)
            facts["help"] = f"{self.default} (default)"
            parser.add_argument(f"--no-{self.argument[2:]}", action="store_const", const=self.default, **facts)
        else:
            facts |= {"choices": [*self.choices] or None, "type": TYPES[kind][0], "metavar": self.metavar}
            parser.add_argument(self.argument, *[f"--{self.former}"] * bool(self.former), **facts)


def option(default: Any, meaning: str, metavar: str | None = None, **facts: Any) -> Any:
    """Field of an `OptionGroup`, declared by the attributes of `Option`."""
    return field(default=default, metadata={"option": Option(default, meaning, metavar, **facts)})


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Frozen options of one subject. ValueError for a wrong type or range; it begins with the option's name."""

    def __post_init__(self) -> None:
        group: Any = type(self)
        for one in options_in(group):
            one.check(getattr(self, one.name))


@cache
def options_in(group: Any) -> tuple[Option, ...]:
    """Options of a group in the order of their declaration."""
    return tuple(replace(one.metadata["option"], name=one.name, kind=str(one.type)) for one in fields(group))


def names_in(*groups: Any) -> tuple[str, ...]:
    return tuple(one.name for group in groups for one in options_in(group))

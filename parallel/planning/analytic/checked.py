"""Checks of the planner's values: numbers in range, and tables of a TOML file as dataclasses."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def expect_at_least(value: Any, least: float, *names: str) -> None:
    """Raise ValueError if one of the numbers in attributes `names` of `value` is below `least`."""
    for name in names:
        if (found := getattr(value, name)) < least:
            raise ValueError(f"{name}: expected {least} or more, found {found}")


def expect_above_zero(value: Any, *names: str) -> None:
    """Raise ValueError if one of the numbers in attributes `names` of `value` is not above 0."""
    for name in names:
        if not (found := getattr(value, name)) > 0:
            raise ValueError(f"{name}: expected a number above 0, found {found}")


def lookup(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Value of a name in a table. If there is none, ValueError with the most similar names, or all."""
    if name not in known:
        raise ValueError(f"{kind}: expected one of {', '.join(known)}; found {name!r}{suggestion(name, known)}")
    return known[name]


def from_table(cls: type[T], table: Any, where: str) -> T:
    """Dataclass `cls` from a table of a TOML file. ValueError, beginning with `where`, for a wrong key or value.

    Whole numbers are accepted for floats. A field of a dataclass type takes a table.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected a table, found {table!r}")
    assert is_dataclass(cls)
    known: dict[str, Field[Any]] = {each.name: each for each in fields(cls) if each.init}
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{suggestion(key, known)}; known: {', '.join(known)}")
    missing = [
        name
        for name, each in known.items()
        if name not in table and each.default is MISSING and each.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{where}: expected the keys {', '.join(missing)} as well")
    hints = get_type_hints(cls)
    # errors name the path of the key, so nested tables are converted first
    values = {key: _converted(hints[key], value, f"{where}.{key}") for key, value in table.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _converted(hint: Any, value: Any, where: str) -> Any:
    """Value of a key as the type of its field. ValueError if it is of another type."""
    if isinstance(hint, UnionType):  # X | None
        hint = next(one for one in get_args(hint) if one is not type(None))
    if is_dataclass(hint) and isinstance(hint, type):
        return from_table(hint, value, where)
    if get_origin(hint) is tuple:  # tuple[str, ...]
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, found {value!r}")
        return tuple(_converted(get_args(hint)[0], each, where) for each in value)
    if arguments := get_args(hint):  # dict[str, float]
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected a table of numbers, found {value!r}")
        return {key: _converted(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    accepted: tuple[type, ...] = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where}: expected {TYPE_NAMES[hint]}, found {value!r}")
    size = abs(value) if isinstance(value, int | float) else 0
    if hint is float and not size < MOST:
        raise ValueError(f"{where}: expected a finite number below {MOST:g}, found {value!r}")
    if hint is float and 0 < size < 1 / MOST:
        raise ValueError(f"{where}: expected 0, or a number from {1 / MOST:g} on, found {value!r}")
    if hint is int and not size < MOST_WHOLE:
        raise ValueError(f"{where}: expected a number below {MOST_WHOLE}, found {value!r}")
    return hint(value)


MOST, MOST_WHOLE = 1e30, 10**12
"""Numbers of files beyond which times would overflow."""


TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Text that suggests the known name most similar to a wrong one. Empty if none is similar."""
    alike = get_close_matches(name, known, n=1)
    return f" (perhaps {alike[0]})" if alike else ""

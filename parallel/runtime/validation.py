"""Validation of values read from checkpoint metadata."""

from collections.abc import Mapping
from typing import Any


def expect_mapping(facts: Any, what: str) -> Mapping[str, Any]:
    """Return `facts`; ValueError, beginning with the name `what`, if it is not a mapping."""
    if not isinstance(facts, Mapping):
        raise ValueError(f"{what}: expected values by name, found {facts!r}")
    return facts


def expect_integer(facts: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Return ``facts[name]``; ValueError, with the name, if it is missing or not an integer of at least `least`.

    >>> expect_integer({"steps": 3}, "steps")
    3
    """
    if name not in facts:
        raise ValueError(f"{name} is missing")
    value = facts[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected a whole number from {least} on, found {value!r}")
    return value

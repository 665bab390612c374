"""Argument types of programs: lists of integers and names, and names of pictures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path

from collectives.benchmark.reports import PICTURES


def integers(text: str) -> list[int]:
    """Argument type: integers separated by commas.

    >>> integers("2,4,8")
    [2, 4, 8]
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in 2,4,8, found {text!r}") from None


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Argument type: known names separated by commas."""

    def names(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {', '.join(unknown)}")
        return words

    return names


def picture_error(option: str, path: Path | None) -> str | None:
    """Error in the name of a picture, or None."""
    if path is None:
        return None
    if path.suffix not in PICTURES:
        return f"{option}: expected a name that ends in one of {', '.join(PICTURES)}, found {path}"
    return None if find_spec("matplotlib") else f"{option} needs matplotlib: pip install 'chorus-mpi[plot]'"

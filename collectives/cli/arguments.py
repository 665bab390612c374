"""Types of command-line arguments, and checks, that several programs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping

from collectives.compressed import QuantCodec
from quant import PerGroup, PerTensor, QuantSpec, parse


def words(text: str) -> list[str]:
    """A comma-separated list without blanks and repetitions."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def names_of(what: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> Callable[[str], list[str]]:
    """Argument type: a list of names that are `known`; with aliases, ``all`` and other spellings stand for them."""
    known = list(known)

    def names(text: str) -> list[str]:
        found = words(text)
        if aliases is not None:
            found = [aliases.get(word.lower(), word.lower()) for word in found]
            found = known if "all" in found else list(dict.fromkeys(found))
        for name in found:
            if name not in known:
                every = ", all" if aliases is not None else ""
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}{every}")
        return found

    return names


def numbers(text: str) -> list[int]:
    """Numbers as in ``1,2,4``, or a range as in ``0:20``."""
    first, colon, end = text.partition(":")
    try:
        found = list(range(int(first or 0), int(end))) if colon else [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found:
        raise argparse.ArgumentTypeError(f"expected numbers as in 1,2,4 or 0:20, found {text!r}")
    return found


def rank_counts(text: str) -> list[int]:
    """Numbers of ranks, as `numbers`, 1 or more each."""
    found = numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of ranks from 1 on, found {text!r}")
    return found


def specs(text: str) -> dict[str, QuantSpec]:
    """Encodings of vectors by name, from names with commas.

    >>> list(specs("int8_g128,nf4"))
    ['int8_g128', 'nf4']
    """
    try:
        found = {name: parse(name) for name in text.split(",")}
        for spec in found.values():
            QuantCodec(spec, seed=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def shareable(spec: QuantSpec) -> bool:
    """True if the spec describes integers with one scale shared by all ranks.

    >>> shareable(parse("int8")), shareable(parse("nf4")), shareable(parse("int8_g32_zero"))
    (True, False, False)
    """
    kinds = spec.linear, spec.symmetric, spec.signed, spec.bits > 1, isinstance(spec.granularity, (PerTensor, PerGroup))
    return all(kinds)


def missing_matplotlib() -> str | None:
    """Message if pictures cannot be drawn; None if they can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"pictures need matplotlib ({error}): pip install 'chorus-mpi[plot]'"
    return None

"""Argument types for argparse, and checks, that several programs share."""

import argparse
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from mpi4py import MPI

from collectives.benchmark.reports import PICTURES, check_writable
from collectives.cli.algorithm_file import entry_name
from collectives.compressed import QuantCodec
from quant import PerGroup, PerTensor, QuantSpec, parse


def words(text: str) -> list[str]:
    """Argument type: a comma-separated list of words, one at least, without blanks and repetitions."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"expected a name, found {text!r}")
    return found


def check_schedule(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with an error if `collective`, `algorithm` and `segments` name no schedule. Load an algorithm in a file."""
    try:
        arguments.algorithm = entry_name(arguments.collective, arguments.algorithm, MPI.COMM_WORLD.Get_size())
    except ValueError as error:
        parser.error(f"argument --algorithm: {error}")
    if arguments.segments > 1 and arguments.collective == "barrier":
        parser.error("argument --segments: expected 1 for a barrier")


def names_of(what: str, known: Iterable[str]) -> Callable[[str], list[str]]:
    """Make an argument type: comma-separated names out of `known`, or ``all``. `what` describes them in errors."""
    known = list(known)

    def names(text: str) -> list[str]:
        found = known if text == "all" else words(text)
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}, all")
        return found

    return names


def numbers(text: str) -> list[int]:
    """Argument type: integers such as ``1,2,4``, or a range such as ``0:20``, without its end."""
    first, colon, end = text.partition(":")
    try:
        found = list(range(int(first or 0), int(end))) if colon else [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found:
        raise argparse.ArgumentTypeError(f"expected numbers as in 1,2,4 or 0:20, found {text!r}")
    return found


def rank_counts(text: str) -> list[int]:
    """Argument type: numbers of ranks, each 1 or more, written like `numbers`."""
    found = numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of ranks from 1 on, found {text!r}")
    return found


def specs(text: str) -> dict[str, QuantSpec]:
    """Argument type: quantisation specs by name, from comma-separated names.

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
    """True if the spec's codes can be summed with shared scales: signed symmetric integers of 2 bits or more.

    Its scales are per tensor or per group.

    >>> shareable(parse("int8")), shareable(parse("nf4")), shareable(parse("int8_g32_zero"))
    (True, False, False)
    """
    kinds = spec.linear, spec.symmetric, spec.signed, spec.bits > 1, isinstance(spec.granularity, (PerTensor, PerGroup))
    return all(kinds)


def expect_writable(parser: argparse.ArgumentParser, *paths: Path | None) -> None:
    """End with an error on all ranks if rank 0 cannot write one of the files. Collective."""
    fault = None
    if MPI.COMM_WORLD.Get_rank() == 0:
        try:
            for path in filter(None, paths):
                check_writable(path)
        except OSError as error:
            fault = str(error)
    if fault := MPI.COMM_WORLD.bcast(fault):
        parser.error(fault)


def picture_file(text: str) -> Path:
    """Argument type: path of an image file. An error if its format is unknown or matplotlib is missing."""
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a name that ends in one of {', '.join(PICTURES)}, found {text!r}")
    if not find_spec("matplotlib"):
        raise argparse.ArgumentTypeError("pictures need matplotlib: pip install 'chorus-mpi[plot]'")
    return path

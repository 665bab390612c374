"""The library as the benchmark uses it: communicator, algorithms, model and choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

import collectives
from collectives.benchmark.cases import CASES
from collectives.selection.timing_table import NATIVE


def communicator(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Our communicator over the ranks of `comm`."""
    return collectives.Communicator(comm)


def known_collectives() -> list[str]:
    """The collectives that the library offers and the benchmark can run, in the benchmark's order."""
    return [name for name in CASES if _algorithms(name)]


def _algorithms(collective: str) -> list[str]:
    for name in (collective, even(collective)):
        try:
            return [each for each in collectives.algorithms(name) if each != NATIVE]  # it takes part anyway
        except (ValueError, KeyError):
            continue
    return []


def even(collective: str) -> str:
    """A v-form runs the algorithms of its even form, on blocks of other lengths."""
    return collective.removesuffix("v")


def resolve(collective: str, wanted: Iterable[str]) -> list[str]:
    """Algorithm names for one collective: ``all`` becomes ``auto`` and every known one; ValueError for unknown ones."""
    known = ["auto", *_algorithms(collective)]
    chosen: list[str] = []
    for name in wanted:
        if name != "all" and name not in known:
            raise ValueError(f"{collective} has no algorithm {name!r}; known: {', '.join(known)}")
        chosen += [n for n in (known if name == "all" else [name]) if n not in chosen]
    return chosen


def keywords(algorithm: str, segments: int | None) -> dict[str, Any]:
    """Keyword arguments beyond mpi4py's own; none for ``auto``."""
    chosen: dict[str, Any] = {} if algorithm == "auto" else {"algorithm": algorithm}
    return chosen if segments is None else chosen | {"segments": segments}


def choice(
    comm: MPI.Intracomm, collective: str, nbytes: int, form: str, memory: str, in_place: bool
) -> tuple[str, int]:
    """Choice of ``auto``: algorithm and number of segments."""
    call = {"form": form, "symmetric": memory == "symmetric", "in_place": in_place}
    try:
        chosen = comm.choice(collective, nbytes, **call)  # type: ignore[attr-defined]
    except (ValueError, KeyError):
        chosen = comm.choice(even(collective), nbytes, **call)  # type: ignore[attr-defined]
    return chosen.algorithm, chosen.segments


def nodes(comm: MPI.Intracomm) -> tuple[int, ...]:
    """The node of every rank."""
    return comm.nodes or (0,) * comm.Get_size()  # type: ignore[attr-defined]

"""Algorithms of a collective by name, and their predicted times: queries that need no communicator."""

from __future__ import annotations

from collectives.algorithms import catalog
from collectives.selection import select
from collectives.selection.timing_table import NATIVE

_V_FORMS = {"scatterv": "scatter", "gatherv": "gather", "allgatherv": "allgather", "alltoallv": "alltoall"}


def catalog_name(collective: str) -> str:
    """Name in the catalogue, in which a collective and its v-form are one entry."""
    return _V_FORMS.get(collective, collective)


def has_local_counts(collective: str) -> bool:
    """True if ranks know only their own block's length."""
    return collective in ("scatterv", "gatherv", "alltoallv")


def algorithms(collective: str) -> list[str]:
    """Names of the algorithms of a collective: the naive one first, the MPI's own collective last.

    Parameters
    ----------
    collective : str
        ``"allreduce"``, ``"broadcast"``, ``"scatterv"`` ... in lower case. Others raise ValueError with all names.

    Examples
    --------
    >>> algorithms("gatherv")
    ['linear', 'mst', 'direct', 'hierarchical', 'leaders', 'native']
    """
    return [*catalog.names(catalog_name(collective)), NATIVE]


def predict(collective: str, algorithm: str, size: int, nbytes: int, segments: int | None = None) -> float:
    """Predicted seconds of a collective by the cost model: see `collectives.selection.select.predict`."""
    return select.predict(catalog_name(collective), algorithm, size, nbytes, segments or 1)

"""The file that a table of measured times is kept in, and how all ranks come to have the same one.

Files are per kind of machine and per MPI library, in the user's cache directory. A file that cannot be used is told
of and left alone; nothing that it holds can make a program fail.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives.analysis.cost_functions import UniformNetwork
from collectives.errors import InvalidType
from collectives.selection.cost_model import Costs
from collectives.selection.timing_table import TimingKey, TimingTable, parse

FORMAT, VERSION = "chorus tuning", 1


class TableError(ValueError):
    """A file without a usable table; the message names the file and the reason."""


class DamagedTable(TableError):
    """A file that holds nothing which could be of use to anyone."""


def mpi_name() -> str:
    """The MPI library in a few words, such as ``MPICH 4.2.1``."""
    first = MPI.Get_library_version().split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").replace("Library", "").replace("\x00", "").split())


def machine() -> str:
    """The kind of machine: processor, cores and system."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count() or 1} cores, {platform.system()} {platform.machine()}"


def default_path() -> Path:
    """Default path of the table of this user, machine type and MPI."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9.]+", "-", f"{mpi_name()} {machine()}".lower()).strip("-")
    return Path(home) / "chorus" / f"tuning-{name}.json"


def to_json(table: TimingTable) -> dict[str, Any]:
    """Content of the file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "mpi": mpi_name(),
        "machine": machine(),
        "costs": {name: wire._asdict() for name, wire in table.costs._asdict().items()},
        "entries": [
            {
                **key._asdict(),
                "rows": [
                    {"bytes": nbytes, "seconds": {str(choice): seconds for choice, seconds in row.items()}}
                    for nbytes, row in rows.items()
                ],
            }
            for key, rows in sorted(table.entries.items())
        ],
    }


def from_json(said: Any) -> TimingTable:
    """The table that a file holds.

    Raises
    ------
    TableError
        If it is none, of a newer version, or of another machine or MPI.
    """
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise TableError("is no table of Chorus's")
    if said.get("version") != VERSION:
        raise TableError(f"is of version {said.get('version')!r}, and this Chorus reads {VERSION}")
    for what, here in (("mpi", mpi_name()), ("machine", machine())):
        if said.get(what) != here:
            raise TableError(f"was measured with another {what}: {said.get(what)!r} instead of {here!r}")
    try:
        costs = Costs(**{name: UniformNetwork(**_positive(wire)) for name, wire in said["costs"].items()})
        entries = {
            TimingKey(str(entry["collective"]), str(entry["form"]), int(entry["ranks"]), str(entry["placement"])): {
                int(row["bytes"]): {parse(label): s for label, s in _positive(row["seconds"]).items()}
                for row in sorted(entry["rows"], key=lambda row: row["bytes"])
            }
            for entry in said["entries"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedTable(f"is damaged: {type(error).__name__}: {error}") from None
    return TimingTable(costs, entries)


def _positive(numbers: Mapping[str, Any]) -> dict[str, float]:
    for name, number in numbers.items():
        if not 0 < float(number) < math.inf:
            raise ValueError(f"{name} takes {number}")
    return {name: float(number) for name, number in numbers.items()}


def read(path: str | os.PathLike[str]) -> TimingTable:
    """The table in a file.

    Raises
    ------
    OSError, TableError
        If there is none that can be used here.
    """
    try:
        said = json.loads(Path(path).read_bytes())
    except ValueError as error:  # no JSON, or no text at all
        raise DamagedTable(f"{path} is damaged: {error}") from None
    try:
        return from_json(said)
    except TableError as error:
        raise type(error)(f"{path} {error}") from None


def write(path: str | os.PathLike[str], table: TimingTable) -> None:
    """Put the table into a file, whole or not at all, so that nobody ever reads a half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(to_json(table), file, indent=1)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def agreed(comm: MPI.Intracomm, wanted: Any) -> TimingTable | None:
    """Table of rank 0's file system, broadcast to all ranks. Collective.

    Parameters
    ----------
    comm : MPI.Intracomm
    wanted : bool, path, Table or None
        What rank 0 goes by: the user's table for True, none for False and None, a file, or a table that all have.

    Warns
    -----
    UserWarning
        On rank 0, if there is a file that cannot be used, or none where a path was given.
    """
    if not isinstance(wanted, (bool, str, os.PathLike, TimingTable, type(None))):
        raise InvalidType(MPI.ERR_ARG, f"tuning: expected a path, True, False or None, found {wanted!r}")
    table = None
    if comm.Get_rank() == 0:
        table = _found(wanted)
    return comm.bcast(table)


def _found(wanted: bool | str | os.PathLike[str] | TimingTable | None) -> TimingTable | None:
    if wanted is None or wanted is False or isinstance(wanted, TimingTable):
        return wanted or None
    try:
        return read(default_path() if wanted is True else wanted)
    except FileNotFoundError as error:
        if wanted is True:
            return None
        reason = str(error)
    except (OSError, RuntimeError, TableError) as error:
        reason = str(error)
    warnings.warn(f"going without a tuned table: {reason}", stacklevel=_outside())
    return None


def _outside() -> int:
    """Stack level of the user's line that created the communicator."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("collectives."):
        level, frame = level + 1, frame.f_back
    return level

"""File of a timing table, and its broadcast to all ranks.

Files are per machine type and MPI library, in the user's cache directory. A file that cannot be used is reported and
left unchanged. Nothing in it can make a program fail.
"""

import json
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives.analysis.cost_functions import UniformNetwork
from collectives.errors import InvalidType
from collectives.selection.cost_model import Costs
from collectives.selection.timing_table import TimingKey, TimingTable, parse

FORMAT, VERSION = "chorus tuning", 1


class TableError(ValueError):
    """Error for a file without a usable timing table. The message gives the reason and, from `read`, the file."""


class DamagedTable(TableError):
    """Error for a timing file that is unusable on every machine, and so may be overwritten."""


def mpi_name() -> str:
    """Name and version of the MPI library, such as ``MPICH 4.2.1``."""
    first = MPI.Get_library_version().split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", "").replace("Library", "").replace("\x00", "").split())


def machine() -> str:
    """Machine type: processor, cores and system."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count() or 1} cores, {platform.system()} {platform.machine()}"


def default_path() -> Path:
    """Default path of the timing table of this user, machine type and MPI."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9.]+", "-", f"{mpi_name()} {machine()}".lower()).strip("-")
    return Path(home) / "chorus" / f"tuning-{name}.json"


def to_json(table: TimingTable) -> dict[str, Any]:
    """Content of a timing table's file, as JSON objects, with the MPI and machine of this process."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "mpi": mpi_name(),
        "machine": machine(),
        "costs": {
            name: {part: seconds for part, seconds in wire._asdict().items() if seconds is not None}
            for name, wire in table.costs._asdict().items()
        },
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


def from_json(content: Any) -> TimingTable:
    """Table from a file's parsed JSON. TableError if it is of another format, version, machine or MPI, or damaged."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise TableError("is no table of Chorus")
    if content.get("version") != VERSION:
        raise TableError(f"is of version {content.get('version')!r}, and this Chorus reads {VERSION}")
    for name, here in (("mpi", mpi_name()), ("machine", machine())):
        if content.get(name) != here:
            raise TableError(f"was measured with another {name}: expected {here!r}, found {content.get(name)!r}")
    try:
        costs = Costs(**{name: UniformNetwork(**_positive(wire)) for name, wire in content["costs"].items()})
        entries = {
            TimingKey(
                str(entry["collective"]), str(entry["form"]), _integer(entry, "ranks", 1), str(entry["placement"])
            ): {
                _integer(row, "bytes", 0): {parse(label): s for label, s in _positive(row["seconds"]).items()}
                for row in sorted(entry["rows"], key=lambda row: index(row["bytes"]))
            }
            for entry in content["entries"]
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # of any JSON
        raise DamagedTable(f"is damaged: {type(error).__name__}: {error}") from None
    return TimingTable(costs, entries)


def _integer(fields: Mapping[str, Any], name: str, least: int) -> int:
    number = index(fields[name])
    if not least <= number < 1 << 63:
        raise ValueError(f"{name}: expected an integer from {least} to 2**63 - 1, found {number}")
    return number


def _positive(numbers: Mapping[str, Any]) -> dict[str, float]:
    if not numbers:
        raise ValueError("expected positive numbers, found none")
    for name, number in numbers.items():
        if not 0 < float(number) < math.inf:
            raise ValueError(f"{name}: expected a positive number, found {number}")
    return {name: float(number) for name, number in numbers.items()}


def read(path: str | os.PathLike[str]) -> TimingTable:
    """Read the timing table in a file. Raise OSError or TableError if none is usable on this machine."""
    try:
        return from_json(json.loads(Path(path).read_bytes()))
    except TableError as error:
        raise type(error)(f"{path} {error}") from None
    except (ValueError, RecursionError) as error:  # no JSON, or no text at all
        raise DamagedTable(f"{path} is damaged: {error}") from None


def write(path: str | os.PathLike[str], table: TimingTable) -> None:
    """Write the table atomically: a reader sees the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(name, "x") as file:
            json.dump(to_json(table), file, indent=1)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def broadcast_table(comm: MPI.Intracomm, tuning: Any) -> tuple[TimingTable | None, Exception | None]:
    """Return on all ranks the timing table that `tuning` selects on rank 0, or None and why there is none. Collective.

    `tuning` of rank 0, the only one used: True for the user's default table, None or False for none, a path, or a
    table. All ranks raise InvalidType for anything else. The error, for `warn_without_table`, describes an unusable
    file or a path without a file.
    """
    found: TimingTable | Exception | None = comm.bcast(_table_or_error(tuning) if comm.Get_rank() == 0 else None)
    if isinstance(found, InvalidType):
        raise found
    return (None, found) if isinstance(found, Exception) else (found, None)


def warn_without_table(error: Exception) -> None:
    """Warn of a table that cannot be used: on one rank, after all collective calls, as the warning may be an error."""
    warnings.warn(f"continuing without a tuned table: {error}", stacklevel=_user_stack_level())


def _table_or_error(tuning: Any) -> TimingTable | Exception | None:
    """Table that `tuning` selects, None without one, or the error that all ranks are to know of."""
    if tuning is None or tuning is False or isinstance(tuning, TimingTable):
        return tuning or None
    if tuning is not True and not isinstance(tuning, (str, os.PathLike)):
        return InvalidType(MPI.ERR_ARG, f"tuning: expected a path, True, False or None, found {tuning!r}")
    try:
        return read(default_path() if tuning is True else tuning)
    except (OSError, RuntimeError, TableError) as error:
        # the default table may be absent, a path that the user gave may not
        return None if tuning is True and isinstance(error, FileNotFoundError) else error


def _user_stack_level() -> int:
    """`stacklevel` of a warning that names the innermost line outside of `collectives`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("collectives."):
        level, frame = level + 1, frame.f_back
    return level

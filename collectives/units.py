"""Numbers with units, as people read them: bytes, seconds, counts."""

from collections.abc import Sequence
from typing import TypeAlias

Units: TypeAlias = Sequence[tuple[float, str]]
"""Sizes of units with their names, in descending order."""

BYTES: Units = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
TIMES: Units = (
    (365.25 * 86400, "years"),
    (86400, "days"),
    (3600, "h"),
    (60, "min"),
    (1, "s"),
    (1e-3, "ms"),
    (1e-6, "us"),
    (1e-9, "ns"),
)
COUNTS: Units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def _in_unit(value: float, units: Units) -> tuple[str, str]:
    """Number with three digits, and the largest unit in which it is 1 or more."""
    size, name = next((unit for unit in units if value >= unit[0]), units[-1])
    number = value / size
    return f"{number:.0f}" if 100 <= number < 1e5 else f"{number:.3g}", name


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with a binary unit.

    >>> format_bytes(535822336), format_bytes(1000), format_bytes(0)
    ('511 MiB', '1000 B', '0 B')
    """
    return " ".join(_in_unit(nbytes, BYTES))


def format_time(seconds: float) -> str:
    """Format a duration with a unit.

    >>> format_time(0.0015), format_time(64), format_time(14 * 86400), format_time(0)
    ('1.5 ms', '64 s', '14 days', '0 s')
    """
    return " ".join(_in_unit(seconds, TIMES if seconds >= 120 else TIMES[4:])) if seconds else "0 s"


def short(number: float) -> str:
    """Format a number with three significant digits and a unit prefix (k, M, G, T).

    >>> short(12345), short(7.25), short(999.9)
    ('12.3k', '7.25', '1k')
    """
    return "".join(_in_unit(float(f"{number:.3g}"), COUNTS))

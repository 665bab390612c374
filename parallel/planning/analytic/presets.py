"""Presets of models, devices, clusters and software, and files in which users add their own.

A file is TOML with tables ``[models.NAME]``, ``[devices.NAME]``, ``[clusters.NAME]`` and ``[stacks.NAME]``, whose keys
are the fields of `Transformer`, `Device`, `Cluster` and `Stack`. The presets are such a file.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from parallel.planning.analytic.checked import from_table, lookup
from parallel.planning.analytic.machines import Cluster, Device, Stack
from parallel.planning.analytic.transformer import Transformer


@dataclass(frozen=True)
class Presets:
    """Models, devices, clusters and stacks of software by name."""

    models: dict[str, Transformer] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    clusters: dict[str, Cluster] = field(default_factory=dict)
    stacks: dict[str, Stack] = field(default_factory=dict)

    def device_of(self, cluster: Cluster) -> Device:
        return lookup("device", cluster.device, self.devices)


KINDS: dict[str, type] = {"models": Transformer, "devices": Device, "clusters": Cluster, "stacks": Stack}


def parse(text: str, where: str) -> Presets:
    """Presets in the text of a TOML file. ValueError, with file, table and key, if something is wrong."""
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: expected TOML, found: {error}") from None
    found: dict[str, dict[str, Any]] = {}
    for kind, entries in tables.items():
        cls = lookup(f"{where}: table", kind, KINDS)
        if not isinstance(entries, dict):
            raise ValueError(f"{where}: {kind}: expected tables [{kind}.NAME], found {entries!r}")
        found[kind] = {name: from_table(cls, entry, f"{where}: {kind}.{name}") for name, entry in entries.items()}
    return Presets(**found)


def load(paths: Iterable[Path] = ()) -> Presets:
    """Built-in presets and presets of files. Files replace built-in ones of the same names.

    Raises ValueError like `parse`.
    """
    texts = [(files(__package__).joinpath("presets.toml").read_text(), "presets.toml")]
    for path in paths:
        try:
            texts.append((path.read_text(), str(path)))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text in UTF-8"
            raise ValueError(f"expected a TOML file, found {str(path)!r}, which cannot be read: {reason}") from None
    together = Presets()
    for text, where in texts:
        one = parse(text, where)
        together = Presets(**{kind: getattr(together, kind) | getattr(one, kind) for kind in KINDS})
    for name, cluster in together.clusters.items():
        lookup(f"clusters.{name}: device", cluster.device, together.devices)
    return together

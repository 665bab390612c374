"""State file of a checkpoint: step, facts, and size and checksum of every other file, with a checksum of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from parallel.checkpoint.step_folders import FILE, FORMAT, STATE
from parallel.runtime.validation import expect_integer

REQUIRED = {"step": int, "facts": dict, "files": dict}
"""Fields besides the format and the checksum."""


def write_state(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write the required fields with format and checksum."""
    state = {"format": FORMAT, **fields}
    write_text(folder / STATE, json.dumps({**state, "sha256": seal(state)}, indent=1))


def read_state(path: Path) -> dict[str, Any]:
    """Validated contents of a checkpoint's state file."""
    if not path.is_dir():
        raise ValueError("there is no such folder")
    if not (path / STATE).is_file():
        raise ValueError(f"it has no {STATE}, so it is no checkpoint")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} is damaged: {error}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"{STATE} is not a checkpoint's")
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']!r}, expected {FORMAT!r}")
    if state.get("sha256") != seal(state):
        raise ValueError(f"{STATE} is damaged: its checksum is wrong")
    for name, kind in REQUIRED.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"{STATE} is not a checkpoint's: {name} is {state.get(name)!r}")
    expect_integer(state, "step")
    for name, about in state["files"].items():
        if not FILE.fullmatch(name) or not isinstance(about, list) or list(map(type, about)) != [int, str]:
            raise ValueError(f"{STATE} is not a checkpoint's: {name!r} has {about!r}")
    return state


def seal(state: Mapping[str, Any]) -> str:
    """Checksum of state.json without its checksum field."""
    fields = {name: value for name, value in state.items() if name != "sha256"}
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Create a file and flush it to the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

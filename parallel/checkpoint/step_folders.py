"""Checkpoint folders in a directory: names, temporary folders, state files, removal of old ones.

Only folders of this package are removed: those with one of its names that are no links and hold only a checkpoint's
files. A folder is locked while it is written or removed, so that other processes leave it alone; the lock ends with the
process.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from parallel.runtime.validation import expect_integer

FORMAT = "chorus checkpoint 1"
FAMILIES = ("model", "optimizer", "feedback")
STATE = "state.json"
NAME = re.compile(r"step-(\d{9,})")
FILE = re.compile(rf"({'|'.join(FAMILIES)})(-\d{{5,}}-of-\d{{5,}}\.safetensors|\.safetensors\.index\.json)")
UNFINISHED = re.compile(rf"\.{NAME.pattern}\.[0-9a-f]{{16}}\.partial")
TRIES = 100
REQUIRED = {"step": int, "facts": dict, "files": dict}
"""Fields of a state file besides the format and the checksum; `files` has size and checksum of every other file."""


class CheckpointError(RuntimeError):
    """Error: a checkpoint could not be written, or cannot be used. Collective calls raise it on all ranks."""


class NotRemoved(CheckpointError):
    """Error: the new checkpoint was written, but older ones could not be removed."""


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:09d}"


def step_of(path: Path) -> int:
    """Step number in the name of a checkpoint folder; CheckpointError for any other name."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: a checkpoint is called {name_of(0)} or the like")
    return int(match[1])


def all_in(directory: Path) -> list[Path]:
    """Checkpoint folders in a directory, and links to such, sorted by step; they are found by name, not verified."""
    found = directory.iterdir() if directory.is_dir() else iter(())
    return sorted((path for path in found if NAME.fullmatch(path.name) and os.path.isdir(path)), key=step_of)


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Context that yields a new locked folder beside `target`, to be renamed to it; it is removed after an exception.

    Unfinished folders of processes that have ended are removed. OSError if `target` exists, or a
    folder cannot be made beside it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists")
    for _ in range(TRIES):
        folder = _hidden(target)
        folder.mkdir()
        with _locked(folder, without=True) as locked:
            if locked:  # else another process is removing it
                try:
                    _clear_unfinished(target.parent)
                    yield folder
                except Exception:
                    shutil.rmtree(folder, ignore_errors=True)  # free the space on a full disk
                    raise
                return
    raise OSError(f"{target.parent}: another process removes each new folder")


def _clear_unfinished(directory: Path) -> None:
    """Remove temporary checkpoint folders that ended processes left in a directory; errors are ignored."""
    for path in directory.iterdir():
        if UNFINISHED.fullmatch(path.name) and _is_ours(path):
            with _locked(path, without=False) as locked:
                if locked:
                    shutil.rmtree(path, ignore_errors=True)  # otherwise it only costs space


def remove_old(written: Path, keep: int) -> None:
    """Remove all checkpoints beside `written` but itself and the `keep` of the highest steps: rename, then delete.

    Links and other folders stay.
    """
    found = [path for path in all_in(written.parent) if _is_ours(path) and _has_state(path)]
    for old in [path for path in found[:-keep] if path != written]:
        hidden = _hidden(old)
        with _locked(old, without=True), contextlib.suppress(FileNotFoundError):  # another process removes it too
            old.rename(hidden)
            shutil.rmtree(hidden)


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")


def _is_ours(path: Path) -> bool:
    """True if `path` is a folder, not a link, and contains only files with names of checkpoint files."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return all(FILE.fullmatch(name) or name == STATE for name in os.listdir(path))
    except OSError:
        return False


def _has_state(path: Path) -> bool:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(state, dict) and state.get("format") == FORMAT


@contextlib.contextmanager
def _locked(folder: Path, without: bool) -> Iterator[bool]:
    """Context that locks a folder and yields True if locked; on file systems without locks it yields `without`."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(descriptor).st_nlink > 0
        except BlockingIOError:
            held = False
        except OSError:
            held = without
        yield held
    finally:
        os.close(descriptor)


def write_state(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write the file state.json with these fields, the format version and a checksum."""
    state = {"format": FORMAT, **fields}
    write_text(folder / STATE, json.dumps({**state, "sha256": seal(state)}, indent=1))


def read_state(path: Path) -> dict[str, Any]:
    """Read and validate the state.json of a checkpoint folder; ValueError if it is missing or damaged."""
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
    """SHA-256 of the fields of state.json except the checksum itself."""
    fields = {name: value for name, value in state.items() if name != "sha256"}
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Create a file with the text and a newline, flushed to disk (fsync); FileExistsError if it exists."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

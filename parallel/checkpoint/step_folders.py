"""Checkpoint folders in a directory: names, owners, temporary folders, state files, removal of old ones.

A directory belongs to one run, which has an identifier in its state files. A training that continues from an earlier
step than the last one begins a new *branch*: its checkpoints are newer than those of lower branches, at any step.

Only folders of this package are removed: those with one of its names that are no links and hold only a checkpoint's
files. A folder is locked while it is written or removed, so that other processes leave it alone; the lock ends with the
process.

A checkpoint replaces one of the same step by three renames: the new one to ``step-000000200.new``, the old one to a
temporary name, the new one to ``step-000000200``. Both names are those of checkpoints, so one is there at any moment.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from parallel.runtime.validation import expect_integer

FORMAT = "chorus checkpoint 1"
FAMILIES = ("model", "optimizer", "buffers", "feedback")
STATE = "state.json"
REPLACEMENT = ".new"
NAME = re.compile(rf"step-(\d{{9,}})({re.escape(REPLACEMENT)})?")
FILE = re.compile(rf"({'|'.join(FAMILIES)})(-\d{{5,}}-of-\d{{5,}}\.safetensors|\.safetensors\.index\.json)")
UNFINISHED = re.compile(rf"\.{NAME.pattern}\.[0-9a-f]{{16}}\.partial")
TRIES = 100
DEPTH = 100
"""Most levels of lists and objects in a state file, which all ranks can read and send."""
REQUIRED = {"step": int, "facts": dict, "files": dict}
"""Fields of a state file besides the format and the checksum; `files` has size and checksum of every other file."""


class CheckpointError(RuntimeError):
    """Error: a checkpoint could not be written, or cannot be used. Collective calls raise it on all ranks."""


class NotRemoved(CheckpointError):
    """Error: the new checkpoint was written, but older ones could not be removed."""


class Owner(NamedTuple):
    """Run that a directory of checkpoints belongs to.

    Attributes
    ----------
    run : str
        Identifier, equal on all ranks; "" for runs of versions without one.
    overwrite : bool
        True to take over a directory with checkpoints of other runs, which are removed after the next one is written.
    """

    run: str = ""
    overwrite: bool = False


class Kept(NamedTuple):
    """Numbers of checkpoints of a run to keep: the newest, and the best by their score, the lowest."""

    newest: int = 3
    best: int = 0


class Origin(NamedTuple):
    """Run and branch of a checkpoint."""

    run: str
    branch: int


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
    """Checkpoint folders in a directory, and links to such, by branch and step; they are found by name, not verified.

    Those whose state file cannot be read are in the highest branch: the newest by step, if damaged, is the last.
    """
    found = directory.iterdir() if directory.is_dir() else iter(())
    origins = {path: origin_of(path) for path in found if NAME.fullmatch(path.name) and os.path.isdir(path)}
    highest = max((origin.branch for origin in origins.values() if origin), default=0)
    branches = {path: highest if origin is None else origin.branch for path, origin in origins.items()}
    return sorted(origins, key=lambda path: (branches[path], step_of(path), path.name))


def origin_of(path: Path) -> Origin | None:
    """Run and branch of a checkpoint folder, not verified; None if its state file cannot be read."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return None
    run, branch = state.get("run", ""), state.get("branch", 0)
    return Origin(run, branch) if isinstance(run, str) and type(branch) is int and branch >= 0 else None


def next_origin(directory: Path, step: int, run: str) -> Origin:
    """Run and branch of the next checkpoint of a run, after `step` steps: a new branch if an older one is further."""
    origins = [(step_of(path), origin_of(path)) for path in all_in(directory)]
    known = [(other, origin) for other, origin in origins if origin is not None]
    highest = max((origin.branch for _, origin in known), default=0)
    return Origin(run, highest + any(other >= step or origin.run != run for other, origin in known))


def expect_place(target: Path, owner: Owner) -> None:
    """Raise an OSError unless `owner` may write a checkpoint to `target`, perhaps in place of an older one of its own.

    FileExistsError if `target` is a link, a file, or a folder that is no checkpoint.
    """
    ours = {path: origin_of(path) for path in all_in(target.parent) if _is_ours(path)}
    others = [path.name for path, origin in ours.items() if origin and origin.run != owner.run]
    if others and not owner.overwrite:
        count = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise FileExistsError(
            f"{target.parent} has checkpoints of another run, {others[-1]}{count}; expected a directory without, one "
            "from which this run continues, or overwrite=True"
        )
    if os.path.lexists(target) and not ours.get(target):  # exists() is False for a broken link
        raise FileExistsError(f"{target} exists, and is no checkpoint that can be replaced")


def move_into_place(folder: Path, target: Path) -> None:
    """Rename a complete folder to `target`, in place of an older checkpoint there; it is valid from then on."""
    if not os.path.lexists(target):
        folder.rename(target)
    else:
        spare = target.with_name(target.name + REPLACEMENT)
        folder.rename(spare)
        sync_folder(target.parent)
        _finish_replacement(spare)
    sync_folder(target.parent)


def _finish_replacement(spare: Path) -> None:
    """Rename a replacement to the name of the checkpoint that it replaces, which is removed if it is still there."""
    target, old = spare.with_name(spare.name.removesuffix(REPLACEMENT)), None
    if os.path.lexists(target):
        old = target.rename(_hidden(target))
    spare.rename(target)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)  # the next checkpoint removes the rest


def finish_replacements(directory: Path) -> None:
    """Finish the replacements of processes that ended within them."""
    for path in all_in(directory):
        target = path.with_name(path.name.removesuffix(REPLACEMENT))
        if path != target and _is_ours(path) and origin_of(path) and (_is_ours(target) or not os.path.lexists(target)):
            with _locked(path, without=True) as locked:
                if locked:  # else its process is still at work
                    _finish_replacement(path)


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Context that yields a new locked folder beside `target`, to be renamed to it; it is removed after an exception.

    Unfinished folders of processes that have ended are removed. OSError if a folder cannot be made beside `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
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


def score_of(path: Path) -> float | None:
    """Score of a checkpoint, or None."""
    try:
        score = json.loads((path / STATE).read_text(encoding="utf-8"))["facts"].get("score")
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return score if type(score) is float else None


def remove_old(written: Path, keep: Kept, owner: Owner) -> None:
    """Remove checkpoints beside `written`: rename, then delete. Links and other folders stay.

    Of those of the same run, `written`, the newest others, and the best stay; those of other runs are removed if
    `owner.overwrite`.
    """
    origins = {path: origin_of(path) for path in all_in(written.parent) if _is_ours(path) and path != written}
    others = [path for path, origin in origins.items() if origin and origin.run != owner.run]
    mine = [path for path, origin in origins.items() if origin and origin.run == owner.run]
    scores = {path: score for path in (*mine, written) if keep.best and (score := score_of(path)) is not None}
    best = sorted(scores, key=scores.__getitem__)[: keep.best]
    old_ones = [path for path in mine[: max(0, len(mine) + 1 - keep.newest)] if path not in best]
    for old in (others if owner.overwrite else []) + old_ones:
        hidden = _hidden(old)
        with _locked(old, without=True), contextlib.suppress(FileNotFoundError):  # another process removes it too
            old.rename(hidden)
            shutil.rmtree(hidden)


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(8).hex()}.partial")


def _is_ours(path: Path) -> bool:
    """True if `path` is a folder, not a link, and contains only files with names of checkpoint files."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return all(FILE.fullmatch(name) or name == STATE for name in os.listdir(path))
    except OSError:
        return False


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
    """Write the file state.json with these fields, the format version and a checksum; ValueError if nested too deep."""
    expect_shallow(fields)
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
    except (ValueError, RecursionError) as error:  # of brackets nested too deep
        raise ValueError(f"{STATE} is damaged: {error}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"{STATE} is not a checkpoint's")
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']!r}, expected {FORMAT!r}")
    expect_shallow(state)
    if state.get("sha256") != seal(state):
        raise ValueError(f"{STATE} is damaged: its checksum is wrong")
    for name, kind in REQUIRED.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"{STATE} is not a checkpoint's: {name} is {state.get(name)!r}")
    expect_integer(state, "step")
    if origin_of(path) is None:
        raise ValueError(
            f"{STATE} is not a checkpoint's: run and branch are {state.get('run')!r}, {state.get('branch')!r}"
        )
    for name, about in state["files"].items():
        if not FILE.fullmatch(name) or not isinstance(about, list) or list(map(type, about)) != [int, str]:
            raise ValueError(f"{STATE} is not a checkpoint's: {name!r} has {about!r}")
    return state


def expect_shallow(value: Any) -> None:
    """Raise ValueError if a value for JSON has more than `DEPTH` levels of containers."""
    level = [value]
    for _ in range(DEPTH + 1):
        containers = {id(one): one.values() if isinstance(one, Mapping) else one for one in level if _is_container(one)}
        level = [item for items in containers.values() for item in items]
    if level:
        raise ValueError(f"expected at most {DEPTH} nested lists and objects, found more")


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


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

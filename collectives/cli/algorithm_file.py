"""Algorithms of users on the command line: ``file.py:name``, a generator function or an `Algorithm` in a file."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from collectives.algorithms import catalog
from collectives.algorithms.catalog import CATALOG, Algorithm
from collectives.analysis.matching import ScheduleError
from collectives.analysis.prove import prove
from collectives.schedule import semantics

MOST = 256
"""Ranks for which an algorithm without cost formulas is proved."""


def entry_name(collective: str, text: str, size: int | None = None) -> str:
    """Name in the catalogue of the algorithm `text`. An algorithm in a file is added to the catalogue.

    It is proved for `size` ranks. A function without formulas then has the costs of that proof as constants. ValueError
    if there is no such algorithm, or it is wrong.

    >>> entry_name("allreduce", "ring")
    'ring'
    """
    path, _, attribute = text.rpartition(":")
    if not path.endswith(".py"):
        catalog.find(collective, text)
        return text
    module = _loaded(Path(path))
    found: Any = getattr(module, attribute, None)
    if not callable(getattr(found, "generate", found)):
        own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
        known = ", ".join([*own, *(name for name, value in vars(module).items() if isinstance(value, Algorithm))])
        raise ValueError(f"{path}: expected one of {known}; found {attribute!r}")
    name = f"{Path(path).stem}.{attribute}"
    is_entry = isinstance(found, Algorithm)
    entries = CATALOG[collective]
    entries[name] = found if is_entry else Algorithm(found, "", alike=False, exact=False)
    if size is not None and (size <= MOST or not is_entry):  # the proof has a function's costs
        entries[name] = _proved(collective, name, size, entries[name])
    return name


def _proved(collective: str, name: str, size: int, entry: Algorithm) -> Algorithm:
    """The entry, with the costs of its proof where it has no formulas. ValueError if it is wrong for `size` ranks."""
    if size > MOST:
        other = "an Algorithm with cost formulas (docs/how-to/write_algorithm.md)"
        raise ValueError(f"{name}: expected at most {MOST} ranks for a function, or {other}; found {size} ranks")
    blocks = catalog.blocks(collective, name, size)
    try:
        proof = prove(collective, catalog.build_all(collective, name, size), blocks=blocks)
    except ScheduleError as fault:
        raise ValueError(f"{name} is wrong for {size} ranks: {fault}") from fault
    except Exception as error:  # of the user's function
        raise ValueError(f"{name}: expected rounds for {size} ranks, found {type(error).__name__}: {error}") from error
    if entry.rounds:
        return entry
    vector = semantics.vector(collective, size, blocks)
    volume, combined = max(*proof.sent, *proof.received), max(proof.combined)
    share = f"{volume}/{vector}"
    return entry._replace(
        rounds=str(proof.rounds), volume=share, combined=f"{combined}/{vector}", ordered=proof.ordered
    )


def _loaded(path: Path) -> ModuleType:
    """Module of a Python file. ValueError if it cannot be run."""
    made = spec_from_file_location(path.stem, path)
    assert made is not None and made.loader is not None
    module = module_from_spec(made)
    try:
        made.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"{path}: expected a Python file that can be run, found {type(error).__name__}: {error}"
        ) from error
    return module

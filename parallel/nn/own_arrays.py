"""Arrays in attributes of operators, which forward passes must leave as they are.

Such values, as running means, would differ between ranks and be in no checkpoint; values for the backward pass, kept in
an attribute, would be those of another micro-batch.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from parallel.nn.array_checks import label
from parallel.nn.operator import DEPTH, Operator, PassMode
from parallel.nn.rewrite import operators_in

_unchanged: weakref.WeakValueDictionary[int, Operator] = weakref.WeakValueDictionary()
"""Units, by id, of which a pass has changed no array and added none: they are not watched any more."""


@contextmanager
def watched(unit: Operator, run: PassMode) -> Iterator[None]:
    """Context of a unit's forward pass, in training; arrays that it changes are added to `PassMode.changes`.

    Until a pass has found nothing: an operator may make constants in its first pass.
    """
    if not run.training or _unchanged.get(id(unit)) is unit:
        yield
        return
    before = own_arrays(unit)
    yield
    after = own_arrays(unit)
    if changed := changes(before, after):
        run.changes.extend(changed)
    elif before.keys() == after.keys():
        _unchanged[id(unit)] = unit


def own_arrays(unit: Operator) -> dict[str, bytes]:
    """Digests of the arrays in attributes of an operator and those in it, by operator and attribute."""
    found = (
        (f"{label(operator)}: {path}", array)
        for operator in operators_in(unit)
        for name, value in vars(operator).items()
        for path, array in _arrays_in(value, name)
    )
    return {path: _digest(array) for path, array in found}


def changes(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Texts about arrays that are not as before; new ones do not count."""
    advice = "expected forward to leave attributes as they are; `saved` is for backward, `PassMode.records` for reports"
    changed = [path for path, digest in after.items() if before.get(path, digest) != digest]
    return [f"{path} was changed by forward; {advice}" for path in changed]


def changed_arrays(runs: Sequence[PassMode]) -> TypeError | None:
    """Error that names the first array that a pass has changed; None if no pass has."""
    return next((TypeError(text) for run in runs for text in run.changes), None)


def _arrays_in(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, np.ndarray | np.generic) or type(value).__module__.partition(".")[0] == "cupy":
        yield path, value
    elif depth < DEPTH and isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _arrays_in(item, f"{path}.{key}", depth + 1)


def _digest(array: Any) -> bytes:
    values = np.ascontiguousarray(array if isinstance(array, np.ndarray | np.generic) else array.get())
    return blake2b(f"{values.dtype}{values.shape}".encode() + values.tobytes(), digest_size=16).digest()

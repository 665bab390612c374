"""Checks of what users give an engine: batches that are the same on all ranks, data sets, epochs."""

from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.engine.fingerprint import array_text
from parallel.runtime.consistency_check import check_equal


def expect_same(comm: MPI.Intracomm, x: Any, y: Any, samples: Any = None) -> None:
    """Raise RankMismatch on all ranks if they have other batches, such as each a part of one. Collective.

    TypeError if they are no arrays of numbers with an axis of samples.
    """
    forms = [(name, array, *_form_of(array)) for name, array in (("x", x), ("y", y))]
    facts = [(name, _text_of(array, shape, good)) for name, array, shape, good in forms]
    check_equal(comm, [*facts, ("samples", None if samples is None else _text_of(samples, *_form_of(samples)))])
    for name, array, shape, good in forms:
        if not good or not shape:
            found = f"{getattr(array, 'dtype', type(array).__name__)} of shape {shape}"
            raise TypeError(f"{name}: expected an array of numbers with an axis of samples first, found {found}")


def expect_data(data: Any) -> None:
    """Raise TypeError for an object that is no data set."""
    if not (hasattr(data, "take") and hasattr(data, "__len__")):
        found = type(data).__name__
        raise TypeError(f"data: expected len(data) and data.take(indices), as ArrayDataset(x, y); found a {found}")


def _form_of(array: Any) -> tuple[tuple[int, ...], bool]:
    """Shape of an array, or of nested lists, and True if it has numbers; () of lists of unequal lengths."""
    try:
        return np.shape(array), str(getattr(array, "dtype", None) or np.asarray(array).dtype) != "object"
    except ValueError:
        return (), False


def _text_of(array: Any, shape: tuple[int, ...], is_numbers: bool) -> str:
    if not is_numbers:
        return f"{type(array).__name__} of shape {shape}"
    on_device = type(array).__module__.partition(".")[0] == "cupy"
    return array_text(array if on_device else np.asarray(array))

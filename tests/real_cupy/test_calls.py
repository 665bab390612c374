"""Every form of a call that the project makes of CuPy, repeated with CuPy: same types, shapes and dtypes of results."""

import numpy as np
import pytest
from support.recorded_calls import decoded
from support.standin import recorder

CALLS = recorder.stored()
DEPENDS_ON_VALUES = ("flatnonzero", "nonzero", "bincount", "unique", "ndarray.__iter__", "repeat", "argwhere")
"""Functions whose results have lengths that depend on the values."""


def selects_by_mask(entry):
    """True if an array of bools is among the indices, so that the length of the result depends on its values."""
    indices = (part for part in flat(entry["arguments"][1:]) if isinstance(part, dict))
    return any(part.get("dtype") == "bool" and "array" in part for part in indices)


def flat(values):
    for value in values:
        yield value
        if isinstance(value, dict):
            yield from flat(value.get("tuple", value.get("list", ())))


def compare(cupy, found, expected, lengths):
    if isinstance(expected, dict) and "array" in expected:
        assert isinstance(found, cupy.ndarray) and found.dtype.name == expected["dtype"]
        assert found.ndim == len(expected["array"])
        if lengths:
            assert found.shape == tuple(expected["array"])
    elif isinstance(expected, dict) and "host" in expected:
        assert isinstance(found, np.ndarray) and found.dtype.name == expected["dtype"]
    elif isinstance(expected, dict) and ("tuple" in expected or "list" in expected):
        parts = expected.get("tuple", expected.get("list"))
        assert len(found) == len(parts)
        for one, other in zip(found, parts):
            compare(cupy, one, other, lengths)
    elif isinstance(expected, dict):
        assert "object" in expected, expected
    else:
        assert type(found) is type(expected)


@pytest.mark.parametrize("form", [key for key in CALLS if not key.startswith("ElementwiseKernel")])
def test_like_the_standin(cupy, form):
    entry = CALLS[form]
    arguments = [decoded(cupy, value) for value in entry["arguments"]]
    options = {name: decoded(cupy, value) for name, value in entry["options"].items()}
    owner, _, name = entry["call"].rpartition(".")
    function = getattr(cupy.ndarray if owner else cupy, name)
    result = function(*arguments, **options)
    compare(cupy, result, entry["result"], entry["call"] not in DEPENDS_ON_VALUES and not selects_by_mask(entry))

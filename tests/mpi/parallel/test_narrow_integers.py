"""Tokens, targets and sample numbers in narrow integers: the same numbers as in int64, and as refused in int64."""

import numpy as np
import pytest

from parallel import AdamW, Engine, nn
from parallel.data.sampler import batch_of
from parallel.nn.models import transformer
from parallel.runtime.consistency_check import StepFailed

LENGTH, SAMPLES = 24, 4
DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "uint32", "uint64")
LAYOUTS = {
    "dp": lambda ranks: {},
    "tp": lambda ranks: {"mesh": f"tp={ranks}"},
    "shards": lambda ranks: {"tensor_shards": 12, "mesh": f"tp={ranks}", "sequence_parallel": True},
    "cp": lambda ranks: {"mesh": f"cp={ranks}"},
    "ps": lambda ranks: {"layout": "ps", "reproducible": True} if ranks > 1 else {},
}


def tokens(dtype, classes):
    most = min(classes, np.iinfo(dtype).max + 1)
    return np.random.default_rng(0).integers(0, most, (SAMPLES, LENGTH + 1)).astype(dtype)


def losses(comm, given, classes, **options):
    """Losses of evaluations after two steps, of a model with more classes than the dtype has numbers."""
    model, x, y = transformer(classes, LENGTH, 1, 12, 12, dropout=0.2), given[:, :-1], given[:, 1:]
    with Engine(model, nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), batch=SAMPLES, **options) as engine:
        found = []
        for _ in range(2):
            engine.step(x, y, samples=np.arange(SAMPLES, dtype=given.dtype))
            found.append(engine.evaluate(x, y).loss)
        return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_integers(comm, layout, dtype):
    options, classes = LAYOUTS[layout](comm.Get_size()), 384
    given = tokens(dtype, classes)
    assert losses(comm, given, classes, **options) == losses(comm, given.astype(np.int64), classes, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_beyond_int64(comm, layout):
    given = tokens("uint64", 24)
    given[1, 3] = 2**64 - 1  # -1 in int64, which is no target
    with pytest.raises(StepFailed, match="expected integers that int64 can hold, found 18446744073709551615"):
        losses(comm, given, 24, **LAYOUTS[layout](comm.Get_size()))


REFUSED = {
    "samples": ((np.zeros((2, 3)), np.zeros(2, int), np.array([0.5, 1.5])), "sample numbers: expected integers"),
    "inputs": (
        (np.zeros((2, 3), complex), np.zeros(2, int), [0, 1]),
        "inputs: expected real numbers, found complex128",
    ),
    "targets": ((np.zeros((2, 3)), np.array(["a", "b"]), [0, 1]), "targets: expected real numbers, found <U1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arrays_that_are_refused(what):
    arrays, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        batch_of((0, *arrays), 0)

"""Random calls of every collective, of any length, in all forms, on both engines: the result is what the call means."""

from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from mpi4py import MPI
from support.exchange_cases import FORMS, TABLE, Question, ours, perform
from support.tiers import default

CALLS = 120
LONGEST = 0, 1, 3, 64, 5000, 70_000, 400_000
DTYPES = "?", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "c16"
OPERATIONS = {"SUM": np.add, "MAX": np.maximum, "PROD": np.multiply}


class Drawn(NamedTuple):
    """One call: its method, form, elements of a vector or all blocks, and the other arguments."""

    method: str
    form: str
    count: int
    dtype: str
    op: str
    root: int
    in_place: bool
    algorithm: str
    segments: int | None
    turns: int


def draw(chance, size):
    """Draw a call that is the same on all ranks. Its results are exact: the inputs are integers up to 10."""
    line = chance.choice(list(TABLE.values()))
    dtype = chance.choice(DTYPES[line.reduces :])
    inexact = {"c16": ("MAX", "PROD"), "f2": ("PROD",)}.get(dtype, ())
    algorithm = "auto" if chance.random() < 0.6 else chance.choice(ours(line.collective))
    is_cut = algorithm != "auto" and line.method != "Barrier"
    return Drawn(
        line.method,
        chance.choice(("blocking", *FORMS)),
        chance.randint(0, chance.choice(LONGEST)),
        dtype,
        chance.choice([name for name in OPERATIONS if name not in inexact]),
        chance.randrange(size),
        line.in_place and chance.random() < 0.3,
        algorithm,
        chance.choice((None, None, None, 1, 2, 3)) if is_cut else None,
        chance.choice((1, 1, 1, 4)),
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", default(range(10), 0))
def test_random_calls(on_engines, seed):
    comm, chance = on_engines, Random(seed)
    rank, size = comm.Get_rank(), comm.Get_size()
    for number in range(CALLS):
        call = draw(chance, size)
        whole = TABLE[call.method].collective in ("broadcast", "reduce", "allreduce", "scan", "exscan")
        count = call.count if whole else call.count // size
        operation = getattr(MPI, call.op), OPERATIONS[call.op]
        asked = Question(rank, size, call.root, count, np.dtype(call.dtype), call.in_place, *operation)
        keywords = {"algorithm": call.algorithm, "segments": call.segments}
        try:
            perform(comm, call.form, call.method, TABLE[call.method].make(asked), call.turns, **keywords)
        except Exception as error:
            raise AssertionError(f"call {number}: {call}") from error

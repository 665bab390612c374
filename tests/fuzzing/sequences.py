"""Random sequences of steps, each drawn from (seed, thread, number) alone, so that a part can run without the rest."""

from random import Random
from typing import NamedTuple

from fuzzing.messages import WAYS

REDUCING = ("Reduce", "Allreduce", "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan")
MOVING = (
    "Bcast",
    "Scatter",
    "Gather",
    "Allgather",
    "Alltoall",
    "Scatterv",
    "Gatherv",
    "Allgatherv",
    "Alltoallv",
    "Alltoallw",
)
OBJECTS = ("barrier", "bcast", "gather", "scatter", "allgather", "alltoall")
REDUCED_OBJECTS = ("reduce", "allreduce", "scan", "exscan")
"""Methods for which mpi4py duplicates the communicator when they are first used on it, under a lock of the process: for
the first thread alone, as two threads wait for each other there natively (``scripts/fuzz.py --control`` shows it)."""


INTEGERS, FLOATS, COMPLEX = "bhilqBHILQ", "fdg", "FD"
OPERATIONS = {
    **dict.fromkeys(("SUM", "PROD"), INTEGERS + FLOATS + COMPLEX),
    **dict.fromkeys(("MAX", "MIN"), INTEGERS + FLOATS),
    **dict.fromkeys(("BAND", "BOR", "BXOR"), INTEGERS),
    **dict.fromkeys(("LAND", "LOR", "LXOR"), INTEGERS + "?"),
    **dict.fromkeys(("MAXLOC", "MINLOC"), ("FLOAT_INT", "DOUBLE_INT", "TWOINT")),
    **dict.fromkeys(("affine", "add"), "Q"),  # the user's: one that does not commute, one that does
}
"""Element types of each operation: those for which MPI defines it."""

GAPLESS = ("contiguous", "dup", "struct")
TYPES = (*GAPLESS, "vector", "indexed", "resized", "nested")
LENGTHS = (0, 1, 1, 2, 3, 5, 8, 17, 100, 1000, 5000)
FORMS = ("blocking", "blocking", "begun", "pending", "bound", "kept", "repeated", "repeated", "begun again")


class Step(NamedTuple):
    """One step of a thread's sequence: a collective call, or an action on a communicator, operation or request."""

    thread: int
    number: int
    kind: str  # "call", or one of `OTHERS`
    comm: int = 0  # index of the communicator, modulo their number
    pick: int = 0  # any other choice, modulo the number of possibilities
    method: str = ""  # of the communicator
    form: str = ""  # blocking, begun, left pending, bound (started and freed), kept for restarts, or repeated
    dtype: str = ""  # letter of the elements' type
    datatype: str = ""  # derived type made of it
    op: str = ""
    n: int = 0  # elements of a rank, or of a block
    flags: frozenset[str] = frozenset()  # spellings of arguments, and more: "in place", "shared", "algorithm" ...

    def __str__(self) -> str:
        words = [f"{self.thread}.{self.number}: {self.kind}", self.method, self.form, self.op, self.datatype]
        numbers = f"{self.dtype} n={self.n}" if self.kind == "call" else ""
        where = f"(comm {self.comm}, pick {self.pick})"
        return " ".join(word for word in (*words, numbers, ", ".join(sorted(self.flags)), where) if word)


# fmt: off
OTHERS = {
    "object": 8, "complete": 8, "restart": 5, "message": 10, "refusal": 4, "dup": 2, "split": 3, "clone": 1,
    "create": 2, "wrap": 2, "copy": 2, "free": 4, "free out of order": 2, "free op": 3, "copied op": 2,
    "neighbors": 3,
}
"""Steps other than calls on arrays, with their frequency in a hundred."""

CREATING = ("dup", "split", "clone", "create", "wrap")
"""Steps that create a communicator."""

SPELLINGS = {
    "in place": 0.25, "None for in place": 0.2, "root as an array": 0.1, "type given": 0.3, "count given": 0.3,
    "array.array": 0.05, "DLPack": 0.1, "memoryview": 0.1, "tensor": 0.05, "Fortran": 0.15, "shared": 0.15,
    "algorithm": 0.3, "segments": 0.1, "copied op": 0.15, "type freed": 0.5, "packed": 0.4, "overlapping": 0.3,
    "equal blocks": 0.2, "one number": 0.5, "arrays of counts": 0.2, "derived on one side": 0.3,
    "read-only": 0.2, "other shapes": 0.3, "other counts": 0.2,
}
"""Flags of calls, with their frequency."""
# fmt: on


def draw(seed: int, thread: int, number: int) -> Step:
    """Draw step `number` of a thread's sequence, the same on all ranks."""
    chance = Random(f"{seed} {thread} {number}")
    comm, pick = chance.randrange(60), chance.randrange(2520)
    kind = chance.choices(["call", *OTHERS], [100 - sum(OTHERS.values()), *OTHERS.values()])[0]
    step = Step(thread, number, kind, comm, pick)
    if kind == "object":
        return step._replace(method=chance.choice(OBJECTS if thread else OBJECTS + REDUCED_OBJECTS))
    if kind == "message":
        return step._replace(method=chance.choice(list(WAYS)))
    if kind != "call":
        return step
    method = chance.choice(("Barrier", *REDUCING, *REDUCING, *MOVING))
    n = chance.choice(LENGTHS) if chance.random() < 0.97 else 120_000
    op, datatype, dtype = "", "", chance.choice(INTEGERS + FLOATS + COMPLEX + "?")
    if method in REDUCING:
        op = chance.choice([*OPERATIONS, "SUM", "affine", "affine", "add"])
        dtype = chance.choice(OPERATIONS[op])
        if op in ("affine", "add") and chance.random() < 0.4:
            datatype = chance.choice(GAPLESS)
    elif chance.random() < 0.3:
        datatype = chance.choice(TYPES)
    if datatype:
        n = min(n, 5000)
    flags = frozenset(name for name, often in SPELLINGS.items() if chance.random() < often)
    if "shared" in flags:
        flags -= {"array.array"}  # of other memory
    return step._replace(
        method=method, form=chance.choice(FORMS), n=n, dtype=dtype, datatype=datatype, op=op, flags=flags
    )


def sequence(seed: int, threads: int, calls: int) -> list[Step]:
    return [draw(seed, thread, number) for thread in range(threads) for number in range(calls)]

"""One example of every collective, with closed forms: what each rank hands over, and what it must have in the end.

The numbers are small integers, so sums are exact in every dtype and equality is exact.
"""

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

UNTOUCHED = 7

FORMS = ("blocking", "nonblocking", "persistent")
"""Forms of a call."""


class Example(NamedTuple):
    """One rank's part: the arrays to send from and to receive in (None: the rank has none), what the second must hold
    afterwards, and the position of the arrays among the arguments."""

    send: Any
    recv: Any
    expected: Any
    method: str
    form: Any

    def arguments(self, send, recv):
        """The positional arguments of the method, with these arrays in place of ours."""
        return self.form(send, recv)


def values(rank, count, dtype):
    """What a rank brings."""
    return ((np.arange(count) + 3 * rank) % 5).astype(dtype)


def lengths(size, n):
    """Blocks of different lengths, some of them empty."""
    return [(n + 2 * rank) % 7 if n else 0 for rank in range(size)]


def _total(size, count, dtype):
    return reduce(np.add, [values(rank, count, dtype) for rank in range(size)])


def _empty(count, dtype):
    return np.full(count, UNTOUCHED).astype(dtype)


def bcast(rank, size, n, dtype, root, in_place):
    buf = values(root, n, dtype) if rank == root else _empty(n, dtype)
    return Example(None, buf, values(root, n, dtype), "Bcast", lambda send, recv: (recv, root))


def reduce_(rank, size, n, dtype, root, in_place):
    mine = values(rank, n, dtype)
    if rank != root:
        return Example(mine, None, None, "Reduce", lambda send, recv: (send, None, MPI.SUM, root))
    if in_place:
        form = lambda send, recv: (MPI.IN_PLACE, recv, MPI.SUM, root)  # noqa: E731
        return Example(None, mine, _total(size, n, dtype), "Reduce", form)
    form = lambda send, recv: (send, recv, MPI.SUM, root)  # noqa: E731
    return Example(mine, _empty(n, dtype), _total(size, n, dtype), "Reduce", form)


def allreduce(rank, size, n, dtype, root, in_place):
    mine, total = values(rank, n, dtype), _total(size, n, dtype)
    if in_place:
        return Example(None, mine, total, "Allreduce", lambda send, recv: (MPI.IN_PLACE, recv, MPI.SUM))
    return Example(mine, _empty(n, dtype), total, "Allreduce", lambda send, recv: (send, recv, MPI.SUM))


def scatter(rank, size, n, dtype, root, in_place):
    blocks = [values(r, n, dtype) for r in range(size)]
    if rank != root:
        return Example(None, _empty(n, dtype), blocks[rank], "Scatter", lambda send, recv: (None, recv, root))
    return Example(
        np.concatenate(blocks), _empty(n, dtype), blocks[rank], "Scatter", lambda send, recv: (send, recv, root)
    )


def gather(rank, size, n, dtype, root, in_place):
    mine, everything = values(rank, n, dtype), np.concatenate([values(r, n, dtype) for r in range(size)])
    if rank != root:
        return Example(mine, None, None, "Gather", lambda send, recv: (send, None, root))
    if in_place:
        there = _empty(n * size, dtype)
        there[n * rank : n * (rank + 1)] = mine
        return Example(None, there, everything, "Gather", lambda send, recv: (MPI.IN_PLACE, recv, root))
    return Example(mine, _empty(n * size, dtype), everything, "Gather", lambda send, recv: (send, recv, root))


def allgather(rank, size, n, dtype, root, in_place):
    mine, everything = values(rank, n, dtype), np.concatenate([values(r, n, dtype) for r in range(size)])
    if in_place:
        there = _empty(n * size, dtype)
        there[n * rank : n * (rank + 1)] = mine
        return Example(None, there, everything, "Allgather", lambda send, recv: (MPI.IN_PLACE, recv))
    return Example(mine, _empty(n * size, dtype), everything, "Allgather", lambda send, recv: (send, recv))


def reduce_scatter_block(rank, size, n, dtype, root, in_place):
    mine, total = values(rank, n * size, dtype), _total(size, n * size, dtype)[n * rank : n * (rank + 1)]
    if in_place:
        form = lambda send, recv: (MPI.IN_PLACE, recv, MPI.SUM)  # noqa: E731
        return Example(None, mine, np.concatenate([total, mine[n:]]), "Reduce_scatter_block", form)
    form = lambda send, recv: (send, recv, MPI.SUM)  # noqa: E731
    return Example(mine, _empty(n, dtype), total, "Reduce_scatter_block", form)


def reduce_scatter(rank, size, n, dtype, root, in_place):
    counts = lengths(size, n)
    start, whole = sum(counts[:rank]), sum(counts)
    mine, total = values(rank, whole, dtype), _total(size, whole, dtype)[start : start + counts[rank]]
    if in_place:
        form = lambda send, recv: (MPI.IN_PLACE, recv, counts, MPI.SUM)  # noqa: E731
        return Example(None, mine, np.concatenate([total, mine[counts[rank] :]]), "Reduce_scatter", form)
    form = lambda send, recv: (send, recv, counts, MPI.SUM)  # noqa: E731
    return Example(mine, _empty(counts[rank], dtype), total, "Reduce_scatter", form)


def _apart(size, n, dtype):
    """Blocks of all ranks in one array, the last rank's first, with a gap of one element after each."""
    counts, displs, at = lengths(size, n), [0] * size, 0
    for rank in reversed(range(size)):
        displs[rank], at = at, at + counts[rank] + 1
    array = _empty(at, dtype)
    for rank in range(size):
        array[displs[rank] : displs[rank] + counts[rank]] = values(rank, counts[rank], dtype)
    return array, counts, displs


def scatterv(rank, size, n, dtype, root, in_place):
    array, counts, displs = _apart(size, n, dtype)
    mine, there = values(rank, counts[rank], dtype), _empty(counts[rank], dtype)
    if rank != root:
        return Example(None, there, mine, "Scatterv", lambda send, recv: (None, recv, root))
    return Example(array, there, mine, "Scatterv", lambda send, recv: ([send, (counts, displs)], recv, root))


def _empty_but(array, counts, displs, rank):
    """The array before its blocks came, but for one's own."""
    there = _empty(len(array), array.dtype)
    own = slice(displs[rank], displs[rank] + counts[rank])
    there[own] = array[own]
    return there


def gatherv(rank, size, n, dtype, root, in_place):
    array, counts, displs = _apart(size, n, dtype)
    mine = values(rank, counts[rank], dtype)
    if rank != root:
        return Example(mine, None, None, "Gatherv", lambda send, recv: (send, None, root))
    if in_place:
        form = lambda send, recv: (MPI.IN_PLACE, [recv, (counts, displs)], root)  # noqa: E731
        return Example(None, _empty_but(array, counts, displs, rank), array, "Gatherv", form)
    form = lambda send, recv: (send, [recv, (counts, displs)], root)  # noqa: E731
    return Example(mine, _empty(len(array), dtype), array, "Gatherv", form)


def allgatherv(rank, size, n, dtype, root, in_place):
    array, counts, displs = _apart(size, n, dtype)
    mine = values(rank, counts[rank], dtype)
    if in_place:
        form = lambda send, recv: (MPI.IN_PLACE, [recv, (counts, displs)])  # noqa: E731
        return Example(None, _empty_but(array, counts, displs, rank), array, "Allgatherv", form)
    form = lambda send, recv: (send, [recv, (counts, displs)])  # noqa: E731
    return Example(mine, _empty(len(array), dtype), array, "Allgatherv", form)


def alltoall(rank, size, n, dtype, root, in_place):
    out = np.concatenate([values(rank + peer, n, dtype) for peer in range(size)])  # the same for either direction
    if in_place:
        return Example(None, out, out, "Alltoall", lambda send, recv: (MPI.IN_PLACE, recv))
    return Example(out, _empty(n * size, dtype), out, "Alltoall", lambda send, recv: (send, recv))


def alltoallv(rank, size, n, dtype, root, in_place):
    """Between two ranks go as many elements as the two numbers together say, with a gap after each block."""
    counts = [(n + rank + peer) % 5 if n else 0 for peer in range(size)]
    displs = [sum(counts[:peer]) + peer for peer in range(size)]
    out = _empty(sum(counts) + size, dtype)
    for peer in range(size):
        out[displs[peer] : displs[peer] + counts[peer]] = values(rank + peer, counts[peer], dtype)
    if in_place:
        form = lambda send, recv: (MPI.IN_PLACE, [recv, (counts, displs)])  # noqa: E731
        return Example(None, out, out, "Alltoallv", form)
    form = lambda send, recv: ([send, (counts, displs)], [recv, (counts, displs)])  # noqa: E731
    return Example(out, _empty(len(out), dtype), out, "Alltoallv", form)


def scan(rank, size, n, dtype, root, in_place):
    mine, total = values(rank, n, dtype), _total(rank + 1, n, dtype)
    if in_place:
        return Example(None, mine, total, "Scan", lambda send, recv: (MPI.IN_PLACE, recv, MPI.SUM))
    return Example(mine, _empty(n, dtype), total, "Scan", lambda send, recv: (send, recv, MPI.SUM))


def exscan(rank, size, n, dtype, root, in_place):
    mine = values(rank, n, dtype)
    there = mine if in_place else _empty(n, dtype)
    total = _total(rank, n, dtype) if rank else there
    if in_place:
        return Example(None, there, total, "Exscan", lambda send, recv: (MPI.IN_PLACE, recv, MPI.SUM))
    return Example(mine, there, total, "Exscan", lambda send, recv: (send, recv, MPI.SUM))


EXAMPLES = {
    "bcast": bcast,
    "reduce": reduce_,
    "allreduce": allreduce,
    "scatter": scatter,
    "gather": gather,
    "allgather": allgather,
    "reduce_scatter_block": reduce_scatter_block,
    "reduce_scatter": reduce_scatter,
    "alltoall": alltoall,
    "scan": scan,
    "exscan": exscan,
    "scatterv": scatterv,
    "gatherv": gatherv,
    "allgatherv": allgatherv,
    "alltoallv": alltoallv,
}
"""collective -> (rank, size, n, dtype, root, in_place) -> `Example`."""


def check(recv, expected):
    """Compare what was received, if anything was to be; in place, also what had to stay as it was."""
    if expected is not None:
        np.testing.assert_array_equal(recv, expected)


def call(comm, method, form, arguments, **options):
    """Run a collective, given by the name of its blocking method, in one of `FORMS`."""
    if form == "blocking":
        getattr(comm, method)(*arguments, **options)
    elif form == "nonblocking":
        getattr(comm, "I" + method.lower())(*arguments, **options).Wait()
    else:
        request = getattr(comm, method + "_init")(*arguments, **options)
        request.Start()
        request.Wait()
        request.Free()

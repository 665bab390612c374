"""Every collective method as one line of a table: what a rank passes in, and what must come out.

Inputs have a closed form, so that every rank knows what every other one brought; all sums are small integers, exact in
every dtype down to bfloat16.
"""

from functools import reduce as fold
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

import collectives

FORMS = ("blocking", "non-blocking", "persistent")


def values(rank, count, dtype, turn=0):
    """What `rank` brings: numbers from 0 to 10, different for neighbouring ranks, elements and turns."""
    period = ((rank * 7 + np.arange(11) * 3 + turn * 5) % 11).astype(dtype)
    return np.broadcast_to(period, (count // 11 + 1, 11)).flatten()[:count]


class Question(NamedTuple):
    """What is asked of a collective: who asks, of how many, the root, elements a rank (or a block), of what, how."""

    rank: int
    size: int
    root: int
    n: int
    dtype: object
    in_place: bool = False
    op: MPI.Op = MPI.SUM
    function: object = np.add
    values: object = values

    def room(self, count):
        return np.empty(count, self.dtype)

    def brought(self, rank, count, turn):
        return self.values(rank, count, self.dtype, turn)

    def total(self, count, turn, upto=None):
        """Everyone's terms in rank order."""
        ranks = range(self.size if upto is None else upto)
        return fold(self.function, [self.brought(rank, count, turn) for rank in ranks])


class Exchange:
    """One call: its arguments, arrays to fill before it and arrays to look at after it."""

    keeps_inputs = True  # False: the MPI may use all of a receive buffer, though the result is only a part of it

    def __init__(self, args, inputs=(), outputs=(), **keywords):
        self.args, self.keywords = args, keywords
        self.inputs, self.outputs = inputs, outputs

    def fill(self, turn):
        for array, _ in self.outputs:
            poison(array)
        for array, value in self.inputs:
            array[...] = value(turn)

    def check(self, turn):
        for array, value in self.outputs:
            expected = value(turn)
            assert array.dtype == expected.dtype
            assert array.tobytes() == expected.tobytes() or (array == expected).all(), f"{array} instead of {expected}"
        outputs = [array for array, _ in self.outputs]
        for array, value in self.inputs if self.keeps_inputs else ():
            if not any(np.may_share_memory(array, output) for output in outputs):
                assert (array == value(turn)).all(), "the input was written to"


def poison(array):
    """Something that no collective gives."""
    if array.size:
        array[...] = np.True_ if array.dtype == bool else np.asarray(101).astype(array.dtype)


def perform(comm, form, method, exchange, turns=2, **keywords):
    """Fill, call, check; with the same buffers several times."""
    keywords = exchange.keywords | keywords
    if form == "persistent":
        request = getattr(comm, f"{method}_init")(*exchange.args, **keywords)
    for turn in range(turns):
        exchange.fill(turn)
        if form == "blocking":
            getattr(comm, method)(*exchange.args, **keywords)
        elif form == "non-blocking":
            getattr(comm, f"I{method.lower()}")(*exchange.args, **keywords).Wait()
        else:
            request.Start()
            request.Wait()
        exchange.check(turn)
    if form == "persistent":
        request.Free()


# ------------------------------------------------------------------------------------------ the lines of the table


def barrier(q):
    return Exchange([])


def bcast(q):
    buf = q.room(q.n)
    mine = [(buf, lambda turn: q.brought(q.root, q.n, turn))]
    return Exchange([buf], mine if q.rank == q.root else (), mine, root=q.root)


def reduce(q):
    send, recv = q.room(q.n), q.room(q.n)
    total = [(recv, lambda turn: q.total(q.n, turn))]
    brought = lambda turn: q.brought(q.rank, q.n, turn)  # noqa: E731
    if q.rank != q.root:
        return Exchange([send, None], [(send, brought)], op=q.op, root=q.root)
    if q.in_place:
        return Exchange([MPI.IN_PLACE, recv], [(recv, brought)], total, op=q.op, root=q.root)
    return Exchange([send, recv], [(send, brought)], total, op=q.op, root=q.root)


def allreduce(q):
    send, recv = q.room(q.n), q.room(q.n)
    mine = recv if q.in_place else send
    return Exchange(
        [MPI.IN_PLACE if q.in_place else send, recv],
        [(mine, lambda turn: q.brought(q.rank, q.n, turn))],
        [(recv, lambda turn: q.total(q.n, turn))],
        op=q.op,
    )


def _blocks(q, lengths=None):
    """Lengths of the ranks' blocks, and where they lie in a vector of all."""
    lengths = [q.n] * q.size if lengths is None else lengths
    starts = list(accumulate(lengths, initial=0))
    return lengths, [slice(a, b) for a, b in pairwise(starts)], starts[-1]


def uneven(size, n):
    """n, none, half of it and one more, and so on."""
    return [(n, 0, n // 2 + 1)[rank % 3] for rank in range(size)]


def scatter(q):
    _, places, count = _blocks(q)
    send, recv = q.room(count), q.room(q.n)
    block = lambda turn: q.brought(q.root, count, turn)[places[q.rank]]  # noqa: E731
    if q.rank != q.root:
        return Exchange([None, recv], (), [(recv, block)], root=q.root)
    sent = [(send, lambda turn: q.brought(q.root, count, turn))]
    if q.in_place:
        return Exchange([send, MPI.IN_PLACE], sent, sent, root=q.root)
    return Exchange([send, recv], sent, [(recv, block)], root=q.root)


def _gathered(q, lengths=None):
    """(what rank r brings, what all of them are together)."""
    lengths, _, _ = _blocks(q, lengths)
    brought = lambda rank, turn: q.brought(rank, lengths[rank], turn)  # noqa: E731
    return brought, lambda turn: np.concatenate([brought(rank, turn) for rank in range(q.size)])


def gather(q):
    _, places, count = _blocks(q)
    send, recv = q.room(q.n), q.room(count)
    brought, together = _gathered(q)
    mine = lambda turn: brought(q.rank, turn)  # noqa: E731
    if q.rank != q.root:
        return Exchange([send, None], [(send, mine)], root=q.root)
    if q.in_place:
        return Exchange([MPI.IN_PLACE, recv], [(recv[places[q.rank]], mine)], [(recv, together)], root=q.root)
    return Exchange([send, recv], [(send, mine)], [(recv, together)], root=q.root)


def allgather(q):
    _, places, count = _blocks(q)
    send, recv = q.room(q.n), q.room(count)
    brought, together = _gathered(q)
    mine = lambda turn: brought(q.rank, turn)  # noqa: E731
    if q.in_place:
        return Exchange([MPI.IN_PLACE, recv], [(recv[places[q.rank]], mine)], [(recv, together)])
    return Exchange([send, recv], [(send, mine)], [(recv, together)])


def _reduce_scatter(q, lengths, *counts):
    lengths, places, count = _blocks(q, lengths)
    block = lambda turn: q.total(count, turn)[places[q.rank]]  # noqa: E731
    brought = lambda turn: q.brought(q.rank, count, turn)  # noqa: E731
    if q.in_place:
        recv = q.room(count)
        length = lengths[q.rank]
        inputs = [(recv, brought), (recv[length:], lambda turn: brought(turn)[length:])]
        return Exchange([MPI.IN_PLACE, recv, *counts], inputs, [(recv[:length], block)], op=q.op)
    send, recv = q.room(count), q.room(lengths[q.rank])
    return Exchange([send, recv, *counts], [(send, brought)], [(recv, block)], op=q.op)


def reduce_scatter_block(q):
    return _reduce_scatter(q, None)


def reduce_scatter(q):
    lengths = uneven(q.size, q.n)
    return _reduce_scatter(q, lengths, lengths)


def _apart(q):
    """Uneven blocks that lie in reverse order with a gap after each: (lengths, displacements, places, elements)."""
    lengths = uneven(q.size, q.n)
    ends = list(accumulate(length + 1 for length in reversed(lengths)))
    displs = [end - length - 1 for end, length in zip(ends, reversed(lengths))][::-1]
    return lengths, displs, [slice(d, d + k) for d, k in zip(displs, lengths)], ends[-1]


def _laid_out(q, turn, blocks, places, count):
    """The blocks at their places, poison between."""
    whole = q.room(count)
    poison(whole)
    for block, place in zip(blocks, places):
        whole[place] = block
    return whole


def scatterv(q):
    lengths, displs, places, count = _apart(q)
    send, recv = q.room(count), q.room(lengths[q.rank])
    block = lambda turn: q.brought(q.root, count, turn)[places[q.rank]]  # noqa: E731
    if q.rank != q.root:
        return Exchange([None, recv], (), [(recv, block)], root=q.root)
    sent = [(send, lambda turn: q.brought(q.root, count, turn))]
    if q.in_place:
        return Exchange([[send, (lengths, displs)], MPI.IN_PLACE], sent, sent, root=q.root)
    return Exchange([[send, (lengths, displs)], recv], sent, [(recv, block)], root=q.root)


def _gathered_apart(q, rooted):
    lengths, displs, places, count = _apart(q)
    send, recv = q.room(lengths[q.rank]), q.room(count)
    brought = lambda rank, turn: q.brought(rank, lengths[rank], turn)  # noqa: E731
    mine = lambda turn: brought(q.rank, turn)  # noqa: E731
    together = lambda turn: _laid_out(q, turn, [brought(r, turn) for r in range(q.size)], places, count)  # noqa: E731
    keywords = {"root": q.root} if rooted else {}
    if rooted and q.rank != q.root:
        return Exchange([send, None], [(send, mine)], **keywords)
    spec = [recv, (lengths, displs)]
    if q.in_place:
        return Exchange([MPI.IN_PLACE, spec], [(recv[places[q.rank]], mine)], [(recv, together)], **keywords)
    return Exchange([send, spec], [(send, mine)], [(recv, together)], **keywords)


def gatherv(q):
    return _gathered_apart(q, rooted=True)


def allgatherv(q):
    return _gathered_apart(q, rooted=False)


def alltoall(q):
    _, places, count = _blocks(q)
    send, recv = q.room(count), q.room(count)
    sent = lambda turn: q.brought(q.rank, count, turn)  # noqa: E731
    got = lambda turn: np.concatenate([q.brought(r, count, turn)[places[q.rank]] for r in range(q.size)])  # noqa: E731
    if q.in_place:
        return Exchange([MPI.IN_PLACE, recv], [(recv, sent)], [(recv, got)])
    return Exchange([send, recv], [(send, sent)], [(recv, got)])


def alltoallv(q):
    """From rank s to rank d go (s + d) % 3 * n / 2 elements: as many back, so that it can be done in place."""
    lengths = [(q.rank + peer) % 3 * q.n // 2 for peer in range(q.size)]
    displs = [sum(lengths[peer + 1 :]) + q.size - 1 - peer for peer in range(q.size)]
    places = [slice(d, d + k) for d, k in zip(displs, lengths)]
    count = sum(lengths) + q.size
    send, recv = q.room(count), q.room(count)

    def block(source, target, turn):
        return q.brought(source * 3 + target, (source + target) % 3 * q.n // 2, turn)

    out = lambda turn: _laid_out(q, turn, [block(q.rank, peer, turn) for peer in range(q.size)], places, count)  # noqa: E731
    got = lambda turn: _laid_out(q, turn, [block(peer, q.rank, turn) for peer in range(q.size)], places, count)  # noqa: E731
    if q.in_place:
        return Exchange([MPI.IN_PLACE, [recv, (lengths, displs)]], [(recv, out)], [(recv, got)])
    return Exchange([[send, (lengths, displs)], [recv, (lengths, displs)]], [(send, out)], [(recv, got)])


def _scanned(q, upto):
    exchange = allreduce(q)
    mine = (lambda turn: q.brought(q.rank, q.n, turn)) if q.in_place else (lambda turn: _untouched(q))
    exchange.outputs = [(exchange.args[1], (lambda turn: q.total(q.n, turn, upto)) if upto else mine)]
    return exchange


def _untouched(q):
    room = q.room(q.n)
    poison(room)
    return room


def scan(q):
    return _scanned(q, q.rank + 1)


def exscan(q):
    return _scanned(q, q.rank)


class Line(NamedTuple):
    """A method of the communicator: the name by which algorithms are asked for, and what it needs."""

    method: str
    collective: str
    make: object
    in_place: bool = True
    reduces: bool = False
    rooted: bool = False


TABLE = {
    line.method: line
    for line in (
        Line("Barrier", "barrier", barrier, in_place=False),
        Line("Bcast", "broadcast", bcast, in_place=False, rooted=True),
        Line("Reduce", "reduce", reduce, reduces=True, rooted=True),
        Line("Allreduce", "allreduce", allreduce, reduces=True),
        Line("Scatter", "scatter", scatter, rooted=True),
        Line("Gather", "gather", gather, rooted=True),
        Line("Allgather", "allgather", allgather),
        Line("Reduce_scatter_block", "reduce_scatter", reduce_scatter_block, reduces=True),
        Line("Reduce_scatter", "reduce_scatter", reduce_scatter, reduces=True),
        Line("Scatterv", "scatterv", scatterv, rooted=True),
        Line("Gatherv", "gatherv", gatherv, rooted=True),
        Line("Allgatherv", "allgatherv", allgatherv),
        Line("Alltoall", "alltoall", alltoall),
        Line("Alltoallv", "alltoallv", alltoallv),
        Line("Scan", "scan", scan, reduces=True),
        Line("Exscan", "exscan", exscan, reduces=True),
    )
}


def ours(collective):
    """Names of Chorus's own algorithms for a collective."""
    return [name for name in collectives.algorithms(collective) if name != "native"]


ENTRIES = [(line.method, name) for line in TABLE.values() for name in ours(line.collective)]
"""Every method with every algorithm of ours that it may be asked to use."""

BY_TURNS = [
    entry if entry == group[number % len(group)] else pytest.param(*entry, marks=pytest.mark.full)
    for number, group in enumerate([[one for one in ENTRIES if one[0] == line.method] for line in TABLE.values()])
    for entry in group
]
"""Every method with one algorithm, another one from method to method, in the default tier.

For tests of transports and engines: these run rows, and `tests/unit/collectives` runs those of every algorithm.
"""

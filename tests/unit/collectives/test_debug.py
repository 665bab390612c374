"""Records of calls: what must be equal on all ranks, how it travels, and how a difference is told."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.errors import InvalidArgument
from collectives.runtime.arguments import call as calls
from collectives.runtime.arguments.call import Call
from collectives.runtime.planning import desync_check
from collectives.runtime.planning.desync_check import RECORD
from collectives.runtime.record import source_line
from collectives.selection.select import AlgorithmChoice

RING = AlgorithmChoice("ring")


def record(call, rank=0, form="blocking", choice=RING):
    return desync_check.record(form, call, choice, rank)


def both(one, other):
    """The records of two ranks as they arrive, compared."""
    arrived = [json.loads(desync_check._encode(facts).tobytes().rstrip(b"\0")) for facts in (one, other)]
    desync_check._compare(arrived)


def allreduce(count=4, dtype="f8", op=MPI.SUM, rank=0):
    return calls.allreduce(np.zeros(count, dtype), np.zeros(count, dtype), op, rank, 2)


def reduce(root=0, rank=0):
    return calls.reduce(np.zeros(4), np.zeros(4), MPI.SUM, root, rank, 2)


def broadcast(nbytes=8, root=0, rank=0):
    return calls.broadcast(np.zeros(nbytes, "u1"), root, rank, 2)


def allgatherv(counts, rank=0):
    room = np.zeros(sum(counts), "u1")
    return calls.allgather(np.zeros(counts[rank], "u1"), [room, list(counts)], rank, 2, v_form=True)


def reduce_scatter(counts, rank=0):
    return calls.reduce_scatter(np.zeros(sum(counts)), np.zeros(counts[rank]), list(counts), MPI.SUM, rank, 2)


def scatterv(counts, rank, mine=None):
    send = [np.zeros(sum(counts), "u1"), list(counts)] if rank == 0 else None
    return calls.scatter(send, np.zeros(counts[rank] if mine is None else mine, "u1"), 0, rank, 2, v_form=True)


mine_op = MPI.Op.Create(lambda a, b, t: None, commute=False)
other_op = MPI.Op.Create(lambda a, b, t: None, commute=True)

DIFFERENCES = {
    "collective": (record(allreduce()), record(calls.barrier(), 1), "collective: allreduce / barrier"),
    "form": (record(allreduce()), record(allreduce(rank=1), 1, "persistent"), "form: blocking / persistent"),
    "root": (record(reduce()), record(reduce(1, 1), 1), "root: 0 / 1"),
    "root of a broadcast": (record(broadcast(root=1)), record(broadcast(root=0, rank=1), 1), "root: 1 / 0"),
    "count": (record(allreduce(4)), record(allreduce(5, rank=1), 1), "bytes: 32 / 40"),
    "dtype": (record(allreduce(4)), record(allreduce(4, "i8", rank=1), 1), "dtype: float64 / int64"),
    "op": (record(allreduce()), record(allreduce(op=MPI.MAX, rank=1), 1), "op: SUM / MAX"),
    "user op": (
        record(allreduce(op=mine_op)), record(allreduce(op=other_op, rank=1), 1),
        "op: user-defined, not commutative / user-defined, commutative",
    ),
    "algorithm": (
        record(allreduce()), record(allreduce(rank=1), 1, choice=AlgorithmChoice("mst")), "algorithm: ring / mst",
    ),
    "segments": (
        record(allreduce()), record(allreduce(rank=1), 1, choice=AlgorithmChoice("ring", 2)), "segments: 1 / 2",
    ),
    "block of a scatterv": (
        record(scatterv((3, 4), 0)), record(scatterv((3, 4), 1, mine=5), 1), "bytes for rank 1: 4 / 5",
    ),
    "blocks of an allgatherv": (
        record(allgatherv((3, 4))), record(allgatherv((4, 3), 1), 1), "lengths: [3, 4] / [4, 3]",
    ),
    "blocks of a reduce_scatter": (
        record(reduce_scatter((3, 4))), record(reduce_scatter((4, 3), 1), 1), "lengths: [3, 4] / [4, 3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_told_with_both_calls_and_lines(what):
    one, other, told = DIFFERENCES[what]
    with pytest.raises(InvalidArgument) as caught:
        both(one, other)
    message = str(caught.value)
    assert message.startswith("ranks make different calls: rank 0 calls ")
    assert ", rank 1 calls " in message and f"They differ in {told}" in message
    assert message.count("test_debug.py:") == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: allreduce(rank=rank),
        lambda rank: allreduce(op=mine_op, rank=rank),
        lambda rank: reduce(1, rank),
        lambda rank: broadcast(root=1, rank=rank),
        lambda rank: scatterv((3, 4), rank),
        lambda rank: allgatherv((3, 0), rank),
        lambda rank: reduce_scatter((0, 4), rank),
        lambda rank: calls.barrier(),
    ],
)
def test_equal_calls_agree(make):
    both(record(make(0), 0), record(make(1), 1))


def test_ranks_may_describe_their_data_differently():
    triple = MPI.INT.Create_contiguous(3).Commit()
    one = calls.broadcast([np.zeros(2, "i4"), 2, MPI.INT], 0, 0, 2)
    other = calls.broadcast([np.zeros(8, "u1"), MPI.BYTE], 0, 1, 2)
    both(record(one), record(other, 1))
    one = calls.allreduce(np.zeros(3, "i4"), np.zeros(3, "i4"), MPI.SUM, 0, 2)
    other = calls.allreduce([np.zeros(3, "i4"), MPI.INT], [np.zeros(3, "i4"), 3, MPI.INT], MPI.SUM, 1, 2)
    both(record(one), record(other, 1))
    triple.Free()


@pytest.mark.parametrize("name", ["x" * 5000, "é" * 3000, "目" * 600], ids=["long", "accents", "wide"])
def test_records_fit_whatever_the_file_is_called(name):
    facts = record(allreduce()) | {"where": f"{name}.py:12 in f", "lengths": [10**9] * 500}
    encoded = desync_check._encode(facts)
    assert encoded.nbytes == RECORD
    back = json.loads(encoded.tobytes().rstrip(b"\0"))
    assert back["facts"] == facts["facts"]
    assert back["where"].endswith(".py:12 in f")


@pytest.mark.parametrize("letter", "xä目🎼")
def test_records_fit_whatever_the_error_says(letter):
    facts = {"facts": {"collective": "bcast"}, "where": letter * 900 + ".py:12 in f", "lengths": [], "rank": 0}
    encoded = desync_check._encode(facts | {"refused": [12, f"InvalidType: root: found {letter * 900}"]})
    back = json.loads(encoded.tobytes().rstrip(b"\0"))
    assert back["where"].endswith(f"{letter}.py:12 in f")
    error_class, text = back["refused"]
    assert error_class == 12
    assert text.startswith(f"InvalidType: root: found {letter}")


def test_many_ranks_with_blocks_of_their_own_lengths_fit_too():
    counts = tuple(range(2000))
    call = Call("allgather", counts, calls.BYTE)
    other = Call("allgather", counts[::-1], calls.BYTE)
    both(record(call), record(call, 1))
    with pytest.raises(InvalidArgument, match="They differ in lengths"):
        both(record(call), record(other, 1))


def test_the_caller_is_outside_of_the_package():
    where = desync_check.caller()
    assert str(Path(collectives.__file__).parent) not in where
    assert record(calls.barrier())["where"].split(":")[0].endswith("test_debug.py")


def test_a_frame_between_lines_has_line_0():
    frame = SimpleNamespace(f_code=test_a_frame_between_lines_has_line_0.__code__, f_lineno=None, f_back=None)
    assert source_line.caller_with_text(frame) == f"{__file__}:0 in test_a_frame_between_lines_has_line_0"

"""Recognise schedules of at most one send, one receive and one copy, and compile them to one function."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.runtime.call import Call
from collectives.runtime.program import Program, Task
from collectives.schedule.chunks import MemorySpan, joined
from collectives.schedule.steps import Recv, RecvReduce, Schedule, Send, Side, numbers
from collectives.transport import compiled_exchange
from collectives.transport.fused_exchange import CompiledExchange, compile_swap
from collectives.transport.mailbox import MailboxEdge
from collectives.transport.wire import Iovec


class SingleExchange(NamedTuple):
    """Call in which this rank exchanges at most one message each way with one peer; runs are (first element, count).

    Attributes
    ----------
    out, into
        Run of the input that is sent, and of the result that is received; a count of 0 is none.
    mine, side
        First element of the own operand, and the side of it on which the received one stands; None without reduction.
    copy
        Source, destination and count of the own elements that are copied.
    """

    peer: int
    out: tuple[int, int]
    into: tuple[int, int]
    mine: int | None
    side: Side
    copy: tuple[int, int, int]


def single_messages(schedule: Schedule) -> list[Send | Recv | RecvReduce] | None:
    """Messages of a schedule of at most one send and one receive, in one round, without local steps; else None."""
    rounds = [steps for steps in schedule if steps]
    steps = list(chain.from_iterable(rounds))
    messages = [step for step in steps if isinstance(step, (Send, Recv, RecvReduce))]
    sends = sum(isinstance(step, Send) for step in messages)
    if len(rounds) > 1 or len(messages) < len(steps) or sends > 1 or len(messages) - sends > 1:
        return None
    return messages


def as_single_exchange(task: Task) -> SingleExchange | None:
    """`SingleExchange` with the messages and the copy of a task, each contiguous; None if it does anything else."""
    messages = single_messages(task.schedule)
    if not messages or len({step.peer for step in messages}) != 1 or not all(step.chunks for step in messages):
        return None
    sends = [step for step in messages if isinstance(step, Send)]
    receives = [step for step in messages if not isinstance(step, Send)]
    written = {chunk for step in receives for chunk in numbers(step.chunks)}
    unchanged = [chunk for chunk in sorted(task.target) if chunk in task.source and chunk not in written]
    copied = [chunk for chunk in unchanged if task.source[chunk] != task.target[chunk]]
    summed = [step for step in receives if isinstance(step, RecvReduce)]
    out, into = _run(task.source, _chunks(sends)), _run(task.target, _chunks(receives))
    mine, origin, goal = _run(task.source, _chunks(summed)), _run(task.source, copied), _run(task.target, copied)
    if out is None or into is None or mine is None or origin is None or goal is None:
        return None
    first = mine[0] if summed else None
    side: Side = summed[0].side if summed else "right"
    return SingleExchange(messages[0].peer, out, into, first, side, (origin[0], goal[0], origin[1]))


def _chunks(steps: Iterable[Send | Recv | RecvReduce]) -> list[int]:
    return [chunk for step in steps for chunk in numbers(step.chunks)]


def _run(places: Mapping[int, MemorySpan], chunks: Iterable[int]) -> tuple[int, int] | None:
    """Contiguous run (first element, count) of memory with these chunks; None if it has gaps or a chunk is missing."""
    found = [places.get(chunk) for chunk in chunks]
    whole = joined(place for place in found if place is not None)
    if None in found or len(whole) > 1:
        return None
    return (whole[0].start, whole[0].stop - whole[0].start) if whole else (0, 0)


def compile_exchange(
    single: SingleExchange, call: Call, s: np.ndarray, r: np.ndarray, program: Program, edge: MailboxEdge | None
) -> CompiledExchange | None:
    """Compile a single exchange to one function for arrays of the size and dtype of `s` and `r`; None if impossible."""
    dtype = s.dtype
    units, rest = divmod(dtype.itemsize, call.unit.itemsize)
    counted = (*single.out, *single.into, single.mine or 0, *single.copy)
    reduces = single.mine is not None
    operation: Any = call.combine.ufunc if reduces and call.combine is not None else None
    if edge is None or dtype not in compiled_exchange.DTYPES or rest or any(number % units for number in counted):
        return None
    if operation not in compiled_exchange.OPERATIONS or (reduces and (operation is None or call.unit != dtype)):
        return None
    out, count, into, length, mine, origin, home, copied = (number // units for number in counted)
    if max(count, length) * dtype.itemsize > edge.cell:
        return None  # sent in segments
    numbers = {
        compiled_exchange.SEND_BYTES: s.nbytes,
        compiled_exchange.RECV_BYTES: r.nbytes,
        compiled_exchange.OUT: out,
        compiled_exchange.OUT_COUNT: count,
        compiled_exchange.INTO: into,
        compiled_exchange.INTO_COUNT: length,
        compiled_exchange.MINE: mine,
        compiled_exchange.OPERATION: compiled_exchange.OPERATIONS.index(operation),
        compiled_exchange.MINE_FIRST: int(single.side == "right"),
        compiled_exchange.FROM: origin,
        compiled_exchange.TO: home,
        compiled_exchange.COPIED: copied,
        compiled_exchange.ONE: int(MPI.Get_address(s) == MPI.Get_address(r)),
    }
    spare = np.empty(length, dtype)
    message = program.wire.receive(single.peer, [Iovec(MPI.Get_address(spare), spare.nbytes)])

    def exchange(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        message.start()
        message.wait()
        result = recvbuf[into : into + length]
        if operation is None:
            result[...] = spare
        else:
            own = sendbuf[mine : mine + length]
            left, right = (own, spare) if single.side == "right" else (spare, own)
            operation(left, right, out=result)

    return compile_swap(edge, dtype, numbers, exchange, getattr(program.wire, "mark", 0))

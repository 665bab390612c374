"""Exchange of block lengths before collectives in which ranks forward blocks of unknown length (v-forms)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms.catalog import build, find
from collectives.buffers.device_memory import DeviceMemory
from collectives.buffers.staging import with_own_datatype
from collectives.engine.instructions import TARGET
from collectives.runtime.arguments.call import Call
from collectives.runtime.binding.binder import bind
from collectives.runtime.execution.local_steps import call_rounds
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.program_memory import ElementArray, Task
from collectives.schedule.chunks import MemorySpan
from collectives.schedule.topology import Nodes
from collectives.selection.timing_table import NATIVE, AlgorithmChoice
from collectives.transport.wire import Wire
from collectives.types import Wait


class CountExchange(NamedTuple):
    """Program that sends the length of every block along the block's route, for ranks that forward blocks.

    `known`: units in every block that this rank sends, forwards or receives.
    """

    known: np.ndarray
    program: Program

    def load(self, call: Call) -> None:
        for block in call.send_blocks:
            self.known[block] = call.lengths[block]

    def with_counts(self, call: Call) -> Call:
        """Copy of the call with the lengths of all blocks it handles: exchanged, or its own for those it receives."""
        lengths = self.known.tolist()
        for block in call.recv_blocks:
            lengths[block] = call.lengths[block]
        return call._replace(lengths=tuple(lengths), local_counts=False)


def needs_counts(call: Call, choice: AlgorithmChoice) -> bool:
    """True if the algorithm makes ranks forward blocks whose lengths they do not know."""
    if call.neighbors is not None:
        return False
    return call.local_counts and choice.algorithm != NATIVE and not find(call.collective, choice.algorithm).private


def bind_count_exchange(
    call: Call, choice: AlgorithmChoice, rank: int, size: int, wire: Wire, nodes: Nodes | None
) -> CountExchange:
    """Bind a program that sends each block's length along the route of the block."""
    count = len(call.lengths)
    schedule = build(call.collective, choice.algorithm, rank, size, call.root, 1, nodes)
    places = {block: MemorySpan(TARGET, block, block + 1) for block in range(count)}
    sent = {block: places[block] for block in call.send_blocks}
    known = np.zeros(count, np.int64)
    memory = ElementArray(known, MPI.Get_address(known))
    program = bind(Task(schedule, (1,) * count, sent, places, known.itemsize), memory, memory, wire)
    return CountExchange(known, program)


def bind_after_exchange(
    call: Call, exchange: CountExchange, bind_call: Callable[[Call], Program], stream: DeviceMemory | None
) -> Program:
    """Program that exchanges block lengths at its first start, then binds and runs the call. Later it only runs it."""
    source = with_own_datatype(call.source)  # the user may free the datatypes before binding
    target = source if call.target is call.source else with_own_datatype(call.target)
    call = call._replace(source=source, target=target)
    bound: list[Program] = []

    def start_exchange() -> None:
        if not bound:
            exchange.load(call)
            exchange.program.start()

    def finish_exchange() -> None:
        if not bound:
            exchange.program.finish()

    def start() -> None:
        if not bound:
            bound.append(bind_call(exchange.with_counts(call)))
        bound[0].start()

    waits_for = exchange.program.waits_for
    exchanged = Wait(
        finish_exchange, lambda: bool(bound) or exchange.program.advance(), lambda: f"block lengths, {waits_for()}"
    )
    finished = Wait(lambda: bound[0].finish(), lambda: bound[0].advance(), lambda: f"messages, {bound[0].waits_for()}")
    steps = start_exchange, exchanged, start, finished
    return Program(call_rounds(steps), exchange.program.wire, exchange.known.nbytes, exchange.program.memories, stream)

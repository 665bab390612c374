"""Choice of a call's algorithm: as named by the user, or by the selector for ``algorithm="auto"``."""

from operator import index
from typing import Any

from mpi4py import MPI

from collectives.errors import InvalidArgument, InvalidType
from collectives.runtime.arguments.call import Call
from collectives.runtime.arguments.ops import is_commutative
from collectives.runtime.builders import native
from collectives.runtime.builders.communicator_transports import Transports
from collectives.runtime.planning.agreement import UNKNOWN, MemoryVisibility
from collectives.schedule.semantics import MEANINGS
from collectives.selection import select
from collectives.selection.cost_model import measured_costs
from collectives.selection.expected_time import MeasuredSpeed, TimedCall, expected_seconds
from collectives.selection.select import CallTraits, Selection, Selector, catalog_name, has_local_counts
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, Form, TimingTable

NEIGHBORS = "neighbors"
"""The algorithm of collectives among the neighbours in a topology."""


class AlgorithmChooser:
    """Chooses algorithm and segments of each call on a communicator, by a table of times or the speed of messages.

    `threads`: all ranks may call MPI from several threads. Only then, and by a table, ``"auto"`` selects MPI's own
    collectives.
    """

    def __init__(self, transports: Transports, table: TimingTable | None, threads: bool) -> None:
        node, nodes = transports.node, transports.nodes
        cores = node.cores if node is not None and node.crowded and node.on_one_machine else None
        costs = measured_costs(transports.message_speed, transports.placement.network)
        shares_link = transports.pinning.shares_gpu
        self._speed = MeasuredSpeed(transports.message_speed, transports.placement.network)
        self.selector = Selector(transports.comm.Get_size(), nodes, table, cores, costs, shares_link)
        self._native = table is not None and not transports.aware and threads

    def choose(
        self, call: Call, algorithm: Any, segments: Any, form: Form, memory: MemoryVisibility = UNKNOWN
    ) -> AlgorithmChoice:
        """Validate `algorithm` and `segments` and return the choice: without communication, but equal on all ranks."""
        if call.neighbors is not None:
            if algorithm not in ("auto", NEIGHBORS):
                raise InvalidArgument(MPI.ERR_ARG, f"algorithm: expected 'auto' or {NEIGHBORS!r}, found {algorithm!r}")
            return AlgorithmChoice(NEIGHBORS)
        if algorithm == "auto":
            # the MPI's own collectives are not cut in segments
            may_native = self._native and segments is None and native.refusal(call, form) is None
            traits = CallTraits(
                call.collective, call.nbytes, call.ordered, call.local_counts, may_native, form, call.v_form, *memory
            )
            choice = self.selector.decide(traits).choice
        elif not isinstance(algorithm, str):
            raise InvalidType(MPI.ERR_ARG, f"algorithm: expected a name, found {algorithm!r}")
        elif algorithm == NATIVE:
            native.check(call, form)
            choice = AlgorithmChoice(NATIVE)
        else:
            select.check(call.collective, algorithm, call.ordered, self.selector.nodes)
            choice = AlgorithmChoice(algorithm)
        if segments is None:
            return choice
        if algorithm == NATIVE:
            raise InvalidArgument(MPI.ERR_ARG, "segments: the MPI's own collectives are not cut in any")
        try:
            number = index(segments)
        except TypeError:
            raise InvalidType(MPI.ERR_ARG, f"segments: expected an integer, found {segments!r}") from None
        if number < 1:
            raise InvalidArgument(MPI.ERR_ARG, f"segments: expected at least 1, found {number}")
        return choice._replace(segments=number) if call.collective != "barrier" else choice

    def select(self, collective: str, nbytes: int, op: MPI.Op, form: Form, shared: bool, in_place: bool) -> Selection:
        """Choice of ``"auto"`` for the size class of `nbytes`: algorithm, segments, predicted seconds, their source."""
        base = catalog_name(collective)
        ordered, v_form = MEANINGS[base].reduces and not is_commutative(op), base != collective
        may_native = self._native and native.unsound(native.METHODS[base][v_form], form) is None
        local = has_local_counts(collective)
        traits = CallTraits(base, nbytes, ordered, local, may_native, form, v_form, shared, in_place)
        selection = self.selector.decide(traits)
        unknown = selection.source != "model" or shared or local or self.selector.shares_link
        if unknown or self.selector.size == 1:
            return selection
        timed = TimedCall(base, selection.algorithm, selection.segments, self.selector.size, nbytes, in_place)
        seconds = expected_seconds(timed, self.selector.nodes, self.selector.cores, self._speed)
        return selection if seconds is None else selection._replace(seconds=seconds)

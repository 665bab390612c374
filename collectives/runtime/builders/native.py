"""Algorithm ``"native"``: the MPI's own collectives, called through mpi4py on dense arrays, in all three forms.

They use the private communicator of Chorus. Data that is only moved is passed as bytes, since ranks may describe it
differently.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import CallState
from collectives.errors import InvalidArgument
from collectives.runtime.arguments.call import Blocks, Call
from collectives.runtime.binding.call_binding import overlaps
from collectives.runtime.execution.local_steps import Local, call_rounds
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.program_memory import ElementArray
from collectives.schedule.semantics import MEANINGS
from collectives.selection.timing_table import Form
from collectives.transport.waits import has_deadline
from collectives.transport.wire import NoMessages
from collectives.types import Wait

METHODS = {
    "barrier": ("Barrier", "Barrier"),
    "broadcast": ("Bcast", "Bcast"),
    "reduce": ("Reduce", "Reduce"),
    "scatter": ("Scatter", "Scatterv"),
    "gather": ("Gather", "Gatherv"),
    "allgather": ("Allgather", "Allgatherv"),
    "reduce_scatter": ("Reduce_scatter_block", "Reduce_scatter"),
    "allreduce": ("Allreduce", "Allreduce"),
    "alltoall": ("Alltoall", "Alltoallv"),
    "scan": ("Scan", "Scan"),
    "exscan": ("Exscan", "Exscan"),
}
"""mpi4py's method of each collective for blocks of equal length, and of any length."""

KNOWN_TO_MPI = "?bhilqBHILQfdgFDG"
"""NumPy's characters of the element types that every MPI has."""

KINDS = {
    getattr(MPI, name).handle: kinds
    for names, kinds in (("SUM PROD", "iufc"), ("MAX MIN", "iuf"), ("LAND LOR LXOR", "iub"), ("BAND BOR BXOR", "iu"))
    for name in names.split()
}
"""Kinds of NumPy elements on which MPI defines an operation. None for those that are missing here."""


AWAITED = "other ranks in the MPI's own collective"

UNSOUND: dict[tuple[str, str, str], str] = {
    ("Intel MPI", method, "persistent"): f"mixes up the data of a persistent {method}, or never completes it"
    for method in ("Scatter", "Gather", "Allgather")
}
"""Defects by vendor, method and form (found in Intel MPI 2021.18, with one int per rank)."""


def unsound(method: str, form: str) -> str | None:
    """Known bug of this method and form in the MPI library in use, as a phrase. None if there is none."""
    return UNSOUND.get((MPI.get_vendor()[0], method, form))


def refusal(call: Call, form: Form) -> str | None:
    """Known reason why MPI's own collective cannot run the call (bug, operation, dtype), or None. Same on all ranks."""
    wrong = unsound(METHODS[call.collective][call.v_form], form)
    if wrong is not None or call.operation is None:
        return wrong
    if call.unit.char not in KNOWN_TO_MPI or not call.unit.isnative:
        return f"has no operations on elements of {call.unit}"
    if call.operation.is_predefined and call.unit.kind not in KINDS.get(call.operation.handle, ""):
        return f"does not define this operation on elements of {call.unit}"
    return None


def check(call: Call, form: Form) -> None:
    reason = refusal(call, form)
    if reason is not None:
        raise InvalidArgument(MPI.ERR_OP, f"algorithm: 'native' for {call.collective}: this MPI {reason}")


# ------------------------------------------------------------------------------------------ arguments


def arguments(call: Call, source: np.ndarray, target: np.ndarray, rank: int, size: int) -> tuple[Any, ...]:
    """Positional arguments for mpi4py's method of the call. `source` and `target` are its dense arrays."""
    meaning, here = MEANINGS[call.collective], call.in_place and call.source is not None
    if call.collective == "barrier":
        return ()
    if call.collective == "broadcast":
        return [target, MPI.BYTE], call.root
    root = (call.root,) if meaning.rooted else ()
    if meaning.reduces:
        counts = (call.lengths,) if call.collective == "reduce_scatter" and call.v_form else ()
        if call.collective == "exscan" and rank == 0 and not here:
            target = np.empty_like(source)  # not read, but required
        received = None if call.target is None else target
        return MPI.IN_PLACE if here else source, received, *counts, call.operation, *root
    spread, gathered = call.collective in ("scatter", "alltoall"), call.collective != "scatter"
    sent, received = _side(source, call, call.send_blocks, spread), _side(target, call, call.recv_blocks, gathered)
    if call.collective == "scatter":
        return sent if rank == call.root else None, MPI.IN_PLACE if here else received, *root
    if call.collective == "gather" and rank != call.root:
        return sent, None, *root
    return MPI.IN_PLACE if here else sent, received, *root


def _side(array: np.ndarray, call: Call, blocks: Blocks, several: bool) -> Any:
    """Send or receive argument for mpi4py. With counts and offsets if a v-form has a block per rank (`several`)."""
    if not (several and call.v_form):
        return [array, MPI.BYTE]
    numbers = sorted(blocks)
    return [array, ([call.lengths[number] for number in numbers], [blocks[number] for number in numbers]), MPI.BYTE]


# ------------------------------------------------------------------------------------------ programs


def _on_arrays(method: Callable[..., None], call: Call, program: Program) -> Callable[[Any, Any], bool]:
    """Function (sendbuf, recvbuf) that runs the MPI's blocking collective on the arrays given, and returns True."""
    op, byte = call.operation, MPI.BYTE
    root = (call.root,) if MEANINGS[call.collective].rooted else ()

    def run(send: Any, recv: Any) -> bool:
        dense = send.flags.forc and recv.flags.forc and recv.flags.writeable
        if not dense or overlaps(send, recv) or has_deadline():  # a call that blocks in MPI cannot keep a time limit
            return False
        engine = program.engine
        engine.begin()
        if call.collective == "broadcast":
            method([recv, byte], *root)
        elif op is None:
            method([send, byte], [recv, byte], *root)
        else:
            method(send, recv, op, *root)
        engine.note_end(CallState.HAS_ENDED)
        return True

    return run


class _OwnCollective:
    """The MPI's own blocking collective. Its non-blocking form if waits have a time limit."""

    def __init__(self, comm: MPI.Intracomm, method: str, positional: tuple[Any, ...]) -> None:
        self._run = partial(getattr(comm, method), *positional)
        self._begin = partial(getattr(comm, f"I{method.lower()}"), *positional)
        self._begun: MPI.Request | None = None

    def __call__(self) -> bool:
        if self._begun is None:
            if not has_deadline():
                self._run()
                return True
            self._begun = self._begin()
        if not self._begun.Test():
            return False
        self._begun = None
        return True

    awaits = staticmethod(lambda: AWAITED)


class _OwnRequest(NoMessages):
    """Transport of a program of the MPI's own collective, which owns its persistent request."""

    request: MPI.Prequest | None = None

    def free(self) -> None:
        if self.request is not None:
            self.request.Free()


def program(
    comm: MPI.Intracomm,
    call: Call,
    form: Form,
    source: np.ndarray,
    target: np.ndarray,
    first: Sequence[Local] = (),
    last: Sequence[Local] = (),
) -> Program:
    """Program that calls mpi4py's method on these dense arrays. Raises if `form` is persistent and the MPI lacks it.

    `first` and `last` run before and after, such as staging.
    """
    method = METHODS[call.collective][call.v_form]
    positional = arguments(call, source, target, comm.Get_rank(), comm.Get_size())
    wire = _OwnRequest()
    middle: list[Local]
    if form == "blocking":
        middle = [_OwnCollective(comm, method, positional)]
    elif form == "persistent":
        request = wire.request = _persistent(comm, method, positional)
        middle = [request.Start, Wait(request.Wait, request.Test, lambda: AWAITED)]
    else:
        begin, begun = partial(getattr(comm, f"I{method.lower()}"), *positional), [MPI.REQUEST_NULL]
        ended = Wait(lambda: begun[0].Wait(), lambda: begun[0].Test(), lambda: AWAITED)
        middle = [lambda: begun.__setitem__(0, begin()), ended]
    memories = [ElementArray(array, MPI.Get_address(array)) for array in (source, target)]
    bound = Program(call_rounds([*first, *middle, *last]), wire, memories=memories)
    bound.waits_in_mpi = form == "blocking"
    if form == "blocking" and not first and not last and not call.v_form:  # the arrays are then all that differs
        bound.runs_native = _on_arrays(getattr(comm, method), call, bound)
    return bound


def _persistent(comm: MPI.Intracomm, method: str, positional: tuple[Any, ...]) -> MPI.Prequest:
    try:
        request: MPI.Prequest = getattr(comm, f"{method}_init")(*positional)
        return request
    except NotImplementedError:  # an MPI of a standard before 4.0
        message = f"algorithm: 'native' for a persistent {method}, which this MPI does not have"
        raise InvalidArgument(MPI.ERR_UNSUPPORTED_OPERATION, message) from None

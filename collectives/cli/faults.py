"""Faults that are injected into a program: at a call of one rank, by its number in the record."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from collectives.communicator import PREDEFINED, Communicator
from collectives.runtime.methods.collective_forms import DECLARATIONS, FORMS, method_name
from collectives.runtime.methods.object_methods import ObjectMethods
from collectives.runtime.record.source_line import caller_with_text, is_own
from collectives.runtime.record.writer import record

DELAY = 1.0
"""Seconds of a delay."""

MARK = "chorus: fault"
"""Beginning of the line that is printed with a fault."""


class InjectedFault(RuntimeError):
    """Error of a fault of the kind "raise"."""


def _raise(*_: Any) -> None:
    raise InjectedFault("an injected fault")


def _more(made: Callable[[], Any], comm: Any) -> Any:
    made()
    return made()


def _diverge(made: Callable[[], Any], comm: Any) -> Any:
    comm.Bcast(np.zeros(3), root=comm.Get_size() - 1)
    return made()


def _signal(number: int) -> Callable[[Callable[[], Any], Any], Any]:
    def send(made: Callable[[], Any], comm: Any) -> Any:
        os.kill(os.getpid(), number)
        return made()

    return send


def _delay(made: Callable[[], Any], comm: Any) -> Any:
    time.sleep(DELAY)
    return made()


KINDS: dict[str, Callable[[Callable[[], Any], Any], Any]] = {
    "stop": _signal(signal.SIGSTOP),
    "kill": _signal(signal.SIGKILL),
    "raise": _raise,
    "exit": lambda made, comm: sys.exit(3),
    "skip": lambda made, comm: None,
    "more": _more,
    "diverge": _diverge,
    "delay": _delay,
    "corrupt": lambda made, comm: made(),
}
"""Faults in place of a call, which ``made()`` makes on a communicator."""


class Fault(NamedTuple):
    """Fault of a kind of `KINDS` on a rank of MPI.COMM_WORLD, at a call by its number in the record, from 1."""

    kind: str
    rank: int
    call: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.rank}:{self.call}"


def fault(text: str) -> Fault:
    """Argument type: a fault as in ``stop@2:17``."""
    kind, _, place = text.partition("@")
    rank, _, call = place.partition(":")
    if kind not in KINDS or not (rank.isdecimal() and call.isdecimal() and int(call)):
        raise argparse.ArgumentTypeError(f"expected KIND@RANK:CALL of a kind {', '.join(KINDS)}, found {text!r}")
    return Fault(kind, int(rank), int(call))


def inject(planned: Fault) -> None:
    """Let the fault happen in this process, if it is of this rank."""
    if PREDEFINED["COMM_WORLD"].Get_rank() == planned.rank:
        left = [planned]
        objects = [name for name in vars(ObjectMethods) if name.islower() and not name.startswith("_")]
        for name in [*objects, *(method_name(each.name, form) for each, form in product(DECLARATIONS, FORMS))]:
            _watch(name, left)


def _watch(name: str, left: list[Fault]) -> None:
    method = getattr(Communicator, name)

    @wraps(method)
    def faulty(comm: Any, *arguments: Any, **keywords: Any) -> Any:
        found = record()
        if not left or found is None or found.last + 1 < left[0].call or is_own(sys._getframe(1)):
            return method(comm, *arguments, **keywords)
        planned = left.pop()
        made = planned._replace(call=found.last + 1)  # the planned number may be of a call within another
        print(f"{MARK} {made} in {name}, at {caller_with_text()}", file=sys.stderr, flush=True)
        if planned.kind == "corrupt":
            _flip(arguments)
        return KINDS[planned.kind](lambda: method(comm, *arguments, **keywords), comm)

    setattr(Communicator, name, faulty)


def _flip(arguments: Any) -> None:
    """Change a bit of the first array that can be written, in lists too."""
    for one in arguments:
        if isinstance(one, list | tuple):
            _flip(one)
        elif isinstance(one, np.ndarray) and one.flags.writeable and one.flags.c_contiguous and one.nbytes:
            one.view(np.uint8).reshape(-1)[-1] ^= 1 << 6
            return

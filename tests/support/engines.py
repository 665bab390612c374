"""The two engines of programs, side by side in one process."""

from contextlib import contextmanager
from functools import cache, partial
from unittest import mock

from mpi4py import MPI

from collectives.engine import extension, fence, mailbox_rows
from collectives.engine.instructions import DONE, REFUSED
from collectives.runtime.execution import program


def use_interpreter(monkeypatch):
    """Let the interpreter run all programs that are bound from now on, as without a C compiler at the installation."""
    monkeypatch.setattr(extension, "engine", None)


@cache
def window_fence():
    """Fence of processors that do not keep stores in order."""
    with mock.patch.object(fence, "is_ordered", return_value=False):
        return fence.memory_fence.__wrapped__()


def order_weakly(monkeypatch):
    """Let this process bind programs as without the compiled engine, on a processor that needs fences."""
    use_interpreter(monkeypatch)
    monkeypatch.setattr(mailbox_rows, "memory_fence", window_fence)
    monkeypatch.setattr(program, "is_ordered", lambda: False)


@contextmanager
def interpreter():
    """Let the interpreter run the programs that are bound in this block."""
    compiled, extension.engine = extension.engine, None
    try:
        yield
    finally:
        extension.engine = compiled


class InterpretedCalls:
    """The blocking calls of a communicator, whose programs are all run by the interpreter."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return partial(self._call, getattr(self._comm, name))

    @staticmethod
    def _call(method, *arguments, **keywords):
        with interpreter():
            return method(*arguments, **keywords)


def entries(comm):
    """Blocking calls that compiled code finds by their arguments and runs: pairs of a method's name and a program."""
    methods = comm._planner.cache.compiled_calls._methods.items() if extension.available() else ()
    return [(name, entry.program) for name, method in methods for entry in method.entries]


def find(comm, name, sendbuf, recvbuf, op=MPI.SUM, root=0, algorithm="auto", segments=None):
    """Run a call in compiled code alone; True if it was found, on all ranks alike."""
    number = comm._calls[name](sendbuf, recvbuf, op, root, algorithm, segments)
    if not isinstance(number, int) or number == REFUSED:
        return False
    if number != DONE:
        comm._run_cached(number, name, sendbuf, recvbuf, op, root, algorithm, segments)
    return True

# mypy: disable-error-code="override"
"""Overrides of mpi4py's blocking methods that also progress active non-blocking collectives.

MPI promises progress of all operations while a rank waits in one call. Chorus's collectives would not progress while
mpi4py's ``Recv`` or ``bcast`` blocks, and two ranks could deadlock. Without active requests each method is mpi4py's
own. While any request is active, and point-to-point ones also while `watchers` look whether a rank has left the call,

- a point-to-point method starts its non-blocking form and makes progress until that is complete;
- the progress thread is woken before `Sendrecv_replace`, and before a collective call, where the MPI is thread-safe.

Where it is not, and in mpi4py's reductions of objects, collective calls begin with a `Barrier` of Chorus, which
progresses the active requests: mpi4py's `allreduce` waits while it holds the interpreter's lock (GIL), so that no other
thread runs.
"""

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any, Self, TypeVar

from mpi4py import MPI

from collectives.runtime.execution.progress import active_requests, mpi_is_thread_safe, progress_thread, progress_until
from collectives.transport.waits import watchers

Result = TypeVar("Result")

_COMPLETED = ("Send", "Ssend", "Rsend", "send", "ssend", "Recv")

_REPLACING = ("Sendrecv_replace",)

_EXCHANGES = ("Sendrecv", "sendrecv")

_PROBES = ("Probe", "Mprobe", "probe", "mprobe")

_WITH_THREAD = (*("Cart_map", "Graph_map", "Create_intercomm", "Spawn", "Spawn_multiple", "Accept", "Connect"),)

_AFTER_BARRIER = ("reduce", "allreduce", "scan", "exscan")


class Inherited(MPI.Intracomm):
    """Intracomm whose inherited blocking methods also progress active requests. Arguments are mpi4py's."""

    _threads = True
    """All ranks may progress other operations in a thread while they wait inside MPI."""

    def __new__(cls, comm: MPI.Intracomm | None = None, *_: Any, **__: Any) -> Self:
        """Create mpi4py's object without further arguments of `__init__`, which it does not accept."""
        return MPI.Intracomm.__new__(cls, comm)

    def _accompany(self, call: Callable[[], Result], after_barrier: bool = False) -> Result:
        """Run a collective of mpi4py and return its result, with progress of active requests.

        The progress thread advances them meanwhile; before the call a barrier if `after_barrier`, or if MPI is not
        thread-safe.
        """
        if after_barrier or not self._threads:
            self.Barrier()
        elif active_requests:
            progress_thread.wake()
        return call()

    def barrier(self) -> None:
        """As `Barrier`."""
        self.Barrier()

    def recv(
        self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Any:
        """Receive an object as mpi4py does, with progress of active requests until a message is there."""
        if active_requests or watchers:
            progress_until(lambda: self.iprobe(source, tag))
        return super().recv(buf, source, tag, status)


def _wait(request: MPI.Request, status: MPI.Status | None = None) -> None:
    progress_until(lambda: request.Test(status))


def _start(self: Inherited, name: str, *arguments: Any, **keywords: Any) -> Any:
    """Call the non-blocking form of mpi4py's method `name` (``Isend`` for ``Send``) and return its result."""
    return getattr(self, ("I" if name[0].isupper() else "i") + name.lower())(*arguments, **keywords)


def _bound(self: Inherited, name: str, *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """Arguments of a call of mpi4py's method `name`, by parameter name, with defaults filled in."""
    bound = signature(getattr(MPI.Intracomm, name)).bind(self, *arguments, **keywords)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])


def _complete(self: Inherited, name: str, *arguments: Any, **keywords: Any) -> None:
    bound = _bound(self, name, *arguments, **keywords)
    status = bound.pop("status", None)
    _wait(_start(self, name, **bound), status)


def _replace(self: Inherited, name: str, *arguments: Any, **keywords: Any) -> None:
    """Call the blocking method: MPICH's non-blocking form leaves the status of the received message empty."""
    if not mpi_is_thread_safe():
        _complete(self, name, *arguments, **keywords)
    else:
        progress_thread.wake()
        getattr(MPI.Intracomm, name)(self, *arguments, **keywords)


def _exchange(self: Inherited, name: str, *arguments: Any, **keywords: Any) -> Any:
    sent, dest, sendtag, *received = _bound(self, name, *arguments, **keywords).values()
    request = _start(self, name.removesuffix("recv"), sent, dest, sendtag)
    result = getattr(self, "Recv" if name[0].isupper() else "recv")(*received)
    _wait(request)
    return result


def _probe(self: Inherited, name: str, *arguments: Any, **keywords: Any) -> Any:
    """Progress active requests until the probe `name` finds a message. Return its result."""
    found: Any = None

    def arrived() -> bool:
        nonlocal found
        found = _start(self, name, *arguments, **keywords)
        return bool(found)

    progress_until(arrived)
    return found


def _collective(self: Inherited, name: str, *arguments: Any, **keywords: Any) -> Any:
    call = partial(getattr(MPI.Intracomm, name), self, *arguments, **keywords)
    return self._accompany(call, name in _AFTER_BARRIER)


def _with_progress(name: str, active: Callable[..., Any]) -> Callable[..., Any]:
    """Method that calls `active` while requests are active or waits are watched, else mpi4py's method `name`.

    `_collective` is always called.
    """
    method = getattr(MPI.Intracomm, name)

    @wraps(method)
    def wrapper(self: Inherited, *arguments: Any, **keywords: Any) -> Any:
        if active_requests or watchers or active is _collective:  # the last: all ranks take part in a barrier
            return active(self, name, *arguments, **keywords)
        return method(self, *arguments, **keywords)

    return wrapper


for _names, _active in (
    *((_COMPLETED, _complete), (_REPLACING, _replace), (_EXCHANGES, _exchange), (_PROBES, _probe)),
    *((_WITH_THREAD, _collective), (_AFTER_BARRIER, _collective)),
):
    for _name in _names:
        setattr(Inherited, _name, _with_progress(_name, _active))

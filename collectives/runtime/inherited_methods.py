# mypy: disable-error-code="override"
"""mpi4py's own blocking collectives, such as those on objects, during which non-blocking collectives go on.

A rank that waits in ``bcast`` would not move what it has under way, and a rank that waits for that would never come to
its ``bcast``. There are two ways out:

- While anything is under way, a thread moves it for as long as the call lasts.
- All ranks first meet in a non-blocking barrier, in every such call: what each has under way moves until all are there,
  and none waits for anything else after that. So it is where the MPI is not for several threads, and in reductions of
  objects: mpi4py receives their messages with ``MPI_Mprobe``, in which MPICH lets no other thread in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

from mpi4py import MPI

from collectives.runtime.point_to_point import PointToPoint
from collectives.runtime.requests import active_requests, progress_until, with_progress_thread

Result = TypeVar("Result")

ACCOMPANIED = (
    *("barrier", "bcast", "gather", "scatter", "allgather", "alltoall"),
    *("Alltoallw", "Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent", "Cart_map"),
    *("Graph_map", "Create_intercomm", "Spawn", "Spawn_multiple", "Accept", "Connect"),
)

AFTER_BARRIER = ("reduce", "allreduce", "scan", "exscan")


class Inherited(PointToPoint):
    """An Intracomm whose inherited blocking collectives keep collectives moving. Arguments are mpi4py's."""

    _threads = True
    """Whether all ranks may move other operations while they wait inside MPI."""

    def _accompany(self, call: Callable[[], Result], after_barrier: bool = False) -> Result:
        """Make a call of MPI's that is collective over this communicator."""
        if after_barrier or not self._threads:
            progress_until(MPI.Intracomm.Ibarrier(self).Test)
        elif active_requests:
            return with_progress_thread(call)
        return call()


def _accompanying(name: str, after_barrier: bool) -> Callable[..., Any]:
    method = getattr(MPI.Intracomm, name)

    @wraps(method)
    def collective(self: Inherited, *arguments: Any, **keywords: Any) -> Any:
        return self._accompany(partial(method, self, *arguments, **keywords), after_barrier)

    return collective


for _name in (*ACCOMPANIED, *AFTER_BARRIER):
    setattr(Inherited, _name, _accompanying(_name, _name in AFTER_BARRIER))

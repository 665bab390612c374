# mypy: disable-error-code="override"
"""mpi4py's own blocking collectives, such as those on objects, with progress of non-blocking collectives.

A rank that waits in ``bcast`` would not progress its active requests, and a rank that waits for those would never reach
its ``bcast``. There are two solutions:

- While any request is active, a thread progresses it during the call.
- All ranks first complete a non-blocking barrier in every such call, which progresses the active requests. Used where
  the MPI is not thread-safe, and in reductions of objects: mpi4py receives their messages with ``MPI_Mprobe``, in
  which MPICH admits no other thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

from mpi4py import MPI

from collectives.runtime.point_to_point import PointToPoint
from collectives.runtime.progress import active_requests, progress_until, with_progress_thread

Result = TypeVar("Result")

WITH_THREAD = (
    *("barrier", "bcast", "gather", "scatter", "allgather", "alltoall"),
    *("Alltoallw", "Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent", "Cart_map"),
    *("Graph_map", "Create_intercomm", "Spawn", "Spawn_multiple", "Accept", "Connect"),
)

AFTER_BARRIER = ("reduce", "allreduce", "scan", "exscan")


class Inherited(PointToPoint):
    """An Intracomm whose inherited blocking collectives progress active requests. Arguments are mpi4py's."""

    _threads = True
    """All ranks may progress other operations in a thread while they wait inside MPI."""

    def _accompany(self, call: Callable[[], Result], after_barrier: bool = False) -> Result:
        """Run a blocking call of mpi4py that is collective over this communicator."""
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


for _name in (*WITH_THREAD, *AFTER_BARRIER):
    setattr(Inherited, _name, _accompanying(_name, _name in AFTER_BARRIER))

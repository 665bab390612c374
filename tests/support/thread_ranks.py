"""Ranks of one mesh axis as threads of one process."""

from typing import NamedTuple

from conformance.thread_communicator import ThreadCommunicator, run_threads


class ThreadAxis(NamedTuple):
    """Axis of a mesh, as `parallel.sharding.device_mesh.MeshAxis`."""

    name: str
    rank: int
    size: int
    comm: ThreadCommunicator | None


def run(size, function, name="tp"):
    """Results of ``function(axis)`` of every rank, each in a thread; the first error of any rank is raised."""
    return run_threads(size, lambda comm: function(ThreadAxis(name, comm.Get_rank(), size, comm)))

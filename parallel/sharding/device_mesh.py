"""Mesh over a communicator: this rank's coordinates, and a communicator along any subset of the axes.

>>> from mpi4py import MPI
>>> from collectives import Communicator
>>> with DeviceMesh(Communicator(MPI.COMM_SELF), Mesh.parse("dp=1,tp=1")) as mesh:
...     axis = mesh.axis("tp")
...     axis.name, axis.rank, axis.size
('tp', 0, 1)
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

from collectives import Communicator
from parallel.sharding.axes import AXES
from parallel.sharding.mesh import OF_EXPERTS, Mesh


class MeshAxis(NamedTuple):
    """Ranks along one axis of a mesh (or several): this rank's position, their number, and their communicator.

    Operators that exchange take one, or anything with these attributes. `name` of several axes is ``"dp,tp"``.
    """

    name: str
    rank: int
    size: int
    comm: Any


class MeshPlace:
    """Place of a rank on a mesh, without communicators, to divide a model that does not run.

    `coordinates` are the rank's positions by axis.
    """

    def __init__(self, mesh: Mesh, rank: int):
        self.mesh, self.rank = mesh, rank
        self.coordinates = mesh.coordinates(rank)

    def axis(self, *names: str) -> MeshAxis:
        """Ranks that differ from this one only on these axes, in ascending order. One rank for axes that it lacks."""
        key = tuple(name for name in (*self.mesh.sizes, *OF_EXPERTS) if name in names)
        groups = self.mesh.groups(key)
        number = next(number for number, group in enumerate(groups) if self.rank in group)
        group = groups[number]
        return MeshAxis(",".join(key or names), group.index(self.rank), len(group), self._comm(key, number))

    def on_node(self, *names: str) -> MeshAxis | None:
        """Ranks of an axis on this rank's node, in the same order. None if that are all. Collective as `axis`."""
        return None

    def _comm(self, key: tuple[str, ...], number: int) -> Any:
        """Communicator of this rank's group along axes. None without communicators."""


class DeviceMesh(MeshPlace):
    """Mesh over the ranks of a communicator. Construction is collective. The communicator remains the caller's.

    `axis` is collective the first time: its communicators are made once, and freed by `close`.

    Parameters
    ----------
    comm : Communicator
        Of all ranks.
    mesh : Mesh
        Of as many ranks as `comm`.
    known : collection of str
        Names that axes may have.

    Raises
    ------
    ValueError
        If the mesh has an unknown axis or another number of ranks. The message has meshes that would fit.
    """

    def __init__(self, comm: Communicator, mesh: Mesh, known: Collection[str] = AXES):
        mesh.expect(comm.Get_size(), known)
        super().__init__(mesh, comm.Get_rank())
        self.comm = comm
        self._comms: dict[tuple[str, ...], Communicator] = {}

    def on_node(self, *names: str) -> MeshAxis | None:
        axis, key = self.axis(*names), (*names, "of one node")
        if axis.comm.nodes is None:
            return None
        if key not in self._comms:
            self._comms[key] = axis.comm.Split(axis.comm.nodes[axis.rank], axis.rank)
        comm = self._comms[key]
        return MeshAxis(axis.name, comm.Get_rank(), comm.Get_size(), comm)

    def _comm(self, key: tuple[str, ...], number: int) -> Communicator:
        if key not in self._comms:
            self._comms[key] = self.comm.Split(number, self.rank)
        return self._comms[key]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for the log: on how many nodes the groups of each axis are (none if all ranks share one)."""
        return () if self.comm.nodes is None else (self.mesh.spread(self.comm.nodes),)

    def close(self) -> None:
        """Free the communicators. Collective, but waits for no rank."""
        with ExitStack() as freed:  # all of them, also after an error
            for comm in self._comms.values():
                freed.callback(comm.Free)
        self._comms = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

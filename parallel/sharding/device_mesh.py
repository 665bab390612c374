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
from parallel.sharding.mesh import AXES, EXPERT_REPLICAS, EXPERT_TENSOR, EXPERTS, Mesh


class MeshAxis(NamedTuple):
    """Ranks along one axis of a mesh (or several): this rank's position, their number, and their communicator.

    Operators that exchange take one, or anything with these attributes. `name` of several axes is ``"dp,tp"``.
    """

    name: str
    rank: int
    size: int
    comm: Any


class DeviceMesh:
    """Mesh over the ranks of a communicator. Construction is collective; the communicator remains the caller's.

    Parameters
    ----------
    comm : Communicator
    mesh : Mesh
        Of as many ranks as `comm`.
    known : collection of str
        Names that axes may have.

    Attributes
    ----------
    mesh : Mesh
    comm : Communicator
        Of all ranks.
    coordinates : dict of str to int
        This rank's position on every axis.

    Raises
    ------
    ValueError
        If the mesh has an unknown axis or another number of ranks; the message has meshes that would fit.
    """

    def __init__(self, comm: Communicator, mesh: Mesh, known: Collection[str] = (*AXES, EXPERTS, EXPERT_TENSOR)):
        mesh.expect(comm.Get_size(), known)
        self.mesh, self.comm = mesh, comm
        self.coordinates = mesh.coordinates(comm.Get_rank())
        self._axes: dict[tuple[str, ...], MeshAxis] = {}

    def axis(self, *names: str) -> MeshAxis:
        """Ranks that differ from this one only on these axes, in ascending order. Collective the first time.

        An axis that the mesh lacks has one rank; ``ep`` and ``edp`` are those of `Mesh.expert_groups`, alone.
        Communicators are made once, and freed by `close`.
        """
        folded = names[0] if names in ((EXPERTS,), (EXPERT_REPLICAS,)) else ""
        key = (folded,) if folded else tuple(name for name in self.mesh.sizes if name in names)
        if key not in self._axes:
            groups = self.mesh.expert_groups(folded) if folded else self.mesh.groups(key)
            color = next(number for number, group in enumerate(groups) if self.comm.Get_rank() in group)
            comm = self.comm.Split(color, self.comm.Get_rank())
            self._axes[key] = MeshAxis(",".join(key), comm.Get_rank(), comm.Get_size(), comm)
        return self._axes[key]._replace(name=",".join(key or names))

    def on_node(self, *names: str) -> MeshAxis | None:
        """Ranks of an axis on this rank's node, in the same order; None if that are all. Collective as `axis`."""
        axis, key = self.axis(*names), (*names, "of one node")
        if axis.comm.nodes is None:
            return None
        if key not in self._axes:
            comm = axis.comm.Split(axis.comm.nodes[axis.rank], axis.rank)
            self._axes[key] = MeshAxis(axis.name, comm.Get_rank(), comm.Get_size(), comm)
        return self._axes[key]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for the log: on how many nodes the groups of each axis are (none if all ranks share one)."""
        return () if self.comm.nodes is None else (self.mesh.spread(self.comm.nodes),)

    def close(self) -> None:
        """Free the communicators. Collective, but waits for no rank."""
        with ExitStack() as freed:  # all of them, also after an error
            for axis in self._axes.values():
                freed.callback(axis.comm.Free)
        self._axes = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

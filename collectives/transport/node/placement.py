"""NodePlacement of a communicator's ranks: their nodes, machine and cores, and the speed of messages between them.

It is found out, and measured, where ranks first make a communicator. Others that are made of it have a part of it, and
further ones of the same ranks find the memory of their nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mpi4py import MPI

from collectives.schedule.topology import Nodes, numbered
from collectives.transport.memory.copy_speed import MessageSpeed
from collectives.transport.memory.shared_node import SharedNode, open_nodes
from collectives.transport.mpi import network_speed
from collectives.transport.mpi.network_speed import NetworkSpeed
from collectives.transport.mpi.reduced import reduced
from collectives.transport.node.machine import machine_name, usable_cores
from collectives.transport.waits import cores_are_shared


class NodePlacement(NamedTuple):
    """Places of the ranks of a communicator.

    Attributes
    ----------
    rank, size : of this process, and of the communicator
    nodes : node of every rank. None if all are on one
    usable : cores of each rank of this machine (it may have several emulated nodes)
    shared : memory of this machine's ranks. None on all ranks if they share none
    places : rank in `shared` of each rank of this machine
    speed : of messages on the slowest node. Zeros if no node has two ranks, or memory is not shared
    network : speed of messages between nodes
    """

    rank: int
    size: int
    nodes: Nodes | None
    usable: Mapping[int, frozenset[int]]
    shared: SharedNode | None
    places: Mapping[int, int]
    speed: MessageSpeed
    network: NetworkSpeed

    @property
    def neighbours(self) -> dict[int, int]:
        """Places of the ranks of this node."""
        nodes = self.nodes or (0,) * self.size
        return {rank: place for rank, place in self.places.items() if nodes[rank] == nodes[self.rank]}

    @property
    def cores(self) -> int:
        """Number of cores that the ranks of this machine may use."""
        return len(frozenset[int]().union(*self.usable.values()))

    @property
    def crowded(self) -> bool:
        """True if these are fewer than the ranks."""
        return self.cores < len(self.usable)

    def part(self, ranks: Sequence[int]) -> NodePlacement:
        """NodePlacement of the communicator that has these ranks, in this order."""
        nodes = None if self.nodes is None else numbered(self.nodes[rank] for rank in ranks)
        usable = {new: self.usable[old] for new, old in enumerate(ranks) if old in self.usable}
        places = {new: self.places[old] for new, old in enumerate(ranks) if old in self.places}
        speed = self.speed if _has_neighbours(nodes, len(ranks)) else MessageSpeed()
        network = NetworkSpeed() if nodes is None else self.network
        return NodePlacement(ranks.index(self.rank), len(ranks), nodes, usable, self.shared, places, speed, network)


def _has_neighbours(nodes: Nodes | None, size: int) -> bool:
    """True if two ranks are on one node."""
    return size > len(set(nodes or (0,)))


class _Surroundings(NamedTuple):
    """Properties of a rank by which all others place it."""

    machine: str
    cores: frozenset[int]
    shares_cores: bool
    shares_memory: bool
    places: dict[bytes, int]
    """Rank in the nodes that this one has open, by name."""


def place_ranks(comm: MPI.Intracomm, shares: bool, given: Nodes | None) -> NodePlacement:
    """Find out the placement of the ranks of `comm`. Collective.

    Ranks of a machine share memory if `shares` on all, and if the system permits it on all nodes. `given`, the node of
    every rank, is by default determined by MPI.
    """
    rank, size, known = comm.Get_rank(), comm.Get_size(), dict(open_nodes.items())
    places = {name: node.place for name, node in known.items()}
    mine = _Surroundings(machine_name(), frozenset(usable_cores()), cores_are_shared(), shares, places)
    everyone = comm.allgather(mine)
    shares = all(one.shares_memory for one in everyone)
    here = {other: one for other, one in enumerate(everyone) if one.machine == mine.machine}
    usable = {other: one.cores for other, one in here.items()}
    names = _common_names(everyone)
    shared: SharedNode | None
    # a node that all have open is shared again: no new files, and no split communicator
    if None not in names.values():
        name, machines = names[mine.machine], [one.machine for one in everyone]
        assert name is not None, "all machines have a common name"
        shared, members = known[name], {other: one.places[name] for other, one in here.items()}
    else:
        sharing = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
        machines = comm.allgather(sharing.bcast(rank))
        ranks = [other for other in range(size) if machines[other] == machines[rank]]
        members = {other: place for place, other in enumerate(ranks)}
        cores = len(frozenset[int]().union(*usable.values()))
        measures = len(here) <= cores and not any(one.shares_cores for one in here.values())
        shared = _share_memory(comm, sharing, measures) if shares else None
        sharing.Free()
    nodes = numbered(machines if given is None else given)
    shared, speed = shared if shares else None, MessageSpeed()
    if shared is not None:
        slowest = shared.speed.slowest(comm)
        speed = slowest if _has_neighbours(nodes, size) else speed
    network = NetworkSpeed() if nodes is None else network_speed.measure(comm, nodes)
    return NodePlacement(rank, size, nodes, usable, shared, members, speed, network)


def _common_names(everyone: Sequence[_Surroundings]) -> dict[str, bytes | None]:
    """Name of a node that all ranks of a machine have open, by machine. None if there is none."""
    names: dict[str, set[bytes]] = {}
    for one in everyone:
        names.setdefault(one.machine, set(one.places)).intersection_update(one.places)
    return {machine: min(found, default=None) for machine, found in names.items()}


def _share_memory(comm: MPI.Intracomm, sharing: MPI.Intracomm, measures: bool) -> SharedNode | None:
    """Let the ranks of `sharing` share memory. None on all ranks of `comm` if some may not. Collective over `comm`."""
    shared = None
    with suppress(OSError):
        shared = SharedNode(sharing, measures)
    return shared if reduced(comm, shared is not None, MPI.LAND) else None

"""The wires over MPI keep the contract that the loopback keeps."""

import pytest
from mpi4py import MPI
from wires import CONTRACT

from collectives.transport.mpi import Immediate, Persistent
from collectives.transport.shm import Nearest, Node, Shared

WIRES = {
    "persistent": lambda comm, node: Persistent(comm, 3),
    "immediate": lambda comm, node: Immediate(comm),
    "shared": lambda comm, node: Nearest(Shared(node, 1, {}), Persistent(comm, 3)),
}


@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize("program", CONTRACT, ids=lambda program: program.__name__)
def test_contract(world, kind, program):
    own = world.Dup()
    node = Node(MPI.Intracomm(own.Split_type(MPI.COMM_TYPE_SHARED)), own.Get_rank())
    wire = WIRES[kind](own, node)
    program(world.rank, world.size, wire)
    wire.free()
    node.free()
    own.Free()

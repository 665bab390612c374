"""The wires over MPI keep the contract that the loopback keeps."""

import pytest
from wires import CONTRACT

from collectives.transport.mpi import Immediate, Persistent

WIRES = {
    "persistent": lambda comm: Persistent(comm, 3),
    "immediate": lambda comm: Immediate(comm),
}


@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize("program", CONTRACT, ids=lambda program: program.__name__)
def test_contract(world, kind, program):
    own = world.Dup()
    wire = WIRES[kind](own)
    program(world.rank, world.size, wire)
    wire.free()
    own.Free()

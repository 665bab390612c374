"""All ranks in one process: the loopback wire keeps the contract, and is the strictest of all wires."""

import numpy as np
import pytest
from support.loopback import LoopbackHub
from support.transport_contract import CONTRACT, asking, begin, piece, spmd

from collectives.runtime.execution.program import Program


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("program", CONTRACT, ids=lambda program: program.__name__)
def test_contract(program, size):
    spmd(size, program)


def test_a_send_waits_for_its_receiver():
    wire, data = LoopbackHub(2).wire(0), np.zeros(3)
    message = wire.send(1, [piece(data)])
    begin(wire, [message])
    assert not asking(wire, [message])()


def test_data_is_read_when_it_leaves_and_not_when_it_is_bound():
    hub, data, room = LoopbackHub(2), np.zeros(3), np.ones(3)
    send, receive = hub.wire(0).send(1, [piece(data)]), hub.wire(1).receive(0, [piece(room)])
    data[:] = 5
    begin(hub.wire(0), [send])
    begin(hub.wire(1), [receive])
    assert room.tolist() == [5, 5, 5]


def test_a_message_that_does_not_fit_is_refused():
    hub, data, room = LoopbackHub(2), np.zeros(3), np.zeros(2)
    begin(hub.wire(0), [hub.wire(0).send(1, [piece(data)])])
    with pytest.raises(ValueError, match=r"expected a message of 16 bytes, found 24, pair \(0, 1\)"):
        begin(hub.wire(1), [hub.wire(1).receive(0, [piece(room)])])


def test_a_deadlock_is_told_from_a_long_wait():
    def program(rank, size, wire):
        if rank == 1:
            room = np.zeros(1)
            message = wire.receive(0, [piece(room)])
            Program([[[*message.starts, *message.ends]]], wire).run()

    with pytest.raises(TimeoutError, match=r"rank 1 waited 0.05 s for message \(0, 1\)"):
        spmd(2, program, patience=0.05)

"""Programs of a communicator of one rank with device arrays: copies from the send to the receive buffer, or nothing."""

from collections.abc import Callable, Iterable
from functools import partial

from collectives.buffers.device_memory import DeviceMemory
from collectives.runtime.call import Call
from collectives.runtime.program import Program, call_rounds
from collectives.transport.wire import Wire


def own_blocks_program(call: Call, device: DeviceMemory, wire: Wire, first: Iterable[Callable[[], object]]) -> Program:
    """Build the program of a call of one rank with its buffers on `device`, in the order of their streams.

    The host waits for nothing. `first` runs before copies, if there are any. No message uses `wire`.
    """
    copies = list(_copies(call, device))
    if not copies:
        return Program([], wire)
    return Program(call_rounds([*first, *copies, device.join]), wire, stream=device)


def _copies(call: Call, device: DeviceMemory) -> Iterable[Callable[[], object]]:
    """Copies of the blocks that the call sends to where it receives them, but not of a block to itself."""
    source, target = call.source, call.target
    if source is None or target is None:  # one buffer for input and result, as in a broadcast
        return
    for block, end in call.recv_blocks.items():
        begin, size = call.send_blocks[block], call.unit.itemsize
        here, there = source.address + begin * size, target.address + end * size
        if here != there and call.lengths[block]:
            yield partial(device.copy, there, here, call.lengths[block] * size)

"""Device arrays of ranks on several nodes, in parts that are copied while others are on the network; by the stand-in.

The nodes are emulated: `nodes` names them.
"""

import time

import numpy as np
import pytest
from mpi4py import MPI
from support.device_collectives import reached_at_once, right_when_late
from support.doc_examples import EXAMPLES, FORMS, call
from support.fakes import cupy

from collectives import Communicator, wait_all
from collectives.errors import RanksDisagree
from collectives.runtime.builders import communicator_transports
from collectives.runtime.execution.program import Program
from collectives.transport.gpu.device_network import (
    IN_FLIGHT,
    DeviceNetworkTransport,
    NetworkLane,
    NetworkReceive,
    NetworkSend,
    PinnedBuffers,
)
from collectives.transport.mpi.mpi_transport import MpiTransport
from collectives.transport.node.mailbox import NodeMemory
from collectives.transport.node.staging_chunks import SHORTEST

pytestmark = [pytest.mark.timeout(60), pytest.mark.mpi(min_size=2)]

PART = 1 << 12
"""Bytes of the parts of tests with many."""

LENGTHS = (0, 1, SHORTEST - 1, SHORTEST, SHORTEST + 1, 5 * SHORTEST + 3)

NODES = {
    "one rank each": lambda rank: rank,
    "two ranks each": lambda rank: rank // 2,
    "in turn": lambda rank: rank % 2,
}

PLACES = {
    "devices": lambda rank: True,
    "a device sends to hosts": lambda rank: rank == 0,
    "a host sends to devices": lambda rank: rank != 0,
    "mixed": lambda rank: rank % 2 == 0,
}


def open_on(world, nodes="one rank each", **options):
    """A communicator of several nodes: two ranks are on different ones."""
    numbers = [rank if world.size == 2 else NODES[nodes](rank) for rank in range(world.size)]
    comm = Communicator(world, cuda_aware=False, nodes=numbers, **options)
    assert comm.device_transfer.startswith("pinned: ")
    return comm


@pytest.fixture(params=[None, 1, pytest.param(2, marks=pytest.mark.full)], ids=["polled", "seed 1", "seed 2"])
def engine(request, gpu, world):
    """The GPU works when it is polled, or by itself with random delays."""
    made = None if request.param is None else cupy.Engine(gpu, 89 * request.param + world.rank)
    yield made
    cupy.cuda.runtime.deviceSynchronize()
    if made is not None:
        made.stop()
    assert not gpu.registered


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(communicator_transports, "largest_part", lambda size: PART)


@pytest.fixture(params=NODES)
def comm(request, engine, world):
    with open_on(world, request.param) as made:
        yield made


def values(n, turn=0):
    """Bytes that differ between parts, and turns."""
    return ((np.arange(n, dtype="u4") * np.uint32(2654435761) >> np.uint32(13)) + turn).astype("u1")


def array_of(on_device, content):
    return cupy.asarray(content) if on_device else content.copy()


def broadcast_is_right(comm, n, turn=0, on_device=True, form="blocking", root=0):
    """True if a broadcast, by single messages, is right."""
    expected = values(n, turn)
    array = array_of(on_device, expected if comm.Get_rank() == root else np.zeros(n, "u1"))
    call(comm, "Bcast", form, (array, root), algorithm="linear")
    return bool((cupy.asnumpy(array) == expected).all())


def ends_in_time(request, seconds=0.5):
    """Wait for a request; break it off, with TimeoutError, after some time."""
    deadline = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > deadline:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Program, "advance", gives_up)
                request.Test()
        time.sleep(0)


def gives_up(self):
    raise TimeoutError


@pytest.mark.parametrize("places", PLACES)
def test_every_length(comm, places):
    for turn, n in enumerate(LENGTHS):
        form = ("blocking", "nonblocking", "persistent")[turn % 3]
        assert broadcast_is_right(comm, n, turn, PLACES[places](comm.Get_rank()), form), (n, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_collective_in_many_parts(small_parts, comm, name, form):
    rank, size = comm.Get_rank(), comm.Get_size()
    for turn, n in enumerate((PART // 4 - 1, PART // 4 + 1, PART + 5)):
        example = EXAMPLES[name](rank, size, n, "i4", size - 1, False)
        on_device = turn != 1 or rank % 2 == 0
        send, recv = (None if x is None else array_of(on_device, np.asarray(x)) for x in (example.send, example.recv))
        call(comm, example.method, form, example.arguments(send, recv))
        if example.expected is not None and recv is not None:
            np.testing.assert_array_equal(cupy.asnumpy(recv), example.expected)


@pytest.mark.parametrize("name", ["allreduce", "alltoall", "bcast"])
def test_late_streams(small_parts, comm, name):
    """Work before the call is included, and the send buffer may be used again after it."""
    for turn in range(2):
        assert right_when_late(comm, name, ("blocking", "nonblocking")[turn], PART, cupy.empty, turn)


def test_more_requests_than_channels(small_parts, comm):
    """Those without mailboxes exchange all messages by MPI."""
    n, size = PART // 4 + 1, comm.Get_size()
    arrays = [cupy.full(n, comm.Get_rank() + turn, "i4") for turn in range(30)]
    requests = [comm.Allreduce_init(MPI.IN_PLACE, array) for array in arrays]
    assert isinstance(requests[-1].program.wire, DeviceNetworkTransport)
    for request in requests[::-1]:
        request.Start()
    wait_all(requests)
    for turn, array in enumerate(arrays):
        assert (array.get() == size * turn + size * (size - 1) // 2).all()
    for request in requests:
        request.Free()


# ------------------------------------------------------------------------------------------ overlap, and memory


def test_parts_overlap(small_parts, engine, world, monkeypatch):
    """A part is copied before the message of the one before is complete; three have a buffer, and these are reused."""
    log = []
    for kind in (NetworkSend, NetworkReceive):
        for step in ("begin", "end"):
            monkeypatch.setattr(kind, step, noted(log, kind, step))
    taken = noted(log, PinnedBuffers, "take")
    monkeypatch.setattr(PinnedBuffers, "take", taken)
    comm = open_on(world)
    for turn in range(2):
        assert broadcast_is_right(comm, 9 * PART, turn)
    comm.close()
    for kind in (NetworkSend, NetworkReceive):
        steps = [(step, message) for found, step, message, _ in log if found is kind]
        by_peer = {peer: [at for at in steps if at[1]._peer == peer] for peer in {at[1]._peer for at in steps}}
        for mine in by_peer.values():
            begun = [at for at, (step, _) in enumerate(mine) if step == "begin"]
            ended = [at for at, (step, _) in enumerate(mine) if step == "end"]
            assert len(begun) == len(ended) == 18
            for first in (0, 9):
                parts = range(first + 1, first + 9)
                assert all(begun[part] < ended[part - 1] for part in parts)
                assert all(ended[part - IN_FLIGHT] < begun[part] for part in parts if part >= first + IN_FLIGHT)
            assert max(np.cumsum([1 if step == "begin" else -1 for step, _ in mine])) == IN_FLIGHT
    lanes = {(found, message._peer) for found, _, message, _ in log if found is not PinnedBuffers}
    buffers = {result.ctypes.data for found, _, _, result in log if found is PinnedBuffers}
    assert 1 <= len(buffers) <= IN_FLIGHT * len(lanes)


def noted(log, kind, step):
    """Method of a class that also notes its calls, with their results."""
    function = getattr(kind, step)

    def call_and_note(self, *arguments):
        result = function(self, *arguments)
        log.append((kind, step, self, result))
        return result

    return call_and_note


# ------------------------------------------------------------------------------------------ refusals, and ends


REFUSED = {
    "alloc_pinned_memory": (cupy.cuda, cupy.cuda.runtime.CUDARuntimeError("cudaErrorNotPermitted"), "did not arrive"),
    "getDeviceCount": (cupy.cuda.runtime, cupy.cuda.runtime.CUDARuntimeError("no driver"), "cannot be used"),
    "asarray": (cupy, MemoryError("out of memory"), "did not arrive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_on_one_rank(gpu, world, monkeypatch, name):
    owner, error, what = REFUSED[name]

    def refuse(*_):
        raise error

    with monkeypatch.context() as patched:
        if world.rank == world.size - 1:
            patched.setattr(owner, name, refuse)
        comm = Communicator(world, cuda_aware=False, nodes=range(world.size))
    assert comm.device_transfer.startswith("staged: ") and what in comm.device_transfer
    assert len(set(world.allgather(comm.device_transfer.partition(":")[0]))) == 1
    assert broadcast_is_right(comm, 3000)
    comm.close()


@pytest.mark.parametrize("on_device", [True, False])
def test_one_array_in_many_calls_at_a_time(gpu, world, on_device):
    """Equal calls use one program only if none of them is under way."""
    x = np.arange(12 * SHORTEST // 4, dtype=np.int32)
    comm = Communicator(world, cuda_aware=False, shared=False, nodes=range(world.size))
    sent = cupy.asarray(x) if on_device else x
    received = [cupy.zeros(x.size, x.dtype) if on_device else np.zeros_like(x) for _ in range(6)]
    for _ in range(2):
        wait_all([comm.Ibcast(sent if world.rank == 0 else y, 0, algorithm="linear") for y in received])
    if world.rank:
        for y in received:
            np.testing.assert_array_equal(y.get() if on_device else y, x)
    comm.close()


def test_memory_is_dropped_at_the_end(gpu, world):
    with open_on(world) as comm:
        assert broadcast_is_right(comm, 3 * SHORTEST)
        buffers = comm._planner.transports._buffers
        assert world.allreduce(len(buffers._free)) > 0
    assert not buffers._free


def test_buffers_that_cuda_does_not_pin(gpu, world, monkeypatch):
    """Copies take more time then; the other ranks need not know."""

    def refuse(*_):
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    with open_on(world) as comm:
        if world.rank == world.size - 1:
            monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", refuse)
            gpu.pageable = True
        for root in range(world.size):
            assert broadcast_is_right(comm, SHORTEST + 5, root, root=root)


def test_a_call_that_is_broken_off(small_parts, gpu, world, monkeypatch):
    """In the middle of a message; later calls are refused, and other communicators work."""
    comm, pass_on, count, begin = open_on(world), NetworkSend.pass_on, [0], time.monotonic()

    def interrupted(self):
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        pass_on(self)

    def yielding(self, pauses):
        self.comm.Iprobe()
        if time.monotonic() > begin + 0.5:
            raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(NetworkSend, "pass_on", interrupted)
        patched.setattr(NodeMemory, "yielding", yielding)
        with pytest.raises(KeyboardInterrupt if world.rank == 0 else TimeoutError):
            comm.Bcast(cupy.zeros(9 * PART, "u1"), 0, algorithm="linear")
    with pytest.raises(RanksDisagree, match="broken off"):
        comm.Bcast(cupy.zeros(5, "u1"), 0)
    comm.close()
    with open_on(world) as other:
        assert broadcast_is_right(other, 9 * PART)


# ------------------------------------------------------------------------------------------ planted faults

LONG_PART = 1 << 19
"""Bytes of parts that no MPI sends before the receiver asks for them."""

PASS_ON, BEGIN, RECEIVE, KEPT = NetworkSend.pass_on, NetworkLane._begin, NetworkReceive.begin, []


def forgets_the_message(self):
    PASS_ON(self)
    KEPT.append(self.event)
    self.event = cupy.cuda.Event(disable_timing=True)


def does_not_wait(self):
    RECEIVE(self)
    KEPT.append(self.event)
    self.event = cupy.cuda.Event(disable_timing=True)


def sends_the_last_one_first(self):
    if self._waiting and isinstance(self._waiting[0], NetworkSend):
        self._waiting.reverse()
    BEGIN(self)


FAULTS = {
    "part sent before its copy ended": lambda: reached_at_once("to_host"),
    "buffer used again before its copy ended": lambda: reached_at_once("to_device"),
    "buffer used again before its message was sent": lambda: (NetworkSend, "pass_on", forgets_the_message),
    "part copied before it arrived": lambda: (NetworkReceive, "begin", does_not_wait),
    "parts in another order": lambda: (NetworkLane, "_begin", sends_the_last_one_first),
    "host arrays cut elsewhere": lambda: (MpiTransport, "segment_size", lambda self, nbytes, usual: 3 * PART),
    "another tag": lambda: (NetworkSend, "pass_on", sends_with_another_tag),
}


def sends_with_another_tag(self):
    self._wire.tag += 1
    PASS_ON(self)
    self._wire.tag -= 1


def passes(world, comm, seconds):
    """True if on all ranks arrays on devices, and on rank 0's host, go to ranks of other nodes, and are right."""
    good = True
    for turn in range(4):
        if world.rank == world.size - 1:
            time.sleep(0.02)  # messages wait
        for n in (5, 12 * LONG_PART):
            expected = values(n, turn)
            content = expected if world.rank == 0 else np.zeros(n, "u1")
            array = array_of(turn % 2 == 0 or world.rank > 0, content)
            try:
                ends_in_time(comm.Ibcast(array, 0, algorithm="linear"), seconds)
                good &= bool((cupy.asnumpy(array) == expected).all())
            except (RuntimeError, TimeoutError, MPI.Exception):
                good = False
            good = world.allreduce(good, MPI.LAND)
            if not good:
                KEPT.append(comm)  # messages are left, which must match no others
                return False
    comm.close()
    return True


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_fault_is_found(gpu, world, monkeypatch, fault):
    monkeypatch.setattr(communicator_transports, "largest_part", lambda size: LONG_PART)
    engine = cupy.Engine(gpu, world.rank, delay=5e-3)
    comm = open_on(world)
    if fault is not None:
        monkeypatch.setattr(*FAULTS[fault]())
    assert passes(world, comm, 30 if fault is None else 0.5) == (fault is None)
    world.Barrier()
    try:
        engine.stop()
    except RuntimeError:
        assert fault is not None

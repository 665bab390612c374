"""Messages from every rank to the next one of a ring, by each family of point-to-point methods."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import wait_all


class Ring(NamedTuple):
    """A rank's message: sent to `dest`, as long as the one received from `source`; `pick` chooses how to wait."""

    comm: Any
    dest: int
    source: int
    tag: int
    sent: np.ndarray
    received: np.ndarray
    pick: int

    @property
    def to(self) -> tuple[np.ndarray, int, int]:
        return self.sent, self.dest, self.tag

    @property
    def by(self) -> tuple[np.ndarray, int, int]:
        return self.received, self.source, self.tag

    @property
    def origin(self) -> tuple[int, int]:
        """Source and tag of the message, or wildcards that fit no other one."""
        source = MPI.ANY_SOURCE if self.pick % 3 == 0 else self.source
        return source, MPI.ANY_TAG if source != MPI.ANY_SOURCE and self.pick % 5 == 0 else self.tag


def finish(requests: list[Any], pick: int) -> None:
    """Complete mpi4py's requests by a function that `pick` chooses."""
    way = pick % 5
    if way == 0:
        MPI.Request.Waitall(requests)
    elif way == 1:
        wait_all(requests)
    elif way == 2:
        while not MPI.Request.Testall(requests):
            pass
    else:
        for request in requests if way == 3 else requests[::-1]:
            request.Wait()


def described(status: MPI.Status) -> tuple[int, int, int]:
    return status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)


def received_after(ring: Ring, sending: Any, receive: Callable[[MPI.Status], Any]) -> Any:
    """Receive by `receive`, then complete the request `sending`; return the status, and an object if there is one."""
    status = MPI.Status()
    found = receive(status)
    finish([sending], ring.pick)
    return described(status), found


def exchanged(ring: Ring, name: str) -> Any:
    status = MPI.Status()
    (sent, dest, tag), (received, source, _) = ring.to, ring.by
    replaces = name.endswith("replace")
    if replaces:
        received[...] = sent
    arguments = (received, dest, tag, source, tag) if replaces else (sent, dest, tag, received, source, tag)
    if name.startswith("I"):
        finish([getattr(ring.comm, name)(*arguments)], ring.pick)
        return None
    getattr(ring.comm, name)(*arguments, status)
    return described(status)


def posted(ring: Ring, name: str) -> None:
    """Post the receive, then send by the method `name`; for a ready send all ranks wait until all have posted it."""
    request = ring.comm.Irecv(*ring.by)
    if "rsend" in name.lower():
        ring.comm.Barrier()
    sent = getattr(ring.comm, name)(*ring.to)
    finish([request, sent] if name.startswith("I") else [request], ring.pick)


def probed(ring: Ring, name: str) -> Any:
    """Receive a message of unknown length that a probe finds; by its handle if the probe makes one."""

    def receive(status: MPI.Status) -> Any:
        found = getattr(ring.comm, name)(*ring.origin, status)
        while not found:
            found = getattr(ring.comm, name)(*ring.origin, status)
        length = status.Get_count(MPI.BYTE) // ring.received.itemsize
        place = ring.received[:length]
        if isinstance(found, MPI.Message):
            finish([found.Irecv(place)], ring.pick) if ring.pick % 2 else found.Recv(place)
        else:
            ring.comm.Recv(place, status.Get_source(), status.Get_tag())
        return length

    return received_after(ring, ring.comm.Isend(*ring.to), receive)


def persistent(ring: Ring, name: str) -> None:
    requests = [getattr(ring.comm, name)(*ring.to), ring.comm.Recv_init(*ring.by)]
    for _ in range(1 + ring.pick % 3):
        ring.received[...] = 0
        MPI.Prequest.Startall(requests)
        finish(requests, ring.pick)
    for request in requests:
        request.Free()


def objects(ring: Ring, name: str) -> Any:
    """Send a Python object, received by the method `name`."""
    obj, comm = (ring.tag, ring.sent.tolist()), ring.comm
    if name == "sendrecv":
        return comm.sendrecv(obj, ring.dest, ring.tag, None, ring.source, ring.tag)
    if name == "irecv":
        request = comm.irecv(1 << 20, ring.source, ring.tag)
        comm.send(obj, ring.dest, ring.tag)
        return request.wait()
    receive = {
        "recv": lambda status: comm.recv(None, *ring.origin, status),
        "mprobe": lambda status: comm.mprobe(*ring.origin, status).recv(),
        "probe": lambda status: comm.probe(*ring.origin, status) and comm.recv(None, ring.source, ring.tag),
    }[name]
    return received_after(ring, comm.isend(obj, ring.dest, ring.tag), receive)


def received(ring: Ring, name: str) -> Any:
    """Start to send by the method `name`, then receive."""
    sending = getattr(ring.comm, name)(*ring.to)
    return received_after(ring, sending, lambda status: ring.comm.Recv(ring.received, *ring.origin, status))


# fmt: off
WAYS: dict[str, Callable[[Ring, str], Any]] = {
    **dict.fromkeys(("Sendrecv", "Sendrecv_replace", "Isendrecv", "Isendrecv_replace"), exchanged),
    **dict.fromkeys(("Send", "Ssend", "Rsend", "Irsend"), posted),
    **dict.fromkeys(("Isend", "Issend"), received),
    **dict.fromkeys(("Probe", "Iprobe", "Mprobe", "Improbe"), probed),
    **dict.fromkeys(("Send_init", "Ssend_init"), persistent),
    **dict.fromkeys(("recv", "irecv", "sendrecv", "probe", "mprobe"), objects),
}
"""Functions that pass a message on, by the method that they are called with."""
# fmt: on

LENGTHS = (0, 1, 7, 50, 3000, 40_000)


def pass_on(comm: Any, method: str, pick: int, tag: int) -> list[bytes]:
    """Pass a message around a ring of all ranks of `comm`; return what this rank has received."""
    rank, size = comm.Get_rank(), comm.Get_size()
    count, step = LENGTHS[pick % len(LENGTHS)], 1 + pick // 6 % size
    sent = np.arange(count, dtype="i4") * (rank + 1)
    ring = Ring(comm, (rank + step) % size, (rank - step) % size, tag, sent, np.full(count, -1, "i4"), pick // 36)
    found = WAYS[method](ring, method)
    return [sent.tobytes(), ring.received.tobytes(), repr(found).encode()]

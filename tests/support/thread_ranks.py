"""Ranks as threads of one process, with the collectives on arrays that operators use; exchanges are counted."""

import threading
from collections import defaultdict, deque
from functools import reduce
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

PATIENCE = 30.0


def combined(op, terms, algorithm):
    """Terms of all ranks, combined in the order of the ranks, or by the binary tree."""
    function = next(function for one, function in OPERATIONS if one == op)
    if algorithm != "tree" or len(terms) == 1:
        return reduce(function, terms)
    pairs = [function(*terms[at : at + 2]) if at + 1 < len(terms) else terms[at] for at in range(0, len(terms), 2)]
    return combined(op, pairs, algorithm)


OPERATIONS = ((MPI.SUM, np.add), (MPI.MAX, np.maximum), (MPI.MIN, np.minimum))


class _Meeting:
    """Values of all ranks of one collective call; a wait of more than `PATIENCE` seconds counts as a deadlock."""

    def __init__(self, size):
        self.size = size
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self._lock = threading.Lock()
        self._waiting = defaultdict(deque)

    def start(self, key, kind, array):
        """Start a send or receive between two ranks; it is done when the other side has been started."""
        message, other = _Message(array), "receives" if kind == "sends" else "sends"
        with self._lock:
            if not self._waiting[key, other]:
                self._waiting[key, kind].append(message)
                return message
            partner = self._waiting[key, other].popleft()
            sent, received = (message, partner) if kind == "sends" else (partner, message)
            assert sent.array.nbytes == received.array.nbytes, f"{key}: {sent.array.nbytes}, {received.array.nbytes}"
            received.array[...] = sent.array
            message.done = partner.done = True
        return message

    def exchange(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class ThreadComm:
    """Communicator of one rank. `calls` has the name and the bytes of every collective on arrays, in order."""

    nodes = None

    def __init__(self, meeting, rank):
        self._meeting, self._rank = meeting, rank
        self.calls = []

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return self._meeting.size

    def allgather(self, value):
        return self._meeting.exchange(self._rank, value)

    def bcast(self, value, root=0):
        return self.allgather(value)[root]

    def Barrier(self):
        self.allgather(None)

    def _arrays(self, name, send):
        call = name, send.nbytes, send.dtype
        every = self._meeting.exchange(self._rank, (call[0], call[2], send.copy()))
        assert len({(name, dtype) for name, dtype, _ in every}) == 1, f"ranks made different calls: {every}"
        self.calls.append(call[:2])
        return [array for _, _, array in every]

    def Allreduce(self, send, receive, op=MPI.SUM, algorithm=None):
        total = combined(op, self._arrays("allreduce", receive if send is MPI.IN_PLACE else send), algorithm)
        receive[...] = total.reshape(receive.shape)

    def Allgather(self, send, receive):
        self.Allgatherv(send, [receive, None])

    def Allgatherv(self, send, receive):
        every = self._arrays("allgather", send)
        receive[0].reshape(-1)[...] = np.concatenate([one.reshape(-1) for one in every])

    def Reduce_scatter(self, send, receive, counts, op=MPI.SUM, algorithm=None):
        every, start = self._arrays("reduce_scatter", send), sum(counts[: self._rank])
        receive.reshape(-1)[...] = combined(op, every, algorithm).reshape(-1)[start : start + counts[self._rank]]

    def Reduce_scatter_block(self, send, receive, op=MPI.SUM, algorithm=None):
        self.Reduce_scatter(send, receive, [receive.size] * self.Get_size(), op)

    def Alltoall(self, send, receive):
        blocks = [one.reshape(self.Get_size(), -1)[self._rank] for one in self._arrays("alltoall", send)]
        receive.reshape(-1)[...] = np.concatenate(blocks)

    def Alltoallv(self, send, receive):
        """`sent` leaves out the block that stays here."""
        (array, counts), bounds = send, np.cumsum([0, *send[1]])
        every = self._meeting.exchange(self._rank, (array.reshape(-1).copy(), bounds))
        receive[0].reshape(-1)[...] = np.concatenate(
            [flat[starts[self._rank] : starts[self._rank + 1]] for flat, starts in every]
        )
        self.calls.append(("alltoallv", array.nbytes - counts[self._rank] * array.itemsize))

    def Isend(self, send, peer, tag=0):
        self.calls.append(("send", send[0].nbytes))
        return self._meeting.start((self._rank, peer, tag), "sends", send[0].copy())

    def Irecv(self, receive, peer, tag=0):
        return self._meeting.start((peer, self._rank, tag), "receives", receive[0])


class _Message:
    """Request of a send or receive."""

    def __init__(self, array):
        self.array, self.done = array, False

    def Test(self):
        return self.done


class ThreadAxis(NamedTuple):
    """Axis of a mesh, as `parallel.mesh.device_mesh.MeshAxis`."""

    name: str
    rank: int
    size: int
    comm: ThreadComm


def run(size, function, name="tp"):
    """Results of ``function(axis)`` of every rank, each in a thread; the first error of any rank is raised."""
    meeting, results, errors = _Meeting(size), [None] * size, []

    def rank_main(rank):
        try:
            results[rank] = function(ThreadAxis(name, rank, size, ThreadComm(meeting, rank)))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results

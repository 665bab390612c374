"""Records of ranks on other nodes, asked for over TCP.

Each rank listens at a port, and its thread `LineWatch` answers with the records of its node. A rank that has waited
long for one of another node asks that one, and if it does not answer, others of its node. A process that has ended
refuses connections, so that its end is noticed although the MPI says nothing. A firewall may refuse them, too: a
refusal counts on nodes that were reached before. Each thread therefore connects once to each node, to one in a second.
"""

from __future__ import annotations

import fcntl
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import CALL_RECORD
from collectives.runtime.record.conditions import is_stopped
from collectives.runtime.record.layout import HEADER
from collectives.runtime.record.reader import ProcessState, RankRecord, is_active
from collectives.runtime.record.writer import job_name

CALLS_SENT = 64
"""Last calls of each rank in an answer."""

PATIENCE = 1.0
"""Seconds that a connection or an answer may take."""

MOST_ASKED = 3
"""Ranks of a node that are asked before it counts as silent."""

FRESH = 30.0
"""Seconds for which an answer counts."""

SIOCGIFADDR = 0x8915
"""Request of Linux for the IPv4 address of an interface."""

_PREFIX = struct.Struct("=qi")  # time of the monotonic clock, records
_ENTRY = struct.Struct("=ii")  # state of the process, calls
_TIMES = ("opened", "line_seen", "line_moved")


class Address(NamedTuple):
    """Addresses at which a rank answers: IPv4 ones of its host, port, and the bytes that a question begins with."""

    hosts: tuple[str, ...]
    port: int
    token: bytes


def host_addresses() -> tuple[str, ...]:
    """IPv4 addresses of this host's interfaces, those of the loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]))
    return tuple(sorted(found, key=lambda host: host.startswith("127.")))


class Answers:
    """Listening socket of this rank; ``records()`` are those of its node."""

    def __init__(self, records: Callable[[], Iterable[RankRecord]]) -> None:
        self._records = records
        self._socket = socket.create_server(("", 0), backlog=64)
        self.address = Address(host_addresses(), self._socket.getsockname()[1], secrets.token_bytes(16))

    def close(self) -> None:
        """Refuse all questions from now on."""
        self._socket.close()

    def give(self, seconds: float) -> None:
        """Answer the questions that come in this time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self._socket.fileno() >= 0:
            with suppress(OSError, ValueError):  # ValueError: closed, at the exit
                if not select.select([self._socket], [], [], left)[0]:
                    return
            with suppress(OSError), self._socket.accept()[0] as other:
                other.settimeout(PATIENCE)
                if secrets.compare_digest(_read(other, len(self.address.token)), self.address.token):
                    other.sendall(packed(list(self._records())))


def packed(records: Sequence[RankRecord]) -> bytes:
    """Bytes of an answer."""
    parts = [_PREFIX.pack(time.monotonic_ns(), len(records))]
    for one in records:
        calls = one.calls
        kept = calls[(calls["ended"] == 0) | (np.arange(len(calls)) >= len(calls) - CALLS_SENT)]
        state = ProcessState.STOPPED if is_stopped(one) else ProcessState.LIVES
        state = state if one.is_alive else ProcessState.HAS_ENDED
        parts += [_ENTRY.pack(state, len(kept)), one.header.tobytes(), kept.tobytes()]
    return b"".join(parts)


def connected(address: Address) -> socket.socket:
    """Connection to another rank; ConnectionRefusedError if its host refuses it, OSError if it cannot be reached."""
    own = host_addresses()  # of networks that each host has for itself, such as the loopback
    for host in address.hosts:
        if host not in own:
            try:
                return socket.create_connection((host, address.port), PATIENCE)
            except ConnectionRefusedError:
                raise
            except OSError:
                continue  # of an interface that this host does not reach
    raise TimeoutError("no address can be reached")


def ask(address: Address) -> list[RankRecord]:
    """Records of the node of another rank, in times of this host's clock; raises as `connected`."""
    with connected(address) as other:
        other.sendall(address.token)
        return list(_unpacked(other))


def _unpacked(other: socket.socket) -> Iterator[RankRecord]:
    now, count = _PREFIX.unpack(_read(other, _PREFIX.size))
    ahead = now - time.monotonic_ns()
    for _ in range(count):
        state, calls = _ENTRY.unpack(_read(other, _ENTRY.size))
        header = np.frombuffer(bytearray(_read(other, HEADER.itemsize)), HEADER)
        entries = np.frombuffer(bytearray(_read(other, calls * CALL_RECORD.itemsize)), CALL_RECORD)
        header["job"] = job_name().encode()
        for name in _TIMES:
            header[name] -= np.where(header[name] > 0, ahead, 0)
        for name in ("started", "ended"):
            entries[name] -= np.where(entries[name] > 0, ahead, 0)
        yield RankRecord(header[0], entries, ProcessState(state))


def _read(other: socket.socket, nbytes: int) -> bytes:
    read = b""
    while len(read) < nbytes:
        part = other.recv(min(nbytes - len(read), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection ended within an answer")
        read += part
    return read


class FarRecords:
    """Records of ranks on other nodes, by rank in MPI.COMM_WORLD, as far as waits have wanted them."""

    def __init__(self) -> None:
        self._addresses: dict[int, Address] = {}
        self._nodes: dict[int, tuple[int, ...]] = {}  # all ranks of a rank's node
        self._wanted: dict[int, float] = {}
        self._found: dict[int, tuple[float, RankRecord]] = {}
        self._reached: set[tuple[int, ...]] = set()
        self._untried: list[tuple[int, ...]] = []

    def know(self, nodes: Mapping[int, tuple[int, Address | None]]) -> None:
        """Keep the node and the address of ranks; None where a rank does not listen."""
        for rank, (node, address) in nodes.items():
            self._nodes[rank] = tuple(other for other, (its, _) in nodes.items() if its == node)
            if address is not None:
                self._addresses[rank] = address
        here = self._nodes[MPI.COMM_WORLD.Get_rank()]
        others = set(self._nodes.values()) - {here} - self._reached
        self._untried = [node for node in others if node[0] in self._addresses]

    def want(self, ranks: Iterable[int]) -> None:
        """Ask for the records of ranks at the next `refresh`."""
        now = time.monotonic()
        self._wanted.update((rank, now) for rank in ranks if rank in self._addresses)

    def get(self, rank: int) -> RankRecord | None:
        """Newest record received of a rank, None if it is older than `FRESH` seconds. Sends nothing."""
        found = self._found.get(rank)
        return None if found is None or time.monotonic() - found[0] > FRESH else found[1]

    def all(self) -> list[RankRecord]:
        """All records of which `get` has one."""
        return [one for rank in tuple(self._found) if (one := self.get(rank)) is not None]

    def refresh(self) -> None:
        """Ask for what was wanted since the last time, and for the ranks that those wait for; connect to a new node."""
        if self._untried:
            self._try(self._untried.pop())
        wanted, self._wanted = self._wanted, {}
        asked: set[tuple[int, ...]] = set()
        while wanted:
            rank = wanted.popitem()[0]
            node = self._nodes[rank]
            if node not in asked:
                asked.add(node)
                for one in self._of_node(node, rank):
                    self._found[int(one.header["rank"])] = time.monotonic(), one
                    peers = {int(call["peer"]) for call in one.calls if is_active(call)} & self._addresses.keys()
                    wanted |= dict.fromkeys(peers, 0.0)

    def _try(self, node: tuple[int, ...]) -> None:
        with suppress(OSError), connected(self._addresses[node[0]]):
            self._reached.add(node)

    def _of_node(self, node: tuple[int, ...], wanted: int) -> list[RankRecord]:
        """Records of the ranks of a node, from one that answers; if none does, those known before, and their states."""
        states = {}
        for rank in [wanted, *(other for other in node if other != wanted and other in self._addresses)][:MOST_ASKED]:
            try:
                found = ask(self._addresses[rank])
            except ConnectionRefusedError:
                # of a node never reached, a firewall may refuse
                states[rank] = ProcessState.HAS_ENDED if node in self._reached else ProcessState.IS_SILENT
            except OSError:
                states[rank] = ProcessState.IS_SILENT
            else:
                self._reached.add(node)
                return found
        return [self._last(rank, state) for rank, state in states.items()]

    def _last(self, rank: int, state: ProcessState) -> RankRecord:
        if rank in self._found:
            return self._found[rank][1]._replace(process=state)
        header = np.zeros(1, HEADER)
        header["rank"], header["size"], header["job"] = rank, MPI.COMM_WORLD.Get_size(), job_name().encode()
        header["last"] = 1  # it may have made calls, none of which is known
        return RankRecord(header[0], np.zeros(0, CALL_RECORD), state)

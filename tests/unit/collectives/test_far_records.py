"""Records over TCP: what a rank learns of ranks on other nodes, and what it does not take for a death."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives.engine.instructions import CALL_RECORD, CallState
from collectives.errors import PeerFailed, PeerLeft
from collectives.runtime.record import far_records, watcher
from collectives.runtime.record.conditions import condition
from collectives.runtime.record.far_records import Address, Answers, FarRecords, ask
from collectives.runtime.record.layout import HEADER, RankState
from collectives.runtime.record.reader import ProcessState, RankRecord


@pytest.fixture(autouse=True)
def other_host(monkeypatch):
    """Let addresses of this host count as those of another one."""
    monkeypatch.setattr(far_records, "PATIENCE", 0.3)
    monkeypatch.setattr(far_records, "host_addresses", lambda: ("192.0.2.1",))


def a_record(rank, calls=0, peer=-1, state=RankState.RUNS):
    """Record of a rank whose last call, if any, is active and waits for `peer`."""
    header, entries = np.zeros(1, HEADER), np.zeros(calls, CALL_RECORD)
    header["rank"], header["last"], header["state"], header["opened"] = rank, calls, state, time.monotonic_ns()
    header["job"], header["pid"] = "elsewhere", 1
    entries["number"], entries["turn"], entries["peer"] = np.arange(calls) + 1, np.arange(calls), peer
    entries["started"] = entries["ended"] = time.monotonic_ns()
    entries["collective"], entries["algorithm"] = "broadcast", "mst"
    entries["ended"][-1:] = 0
    return RankRecord(header[0], entries, ProcessState.LIVES)


@contextlib.contextmanager
def answering(*records):
    """Address at which a thread answers with records."""
    answers = Answers(lambda: records)
    ended = threading.Event()

    def give():
        while not ended.is_set():
            answers.give(0.05)

    thread = threading.Thread(target=give)
    thread.start()
    try:
        yield answers.address._replace(hosts=("127.0.0.1",))
    finally:
        ended.set()
        thread.join()
        answers.close()


def refusing():
    """Address of a process that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return Address(("127.0.0.1",), made.getsockname()[1], bytes(16))


@contextlib.contextmanager
def silent():
    """Address of a stopped process: its kernel accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield Address(("127.0.0.1",), made.getsockname()[1], bytes(16))


def knowing(nodes):
    """FarRecords of rank 0 on node 0, and (node, address) of other ranks."""
    far = FarRecords()
    far.know({0: (0, None), **nodes})
    return far


def test_an_answer_has_the_last_calls_and_those_that_are_active():
    sent = a_record(3, calls=100, peer=2)
    sent.entries["ended"][5] = 0
    with answering(sent, a_record(4)) as address:
        found, empty = ask(address)
    assert found.rank == 3 and empty.rank == 4 and len(empty.calls) == 0
    assert found.calls["number"].tolist() == [6, *range(37, 101)]
    assert abs(int(found.calls["started"][-1]) - int(sent.entries["started"][-1])) < 5e9
    assert (found.calls["ended"][[0, -1]] == 0).all() and found.text("job") != "elsewhere"


def test_a_wrong_token_gets_no_answer():
    with answering(a_record(1)) as address, pytest.raises(ConnectionResetError):
        ask(address._replace(token=bytes(16)))


def test_own_networks_are_not_asked(monkeypatch):
    monkeypatch.setattr(far_records, "host_addresses", lambda: ("127.0.0.1",))
    with pytest.raises(TimeoutError):
        ask(refusing())


def test_a_refusal_is_an_end_on_nodes_that_were_reached():
    with answering(a_record(1, calls=3)) as address:
        far = knowing({1: (1, address)})
        far.want([1])
        far.refresh()
        assert condition(far.get(1), time.monotonic_ns()).startswith("waits")
    far.want([1])
    far.refresh()
    assert not far.get(1).is_alive and "has ended, after broadcast" in condition(far.get(1), time.monotonic_ns())


def test_a_refusal_by_a_firewall_is_no_end():
    far = knowing({1: (1, refusing())})
    far.want([1])
    far.refresh()
    assert far.get(1).is_alive and "does not answer" in condition(far.get(1), time.monotonic_ns())
    with answering(a_record(2)) as address:  # without its own answer: it is connected to once
        far.know({0: (0, None), 2: (2, address)})
        far.refresh()
    far.want([2])
    far.refresh()
    assert not far.get(2).is_alive


def test_a_stopped_rank_is_silent_or_described_by_its_neighbour():
    with silent() as stopped:
        far = knowing({1: (1, stopped)})
        far.want([1])
        far.refresh()
        assert far.get(1).process == ProcessState.IS_SILENT
        with answering(a_record(1)._replace(process=ProcessState.STOPPED), a_record(2)) as neighbour:
            far = knowing({1: (1, stopped), 2: (1, neighbour)})
            far.want([1])
            far.refresh()
        assert "is stopped" in condition(far.get(1), time.monotonic_ns()) and far.get(2) is not None


def test_ranks_that_a_wanted_rank_waits_for_are_asked_too():
    with answering(a_record(1, calls=2, peer=2)) as first, answering(a_record(2, calls=1)) as second:
        far = knowing({1: (1, first), 2: (2, second), 3: (3, refusing())})
        far.want([1, 99])
        far.refresh()
    assert {one.rank for one in far.all()} == {1, 2}


@pytest.mark.parametrize("state, error", [(RankState.HAS_LEFT, PeerLeft), (RankState.RUNS, PeerFailed)])
def test_waits_for_far_ranks_end(monkeypatch, state, error):
    far = FarRecords()
    monkeypatch.setattr(watcher, "_far", far)
    monkeypatch.setattr(watcher, "_left_since", {})
    sent = a_record(7, calls=1, state=state)
    if state == RankState.RUNS:
        sent = sent._replace(process=ProcessState.HAS_ENDED)
    sent.entries["state"] = CallState.HAS_ENDED
    with answering(sent) as address:
        far.know({0: (0, None), 7: (1, address)})
        watcher.look("bcast", {1: (7, 0)}, 0)
        far.refresh()
    watcher.look("bcast", {1: (7, 0)}, 0)
    time.sleep(watcher.SETTLED + 0.1)
    with pytest.raises(error, match="rank 1 has"):
        watcher.look("bcast", {1: (7, 0)}, 0)
    assert MPI.COMM_WORLD.Get_size() == 1


def test_ranks_of_another_world_are_not_taken_for_those_of_this_one(monkeypatch):
    """A communicator with processes that were spawned: their ranks in their world are numbers of ours, too."""
    far, mine = FarRecords(), refusing()
    monkeypatch.setattr(watcher, "_far", far)
    monkeypatch.setattr(watcher, "_answers", None)
    monkeypatch.setattr(watcher, "record", lambda: None)
    monkeypatch.setattr(watcher, "world_ranks", lambda comm: [0, 3, MPI.UNDEFINED])
    comm = type("Comm", (), {"allgather": lambda self, one: [None, mine, mine._replace(port=1)]})()
    watcher.know(comm, [0, 1, 2])
    assert far._addresses == {3: mine}

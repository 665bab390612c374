"""Pauses of a wait on a clock of the test: yields, naps once nothing moves for long, and time limits."""

import threading
from types import SimpleNamespace

import pytest

from collectives.errors import Timeout
from collectives.transport import waits
from collectives.transport.waits import LONG, LONGEST_NAP, NAPS, Deadline, Others, Pauses, has_deadline, limited


@pytest.fixture
def naps(monkeypatch):
    """Naps so far; a yield takes 10 ms."""
    clock, found = [100.0], []

    def pass_by(seconds=0.01):
        clock[0] += seconds

    def sleep(seconds):
        found.append(seconds)
        pass_by(seconds)

    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(waits, "_yield_core", pass_by)
    monkeypatch.setattr(waits, "_cores_are_shared", False)
    return found


def test_naps_while_nothing_moves(naps):
    work = Others("a call")
    pauses = Pauses(work)
    for _ in range(int(LONG / 0.01) - 1):
        pauses.pause()
    assert not naps and not pauses.is_long, "before, nothing changes"
    for _ in range(40):
        pauses.pause()
    assert pauses.is_long and naps == sorted(naps) and naps[0] < 1e-4 and naps[-1] < 1.5 * LONG / NAPS
    for _ in range(400):
        pauses.pause()
    assert naps == sorted(naps) and naps[-1] == LONGEST_NAP and sum(naps) > NAPS * LONGEST_NAP - LONG
    work.moves, count = 1, len(naps)
    pauses.pause()
    assert not pauses.is_long, "it has moved"
    for _ in range(int(LONG / 0.01) - 1):
        pauses.pause()
    assert len(naps) == count
    for _ in range(20):
        pauses.pause()
    assert len(naps) > count and naps[count] < 1e-4


def test_limits_of_waits(naps):
    with Deadline(0.5, 3) as outer:
        pauses = Pauses(Others("barrier", "for a test"))
        with pytest.raises(Timeout, match=r"^barrier: rank 3 waited 0\.5 s for a test$"):
            for _ in range(60):
                pauses.pause()
        with limited(2 * LONG, 1):
            pauses = Pauses(Others("barrier"))
            with pytest.raises(TimeoutError, match=rf"rank 1 waited {2 * LONG:g} s"):
                for _ in range(1000 + int(2 * LONG / LONGEST_NAP)):
                    pauses.pause()
        assert waits._limits.current is outer
        other = []
        thread = threading.Thread(target=lambda: other.append(has_deadline()))
        thread.start()
        thread.join()
        assert other == [False], "limits are of one thread"
    assert not has_deadline()

"""Two computations in turns: order, context, results and exceptions."""

import threading
from contextvars import ContextVar

import numpy as np
import pytest

from parallel.runtime import interleaving
from parallel.runtime.interleaving import give_way, interleave, own_time

SETTING = ContextVar("setting", default="")


def steps(events, name, count, error=None):
    """Function that notes its steps, gives way after each, and returns its name or raises an error."""

    def run():
        for number in range(count):
            events.append(f"{name}{number}")
            give_way()
        if error is not None:
            raise error
        return name

    return run


@pytest.mark.parametrize(
    ("counts", "order"),
    [((2, 2), "a0 b0 a1 b1"), ((3, 1), "a0 b0 a1 a2"), ((1, 3), "a0 b0 b1 b2"), ((0, 2), "b0 b1"), ((2, 0), "a0 a1")],
)
def test_order_and_results(counts, order):
    events = []
    assert interleave(steps(events, "a", counts[0]), steps(events, "b", counts[1])) == ("a", "b")
    assert events == order.split()


@pytest.mark.parametrize("failing", ["a", "b"])
def test_exception_ends_both(failing):
    events = []
    errors = {failing: ValueError(failing)}
    with pytest.raises(ValueError, match=failing):
        interleave(
            steps(events, "a", 1, errors.get("a")), steps(events, "b", 9 if failing == "a" else 1, errors.get("b"))
        )
    assert "b2" not in events
    assert not [thread for thread in threading.enumerate() if thread.name == "chorus-interleaved"]
    give_way()  # outside, a no-op


def test_an_exception_of_the_second_ends_a_first_that_goes_on():
    events = []
    with pytest.raises(KeyError):
        interleave(steps(events, "a", 9), steps(events, "b", 0, KeyError()))
    assert events == ["a0"]


def test_context_is_that_of_the_caller():
    token = SETTING.set("outer")
    with np.errstate(divide="raise"):
        found = interleave(SETTING.get, lambda: (SETTING.get(), np.geterr()["divide"]))
    SETTING.reset(token)
    assert found == ("outer", ("outer", "raise"))


def test_time_of_the_other_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interleaving.time, "perf_counter", lambda: now[0])

    def run():
        began = own_time()
        for _ in range(2):
            now[0] += 1.0
            give_way()
        return own_time() - began

    assert interleave(run, run) == (2.0, 2.0) and now[0] == own_time() == 4.0

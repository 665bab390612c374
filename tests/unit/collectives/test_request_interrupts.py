"""Ctrl-C, and signal handlers that use requests, at every point where the interpreter looks for signals."""

import dis
import gc
import sys
import threading
from itertools import count

import pytest

from collectives.errors import RanksDisagree
from collectives.runtime.execution import operation, progress
from collectives.runtime.execution.local_steps import call_rounds
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.progress import active_requests, lone_requests, progress_lock
from collectives.runtime.requests import native_requests, request
from collectives.runtime.requests.native_requests import new_request
from collectives.runtime.requests.request import Request
from collectives.transport.wire import NoMessages
from collectives.types import Wait

FILES = {module.__file__ for module in (native_requests, operation, progress, request)}

CHECKED_AFTER = ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
"""Instructions after which the interpreter looks for signals."""


def press_ctrl_c():
    raise KeyboardInterrupt


class Interrupt:
    """Trace function that calls a handler at the n-th such point."""

    def __init__(self, n, handler=press_ctrl_c):
        self.left, self.latest, self.handler = n, {}, handler

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in FILES or self.left <= 0:
            return None
        if event == "call":
            frame.f_trace_opcodes, self.latest[frame] = True, "RESUME"
        elif event == "opcode":
            before = self.latest.get(frame)
            self.latest[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.left -= before in CHECKED_AFTER
            if self.left == 0:
                sys.settrace(None)
                self.handler()
        return self


def interrupted(call, n):
    """Make the call, interrupted at the n-th point; True if it has so many."""
    trace = Interrupt(n)
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


class Owner:
    rank, timeout = 0, None

    def __init__(self):
        self.released = 0

    def release(self, request):
        request.holds_program, self.released = False, self.released + 1


class Sum:
    """A request of a program in two parts, which another rank delays by `waits` polls."""

    def __init__(self, persistent, waits, make=Request):
        self.persistent, self.waits, self.result, self.owner = persistent, waits, [], Owner()
        self.started = False
        steps = [lambda: setattr(self, "left", waits), Wait(lambda: None, self.arrived), self.result.clear]
        steps += [lambda: self.result.append("sum")]
        self.program = Program(call_rounds(steps), NoMessages())
        self.request = make("sum", self.program, self.owner, object(), *([True] if persistent else []))

    def arrived(self):
        self.left -= 1
        return self.left < 0

    def start(self):
        if self.persistent:
            self.request.Start()
        else:
            self.request.begin(None)
        self.started = True

    def is_lost(self):
        """True if it was interrupted before it began."""
        return not (self.started or self.request.active or self.request._broken or self.result)


def lock_is_free():
    taken = []

    def take():
        taken.append(progress_lock.acquire(timeout=10))
        if taken[0]:
            progress_lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No progress thread, which would advance the requests, and no compiled programs."""
    monkeypatch.setattr(progress.progress_thread, "ensure", lambda: None)
    monkeypatch.setattr(progress.progress_thread, "wake", lambda: None)
    yield
    active_requests.clear()
    lone_requests.clear()


@pytest.mark.parametrize("verb", ["Wait", "Test"])
@pytest.mark.parametrize("waits", [0, 3])
@pytest.mark.parametrize("persistent", [False, True], ids=["non-blocking", "persistent"])
def test_an_interrupted_request_completes_or_is_aborted(persistent, waits, verb):
    """It never hangs, is never complete without its data, and gives its program back once."""
    for n in count(1):
        summed = Sum(persistent, waits)
        request = summed.request

        def complete(summed=summed, request=request):
            summed.start()
            while not getattr(request, verb)():
                pass

        was_interrupted = interrupted(complete, n)
        assert lock_is_free(), f"point {n}"
        if not summed.is_lost():
            try:
                for _ in range(20):
                    if request.Test():
                        break
                else:
                    pytest.fail(f"point {n}: it never completes")
                request.Wait()
                assert summed.result == ["sum"], f"point {n}: complete without its data"
            except RanksDisagree:
                assert was_interrupted and summed.program.broken
        elif persistent:
            request.Start()
            request.Wait()
        assert not request.active and not active_requests and not lone_requests, f"point {n}"
        assert summed.owner.released == (not persistent and not summed.is_lost()), f"point {n}"
        if not was_interrupted:
            break
    assert n > 10


def handled(call, n, handler):
    """Make the call, interrupted at the n-th point by a handler; True if it has so many."""
    trace = Interrupt(n, handler)
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return trace.left <= 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nested", ["Wait", "Test", "another one"])
@pytest.mark.parametrize("verb", ["Wait", "Test"])
@pytest.mark.parametrize("waits", [0, 3])
@pytest.mark.parametrize("kind", ["non-blocking", "native", "persistent"])
def test_a_request_is_used_in_a_signal_handler(kind, waits, verb, nested):
    """The handler is right or refused, never waits for what it has interrupted, and leaves the request as it was."""
    refused = 0
    for n in count(1):
        summed = Sum(kind == "persistent", waits, new_request if kind == "native" else Request)
        other = Sum(False, 2)
        other.start()
        request, seen = summed.request, []

        def handler(summed=summed, other=other, request=summed.request, seen=seen):
            used = other if nested == "another one" else summed
            begun = used.request.active
            try:
                complete = used.request.Wait() if used is other else getattr(request, nested)()
            except RanksDisagree as error:
                assert "interrupted" in str(error) and nested != "Test"
                seen.append("refused")
            else:
                seen.append(not (complete and begun) or used.result == ["sum"])

        def complete(summed=summed, request=request):
            summed.start()
            while not getattr(request, verb)():
                pass

        was_interrupted = handled(complete, n, handler)
        assert summed.result == ["sum"] and lock_is_free() and gc.isenabled(), f"point {n}"
        assert all(seen) and len(seen) == was_interrupted, f"point {n}: complete without its data"
        refused += seen == ["refused"]
        assert request.Test() and request.Wait() and (kind != "native" or not request)
        other.request.Wait()
        assert not request.active and not active_requests and not lone_requests, f"point {n}"
        assert summed.owner.released == (kind != "persistent"), f"point {n}"
        if not was_interrupted:
            break
    assert n > 10 and refused < n

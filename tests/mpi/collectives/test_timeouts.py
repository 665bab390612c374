"""Waits with a time limit, and long waits: errors that name what was waited for, and cores left to others."""

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import use_interpreter
from support.exchange_cases import TABLE, Question

from collectives import Communicator, wait_all
from collectives.errors import InvalidArgument, InvalidInput, InvalidType, Mismatch, RanksDisagree, Timeout
from collectives.runtime.execution.message_wait import wait_for
from collectives.runtime.record.layout import OUTSIDE
from collectives.runtime.record.writer import record
from collectives.transport.waits import LONG, has_deadline
from parallel.runtime.meeting_point import MeetingPoint

SHORT, LATE, AMPLE = 0.2, 0.4, 60  # seconds: of a limit, of a rank that comes after it, and of a limit never reached

INTERPRETED = {"compiled": lambda rank: False, "interpreted": lambda rank: True, "mixed": lambda rank: rank % 2 == 1}

NODES = {"one node": lambda size: None, "apart": range, "pairs": lambda size: [rank // 2 for rank in range(size)]}


@contextmanager
def opened(world, **options):
    """A communicator that ranks may leave after different calls."""
    comm = Communicator(world, **options)
    try:
        yield comm
        assert not has_deadline()
    finally:
        world.Barrier()  # all have sent what they send
        with suppress(Mismatch):  # of a rank that made no call
            comm.close()


@pytest.fixture(params=NODES)
def nodes(world, request):
    return NODES[request.param](world.Get_size())


@pytest.fixture(params=INTERPRETED)
def own(world, request, nodes, monkeypatch):
    """Communicator over shared memory or MPI, or both; the interpreter runs its programs on some ranks."""
    if INTERPRETED[request.param](world.Get_rank()):
        use_interpreter(monkeypatch)
    with opened(world, nodes=nodes) as comm:
        yield comm


def is_last(comm):
    """True on the rank that comes late, or never; it is not alone."""
    return 0 < comm.Get_rank() == comm.Get_size() - 1


def sums(comm, call, late=LATE):
    """Let one rank be late for an allreduce, and check the result."""
    if is_last(comm):
        time.sleep(late)
    total = np.zeros(3)
    call(np.ones(3), total)
    assert (total == comm.Get_size()).all()


def test_a_late_rank(own):
    sums(own, lambda mine, total: own.Allreduce(mine, total, timeout=AMPLE))
    sums(own, own.Allreduce)


@pytest.mark.parametrize("before", [0, 4], ids=["new", "known"])
@pytest.mark.parametrize("algorithm", ["ring", "linear", "auto"])
def test_a_rank_that_never_comes(world, own, algorithm, before):
    mine, total, began = np.ones(3), np.zeros(3), time.monotonic()
    for _ in range(before):
        own.Allreduce(mine, total, algorithm=algorithm)
    world.Barrier()
    if own.Get_size() > 1 and not is_last(own):
        began = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            own.Allreduce(mine, total, algorithm=algorithm, timeout=SHORT)
        assert SHORT <= time.monotonic() - began < SHORT + 2
        assert isinstance(caught.value, Timeout) and isinstance(caught.value, InvalidInput)
        rank, name = own.Get_rank(), "[a-z_]+" if algorithm == "auto" else algorithm
        assert re.fullmatch(
            rf"allreduce \({name}\): rank {rank} waited 0\.2 s in round \d of \d for .*\branks? [\d, ]+",
            str(caught.value),
        )
        with pytest.raises(RanksDisagree, match=r"broken off on rank \d by Timeout: allreduce .*new Communicator"):
            own.Barrier()
    with Communicator(world) as other:
        sums(other, other.Allreduce, 0)


@pytest.mark.parametrize("method", TABLE)
def test_every_method(world, own, method):
    """One rank never comes; the others wait for it until the limit, or need not."""
    asked = Question(own.Get_rank(), own.Get_size(), 0, 100, np.dtype("f"))
    exchange = TABLE[method].make(asked)
    if is_last(own):
        return
    exchange.fill(0)
    try:
        getattr(own, method)(*exchange.args, **exchange.keywords, timeout=SHORT)
    except Timeout as error:
        assert re.match(
            rf"(block lengths of )?{TABLE[method].collective.removesuffix('v')}\b.*: rank {own.Get_rank()} waited",
            str(error),
        )
        with pytest.raises(RanksDisagree, match="by Timeout"):
            own.Barrier()


@pytest.mark.parametrize("form", ["non-blocking", "persistent"])
@pytest.mark.parametrize("method", ["Allreduce", "Allgatherv", "Gatherv", "Alltoall", "Scatterv"])
def test_requests_stay_active(own, form, method):
    """`Wait` raises at the limit, and a later one completes the request; other calls go on meanwhile."""
    asked = Question(own.Get_rank(), own.Get_size(), 0, 1000, np.dtype("f"))
    exchange = TABLE[method].make(asked)
    name = f"I{method.lower()}" if form == "non-blocking" else f"{method}_init"
    exchange.fill(0)
    for turn in range(3):
        if form == "non-blocking" or turn == 0:
            start = getattr(own, name)
        if is_last(own):
            if form == "persistent" and turn == 0:
                request = start(*exchange.args, **exchange.keywords)
            time.sleep(LATE)
        elif turn == 0 and form == "persistent":
            request = start(*exchange.args, **exchange.keywords)
        if form == "non-blocking":
            request = start(*exchange.args, **exchange.keywords)
        else:
            request.Start()
        for _ in range(2):
            with suppress(Timeout):
                request.Wait(timeout=SHORT / 4)
                break
            assert request.active and request, "it can still complete"
            assert re.search(r"under way: waits (in round \d+ of \d+ )?for ", repr(request))
        request.Wait()
        exchange.check(0) if hasattr(exchange, "check") else None
        own.Barrier()
    if form == "persistent":
        request.Free()


def test_several_requests(world, own):
    first, second = np.zeros(3), np.zeros(3)
    if is_last(own):
        time.sleep(LATE)
    requests = [own.Iallreduce(np.ones(3), first), world.Iallreduce(np.ones(3), second)]
    if own.Get_size() > 1 and not is_last(own):
        with pytest.raises(Timeout, match=r"allreduce \(\w+\): rank \d waited 0\.05 s in round"):
            wait_all(requests, timeout=SHORT / 4)
    wait_all(requests, timeout=AMPLE)
    assert (first == own.Get_size()).all() and (second == own.Get_size()).all()
    with pytest.raises(InvalidArgument, match="timeout"):
        wait_all([], timeout=0)


def add(left, right, _):
    np.frombuffer(right, "d")[...] += np.frombuffer(left, "d")


def test_operations_of_users(own):
    op = MPI.Op.Create(add)
    sums(own, lambda mine, total: own.Allreduce(mine, total, op, timeout=AMPLE))
    if own.Get_size() > 1 and not is_last(own):
        with pytest.raises(Timeout, match=r"waited 0\.2 s in round"):
            own.Allreduce(np.ones(3), np.zeros(3), op, timeout=SHORT)
    op.Free()


@pytest.mark.parametrize("comes", [True, False])
def test_collectives_of_the_mpi(world, comes):
    """They use their non-blocking form."""
    with opened(world) as own:
        for _ in range(3):
            sums(own, lambda mine, total: own.Allreduce(mine, total, algorithm="native", timeout=AMPLE), 0)
            sums(own, lambda mine, total: own.Allreduce(mine, total, algorithm="native"), 0)
        world.Barrier()
        if own.Get_size() > 1 and not is_last(own):
            with pytest.raises(
                Timeout, match=r"allreduce \(native\): rank \d waited 0.2 s for other ranks in the MPI's"
            ):
                own.Allreduce(np.ones(3), np.zeros(3), algorithm="native", timeout=SHORT)
        if is_last(own) and comes:
            time.sleep(LATE)
            own.Allreduce(np.ones(3), np.zeros(3), algorithm="native", timeout=AMPLE)


WRONG = [
    *((value, InvalidArgument) for value in (0, 0.0, -1, float("nan"), -float("inf"), np.float32(-2))),
    *((value, InvalidType) for value in ("5", b"5", True, [5], np.ones(2), 1j)),
]


@pytest.mark.parametrize(("timeout", "error"), WRONG)
def test_wrong_limits(world, comm, timeout, error):
    def calls():
        yield lambda: comm.Allreduce(np.ones(1), np.zeros(1), timeout=timeout)
        yield lambda: comm.Barrier(timeout=timeout)
        yield lambda: Communicator(world, timeout=timeout)
        yield lambda: wait_all([], timeout=timeout)

    request = comm.Iallreduce(np.ones(1), total := np.zeros(1))
    for call in (*calls(), lambda: request.Wait(timeout=timeout)):
        with pytest.raises(error, match=r"^timeout: expected [^\n]*$"):
            call()
    request.Wait()
    assert total == comm.Get_size()
    sums(comm, comm.Allreduce, 0)


def test_limits_that_are_right(comm):
    for timeout in (5, 5.5, np.float32(3), np.int8(3), float("inf"), 1e300):
        sums(comm, lambda mine, total, timeout=timeout: comm.Allreduce(mine, total, timeout=timeout), 0)


def made(comm, how):
    if how == "Dup":
        return comm.Dup()
    if how == "Split":
        return comm.Split(0, comm.Get_rank())
    return comm.Create(comm.Get_group())


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("how", ["itself", "variable", "Dup", "Split", "Create"])
def test_limits_of_communicators(world, monkeypatch, how, debug):
    """Communicators made of one have its limit: of blocking calls, and of waits for requests."""
    if how == "variable":
        monkeypatch.setenv("CHORUS_TIMEOUT", str(SHORT) if world.Get_rank() == 0 else "")
    with opened(world, timeout=None if how == "variable" else SHORT, debug=debug) as first:
        own = first if how in ("itself", "variable") else made(first, how)
        if is_last(own):
            time.sleep(LATE)
        request = own.Iallreduce(np.ones(3), total := np.zeros(3))
        if own.Get_size() > 1 and not is_last(own):
            with pytest.raises(Timeout, match="allreduce"):
                request.Wait()
        request.Wait(timeout=AMPLE)
        assert (total == own.Get_size()).all()
        world.Barrier()
        sums(own, lambda mine, total: own.Allreduce(mine, total, timeout=None))  # no limit
        sums(own, lambda mine, total: own.Allreduce(mine, total, timeout=AMPLE))
        world.Barrier()
        if own.Get_size() > 1 and not is_last(own):
            with pytest.raises(Timeout, match=r"rank \d waited 0.2 s .*" + ("debug" if debug else "in round")):
                own.Allreduce(np.ones(3), total)
            with pytest.raises(RanksDisagree, match="by Timeout"):
                own.Barrier()
        world.Barrier()
        if own is not first:
            with suppress(Mismatch):
                own.Free()


@pytest.mark.parametrize("value", ["x", "0", "-3", "nan"])
def test_a_wrong_variable(world, monkeypatch, value):
    monkeypatch.setenv("CHORUS_TIMEOUT", value if world.Get_rank() == 0 else "5")
    with pytest.raises(InvalidInput, match=rf"CHORUS_TIMEOUT: expected .* found .*{value}.* on rank 0"):
        Communicator(world)


def test_native_calls_with_and_without_a_limit_in_debug_mode(world):
    with opened(world, debug=True) as own:
        if own.Get_size() == 1:
            return
        timeout = AMPLE if own.Get_rank() else None
        with pytest.raises(InvalidArgument, match="timeout: none / given"):
            own.Barrier(algorithm="native", timeout=timeout)


def test_refused_arguments_in_debug_mode(world):
    """A rank that refuses its arguments waits for the others no longer than the limit."""
    with opened(world, debug=True) as own:
        with pytest.raises(InvalidArgument):
            own.Bcast(np.zeros(3), 99, timeout=SHORT)
        sums(own, lambda mine, total: own.Allreduce(mine, total, timeout=AMPLE), 0)


# ------------------------------------------------------------------------------------------ long waits

SECONDS, SETTLED = LONG + 1.5, LONG + 0.3


def wait(comm, how):
    mine, total = np.ones(3), np.zeros(3)
    if how == "request":
        comm.Iallreduce(mine, total).Wait()
    elif how == "several requests":
        wait_all([comm.Iallreduce(mine, total)])
    elif how == "persistent":
        request = comm.Allreduce_init(mine, total)
        comm.Barrier()
        request.Start()
        request.Wait()
        request.Free()
    else:
        comm.Allreduce(mine, total, timeout=AMPLE if how == "limited" else None)
    assert (total == comm.Get_size()).all()


@pytest.mark.parametrize("how", ["blocking", "limited", "request", "persistent", "several requests"])
def test_a_long_wait_leaves_the_core(world, own, how):
    """The processor's time of this process, between two moments of a wait."""
    samples = []

    def sample():
        time.sleep(SETTLED)
        samples.append((time.monotonic(), time.process_time()))
        time.sleep(SECONDS - SETTLED - 0.1)
        samples.append((time.monotonic(), time.process_time()))

    wait(own, how)
    world.Barrier()
    if is_last(own):
        if how == "persistent":
            request = own.Allreduce_init(np.ones(3), np.zeros(3))
            own.Barrier()
            time.sleep(SECONDS)
            request.Start()
            request.Wait()
            request.Free()
        else:
            time.sleep(SECONDS)
            wait(own, how)
    else:
        sampler = threading.Thread(target=sample)
        sampler.start()
        wait(own, how)
        sampler.join()
        (began, before), (ended, after) = samples
        if own.Get_size() > 1:
            assert (after - before) / (ended - began) < 0.1


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False], ids=["node", "network"])
def test_a_rank_that_is_stopped_for_20_seconds(world, shared):
    """Its waiters use at most a second of the processor's time."""
    if world.Get_size() == 1:
        pytest.skip("nobody waits")
    with opened(world, shared=shared) as comm:
        wait(comm, "blocking")
        if is_last(comm):
            with subprocess.Popen(["sh", "-c", f"sleep 20; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)
        began, before = time.monotonic(), time.process_time()
        wait(comm, "blocking")
        used, waited = time.process_time() - before, time.monotonic() - began
    print(f"rank {world.Get_rank()}: {used:.2f} s in {waited:.1f} s")
    assert used < 1 and (waited > 15) != is_last(world)


@pytest.mark.parametrize("timeout", [None, AMPLE])
@pytest.mark.parametrize("how", ["blocking", "request"])
def test_ctrl_c_in_a_long_wait(world, own, how, timeout):
    """It is raised at once, on the root, which waits for all others."""
    moments, mine, total = [], np.ones(3), np.zeros(3)

    def interrupt(number, frame):
        moments.append(time.monotonic())
        raise KeyboardInterrupt

    def start():
        return own.Ireduce(mine, total, algorithm="linear")

    if own.Get_rank() or own.Get_size() == 1:
        world.Barrier()
        start().Wait() if how == "request" else own.Reduce(mine, total, algorithm="linear")
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    due = time.monotonic() + LONG + 0.3
    signal.setitimer(signal.ITIMER_REAL, LONG + 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            if how == "blocking":
                own.Reduce(mine, total, algorithm="linear", timeout=timeout)
            else:
                request = start()
                request.Wait(timeout=timeout)
        ended = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert moments[0] - due < 0.1 and ended - moments[0] < 0.1
    world.Barrier()
    if how == "request" and request.active:
        request.Wait()
        assert (total == own.Get_size()).all()


def test_a_wait_for_a_message(world):
    """Outside of collectives: it has the time limit, and a long one is in the record until its end."""
    with opened(world, timeout=LONG + LATE) as comm:
        peer, found, states = (comm.rank + 1) % comm.size, record(), []

        def never():
            states.extend(one["algorithm"] for one in found.entries if one["channel"] == OUTSIDE and not one["ended"])

        before = found.last
        with pytest.raises(Timeout, match=rf"message: rank {comm.rank} waited .* for rank {peer} \(answer\)"):
            wait_for(never, "message", comm, peer, "answer")
        assert b"answer" in states
        assert [one["peer"] for one in found.entries if one["number"] > before and one["ended"]] == [peer]


def test_a_rank_that_does_not_meet_the_others(world):
    with opened(world, timeout=LONG + LATE) as comm:
        point = MeetingPoint(comm)
        point.meet("step")
        if comm.size > 1 and comm.rank:
            with pytest.raises(Timeout, match=r"step: rank \d+ waited .* for other ranks to make this call"):
                point.meet("step")

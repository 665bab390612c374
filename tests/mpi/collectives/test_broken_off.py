"""Calls that are broken off, by Ctrl-C or an operation that raises: what comes after them works or says why not."""

import gc
import signal
import time
import weakref
from contextlib import contextmanager
from functools import partial
from traceback import walk_stack

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import use_interpreter

from collectives import Communicator
from collectives.engine.extension import available
from collectives.engine.instructions import DONE, RESULT_BITS, WAITING
from collectives.errors import InvalidArgument, RanksDisagree
from collectives.runtime.execution.progress import progress_lock
from collectives.runtime.record.writer import record
from collectives.transport.node.mailbox_layout import NONBLOCKING

SOON, LATER = 0.1, 0.6  # seconds between looks whether a rank waits, and until those that it waits for come


@contextmanager
def ctrl_c(comm):
    """Ctrl-C for this process as soon as it executes a call; other ranks meet it in `after_ctrl_c`."""

    def interrupt(number, frame):
        packages = [caller.f_globals.get("__package__") or "" for caller, _ in walk_stack(frame)]
        found = record()  # a first call is planned before
        is_executing = found is None or found.active is not None
        if is_executing and any(package.startswith("collectives.") for package in packages):
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, SOON)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, SOON)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    after_ctrl_c(comm)


def after_ctrl_c(comm):
    """Wait until rank 0 has been interrupted."""
    MPI.Intracomm(comm).Barrier()


@pytest.fixture
def own(world, request):
    """A communicator that compiles soon, of at least two ranks that wait for each other in Python.

    Each rank is a node if the parameter is true: compiled programs then poll for messages over MPI.
    """
    apart = getattr(request, "param", False)
    with Communicator(world, nodes=range(world.Get_size()) if apart else None) as comm:
        if comm.Get_size() == 1 or comm._planner.node is None or (apart and not available()):
            pytest.skip("nobody waits in Python")
        yield comm


CALLS_BEFORE = pytest.mark.parametrize(
    ("own", "before"),
    [(False, 0), (False, 1), (False, 6), (True, 6)],
    indirect=["own"],
    ids=["new", "known", "compiled", "compiled between nodes"],
)


@CALLS_BEFORE
@pytest.mark.parametrize("method", ["Reduce", "Allreduce"])
def test_ctrl_c_in_a_blocking_call(own, before, method):
    """Rank 0 waits for the others' terms, which then come. It never takes them for those of another call."""
    rank, size = own.Get_rank(), own.Get_size()
    if method == "Allreduce" and size > 2:
        pytest.skip("others would wait for more than one message of rank 0")

    def call(turn):
        total = np.full(5, -1.0)
        getattr(own, method)(np.full(5, float(rank + turn)), total, algorithm="linear" if size > 2 else "auto")
        assert (rank and method == "Reduce") or (total == size * (size - 1) // 2 + size * turn).all()

    for turn in range(before):
        call(turn)
    own.Barrier()
    if rank == 0:
        with ctrl_c(own):
            call(before)
    else:
        after_ctrl_c(own)
        call(before)
    if rank == 0:
        for _ in range(2):
            with pytest.raises(RanksDisagree, match=r"broken off on rank 0 by KeyboardInterrupt.*new Communicator"):
                call(before + 1)
    with Communicator(own) as new:
        total = np.zeros(5)
        new.Allreduce(np.ones(5), total)
        assert (total == size).all()


def interrupt_as_it_returns(monkeypatch, functions, name):
    """Ctrl-C as the compiled function of a method returns with a call that waits."""
    run = functions[name]

    def interrupted(*arguments):
        assert run(*arguments) & ((1 << RESULT_BITS) - 1) == WAITING
        raise KeyboardInterrupt

    monkeypatch.setitem(functions, name, interrupted)


@pytest.mark.parametrize("own", [False, True], indirect=True, ids=["in a node", "between nodes"])
def test_ctrl_c_as_compiled_code_returns(own, monkeypatch):
    """The interpreter looks for signals then, before the call goes on in Python."""
    if not available():
        pytest.skip("nothing is compiled")

    def call():
        own.Reduce(np.ones(5), np.zeros(5), algorithm="linear")

    for _ in range(6):
        call()
    own.Barrier()
    if own.Get_rank():
        after_ctrl_c(own)
        call()
        return
    interrupt_as_it_returns(monkeypatch, own._calls, "Reduce")
    with pytest.raises(KeyboardInterrupt):
        call()
    after_ctrl_c(own)
    with pytest.raises(RanksDisagree, match="broken off on rank 0 by KeyboardInterrupt"):
        call()


class EndsAndIsInterrupted:
    """Engine of a program that Ctrl-C interrupts as compiled code returns from the end of a request."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def end(self, *arguments):
        while self._engine.end(*arguments) != DONE:
            pass
        raise KeyboardInterrupt


def test_ctrl_c_as_compiled_code_returns_from_a_start(own, monkeypatch):
    if not available():
        pytest.skip("nothing is compiled")

    def start():
        return own.Ireduce(np.ones(5), np.zeros(5), algorithm="linear")

    turns = NONBLOCKING * 6
    for _ in range(turns):
        start().Wait()
    own.Barrier()
    if own.Get_rank():
        after_ctrl_c(own)
        start().Wait()
        return
    interrupt_as_it_returns(monkeypatch, own._starts, "Reduce")
    with pytest.raises(KeyboardInterrupt):
        start()
    after_ctrl_c(own)
    with pytest.raises(RanksDisagree, match="non-blocking reduce was broken off on rank 0"):
        start()


@pytest.mark.parametrize("verb", ["Wait", "Test"])
def test_ctrl_c_as_compiled_code_returns_from_the_end(own, monkeypatch, verb):
    """The result of the interrupted look is lost; the request is complete all the same, and later calls go on."""

    def start():
        return own.Ireduce(np.ones(5), np.zeros(5), algorithm="linear")

    for _ in range(NONBLOCKING * 6):
        start().Wait()
    own.Barrier()
    if own.Get_rank() == 0:
        request = start()
        MPI.Intracomm(own).Barrier()
        if request.program.engine.runs_for(request):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(request.program, "engine", EndsAndIsInterrupted(request.program.engine))
                getattr(request, verb)()
    else:
        MPI.Intracomm(own).Barrier()  # the root waits for this rank
        request = start()
    request.Wait()
    for _ in range(NONBLOCKING * 2):
        start().Wait()


def test_ctrl_c_before_a_call_has_begun(own, monkeypatch):
    """One that waits for its channel is left out on this rank: later calls would take the messages of its peers."""

    def start():
        return own.Ireduce(np.ones(5), np.zeros(5), algorithm="linear")

    if own.Get_rank():
        MPI.Intracomm(own).Barrier()  # the root waits for this rank
        for request in [start() for _ in range(NONBLOCKING + 1)]:
            request.Wait()
        return
    requests = [start() for _ in range(NONBLOCKING + 1)]
    assert requests[-1].is_queued

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(own._planner._channel_queues[requests[-1].channel], "_check", interrupted)
    with progress_lock:  # Ctrl-C comes in this thread
        MPI.Intracomm(own).Barrier()
        with pytest.raises(KeyboardInterrupt):
            requests[0].Wait()
    for request in requests[:-1]:
        request.Wait()
    with pytest.raises(RanksDisagree, match="non-blocking reduce was broken off on rank 0"):
        start()


@CALLS_BEFORE
def test_the_memory_of_an_aborted_call_is_kept(own, before):
    """Peers may still read it, and the MPI write to it."""
    spec = [np.zeros(5), 5, MPI.DOUBLE]
    for _ in range(before):
        own.Bcast(spec, 1, algorithm="linear")
    own.Barrier()
    if own.Get_rank() == 0:
        with ctrl_c(own):
            own.Bcast(spec, 1, algorithm="linear")
        remains = weakref.ref(spec[0])
        spec[0] = None
        gc.collect()
        assert remains() is not None
    else:
        after_ctrl_c(own)
        own.Bcast(spec, 1, algorithm="linear")


@pytest.mark.parametrize("end", ["blocking, closed", "closed", "freed", "collected"])
def test_the_memory_of_an_aborted_call_outlives_its_owner(own, end):
    """The request, and the communicator once closed, may be gone while messages are still to arrive."""
    comm, vector = Communicator(own), np.zeros(5)
    request = comm.Bcast_init(vector, 1, algorithm="linear")

    calls = [request.Start, request.Wait]
    if end == "blocking, closed":
        calls = [partial(comm.Bcast, vector, 1, algorithm="linear")]
    if comm.Get_rank():
        after_ctrl_c(comm)
        for call in calls:
            call()
        comm.close()
        return
    with ctrl_c(comm):
        for call in calls:
            call()
    program, remains = request.program, weakref.ref(vector)
    if end == "freed":
        request.Free()
    elif "closed" in end:
        comm.close()
        del comm
    del request, vector, calls, call
    gc.collect()
    assert remains() is not None
    assert program.memories or end == "blocking, closed"
    if "closed" not in end:
        comm.close()


@pytest.mark.parametrize("waits", ["Wait", "Test"])
def test_ctrl_c_in_a_persistent_one(own, waits):
    rank, size = own.Get_rank(), own.Get_size()
    mine, total = np.ones(5), np.zeros(5)
    request, other = own.Reduce_init(mine, total, algorithm="linear"), own.Allreduce_init(mine, total.copy())
    request.Start()
    request.Wait()
    if waits == "Test":
        other.Start()  # then all that is under way is moved by turns
    own.Barrier()
    if rank == 0:
        with ctrl_c(own):
            request.Start()
            while waits == "Test" and not request.Test():
                pass
            request.Wait()
        assert "broken off" in repr(request) or request.active
        if request.active:  # it was interrupted between two looks: nothing is lost
            request.Wait()
            assert (total == size).all()
        else:
            for verb in (request.Wait, request.Test):
                with pytest.raises(RanksDisagree, match="broken off"):
                    verb()
            with pytest.raises(InvalidArgument, match=r"broken off>: only an idle"):
                request.Start()
    else:
        after_ctrl_c(own)
        request.Start()
        request.Wait()
    if waits == "Test":
        other.Wait()
    request.Free()
    own.Barrier()
    own.Allreduce(mine, total)
    assert (total == size).all()
    other.Free()


def test_a_sum_that_raises(own, monkeypatch):
    """The root is told, again when it asks again; what goes on besides is right. The interpreter's sums are NumPy's."""
    use_interpreter(monkeypatch)
    rank, size = own.Get_rank(), own.Get_size()
    most, mine, total = np.full(5, np.finfo("d").max), np.ones(5), np.zeros(5)
    own.Barrier()
    if rank:
        time.sleep(LATER)
    request = own.Ireduce(most, np.zeros_like(most), algorithm="linear")
    if rank == 0:
        # The helper thread, which may be the one that sums, has error states of its own: there it is a warning.
        with np.errstate(over="raise"), pytest.raises((FloatingPointError, RuntimeWarning), match="overflow"):
            request.Wait()
        for verb in (request.Wait, request.Test):
            with pytest.raises(RanksDisagree, match="broken off"):
                verb()
    else:
        request.Wait()
    own.Allreduce(mine, total)
    assert (total == size).all()
    if rank == 0:
        with np.errstate(over="raise"), pytest.raises(FloatingPointError):
            own.Reduce(most, np.zeros_like(most), algorithm="linear")
        with pytest.raises(RanksDisagree, match="by FloatingPointError: overflow"):
            own.Barrier()
    else:
        own.Reduce(most, np.zeros_like(most), algorithm="linear")


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
def test_what_was_broken_off_meets_no_later_communicator(world, monkeypatch, blocking):
    """Messages that nobody takes any more are not found by a communicator to which the MPI gives the same place."""
    use_interpreter(monkeypatch)
    most = np.full(5, np.finfo("d").max)
    for _ in range(3):
        with Communicator(world, shared=False) as comm:
            root = comm.Get_rank() == 0
            with np.errstate(over="raise" if root else "ignore"):
                try:
                    if blocking:
                        comm.Reduce(most, np.empty_like(most), algorithm="linear")
                    else:
                        comm.Ireduce(most, np.empty_like(most), algorithm="linear").Wait()
                except (FloatingPointError, RuntimeWarning):  # the helper thread has not this errstate
                    assert root
            world.Barrier()
        with Communicator(world, shared=False) as comm:
            comm.Barrier(algorithm="linear")
            comm.Ibarrier(algorithm="linear").Wait()

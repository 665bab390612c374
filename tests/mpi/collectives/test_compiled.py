"""Programs in the interpreter and in the compiled engine: the same bits, the same errors, in any mixture."""

import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.engines import InterpretedCalls, entries, use_interpreter
from support.exchange_cases import ENTRIES, FORMS, TABLE, Question, perform

from collectives import Communicator
from collectives.engine.extension import available

OPERATIONS = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
DTYPES = ("float32", "float64", "int32", "int64", "uint8")
COUNTS = (1, 2, 7, 14, 100, 1001)  # elements, beside the flag and in a cell


@pytest.fixture
def quick(world):
    """Communicator whose programs the compiled engine runs."""
    with Communicator(world) as comm:
        yield comm


@pytest.fixture
def slow(world):
    """Communicator whose programs the interpreter runs."""
    with Communicator(world) as comm:
        yield InterpretedCalls(comm)


def extremes(rank, count, dtype):
    """Zeros of both signs, infinities, none at all, the largest and the smallest; different on neighbouring ranks."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        ends = np.finfo(dtype)
        few = [0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, ends.max, ends.min, ends.tiny, ends.smallest_subnormal]
    else:
        ends = np.iinfo(dtype)
        few = [0, 1, ends.max, ends.min, ends.max - 1, 3, ends.max // 2 + 1]
    few = np.array(few, dtype)
    return np.resize(np.roll(np.repeat(few, len(few)) if rank % 2 else np.tile(few, len(few)), rank // 2), count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_bits(quick, slow, name, dtype):
    op, rank = getattr(MPI, name), quick.Get_rank()
    for count in (*COUNTS, 121):
        mine = extremes(rank, count, dtype)
        total, model = np.zeros_like(mine), np.zeros_like(mine)
        with np.errstate(all="ignore"):
            slow.Allreduce(mine, model, op)
            for _ in range(5):
                total[:] = 77
                quick.Allreduce(mine, total, op)
                assert total.tobytes() == model.tobytes(), np.flatnonzero(total.view("u1") != model.view("u1"))
            for root in range(quick.Get_size()):
                for _ in range(4):
                    total[:] = 77
                    quick.Reduce(mine, total if rank == root else None, op, root)
                    assert rank != root or total.tobytes() == model.tobytes() or quick.Get_size() > 2
    if quick._planner.node is not None and available():
        assert "Allreduce" in dict(entries(quick))


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_arrive(quick, dtype):
    rank, size = quick.Get_rank(), quick.Get_size()
    for count in COUNTS:
        for turn in range(8):
            vector = extremes(rank + turn, count, dtype)
            quick.Bcast(vector, turn % size)
            assert vector.tobytes() == extremes(turn % size + turn, count, dtype).tobytes()


def ones(count, dtype="f8"):
    return np.ones(count, dtype)


TURNS = {"blocking": 4, "non-blocking": 10, "persistent": 12}
"""Calls on the same arrays after which the last ones run compiled, in every channel."""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("nbytes", [0, 8, 1000, 40_000, 300_000])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("method", "algorithm"), ENTRIES)
def test_every_algorithm(quick, method, algorithm, form, nbytes):
    """Compiled, in place and not, then on other arrays of equal lengths."""
    line, size = TABLE[method], quick.Get_size()
    whole = line.collective in ("broadcast", "reduce", "allreduce", "scan", "exscan")
    count = -(-nbytes // 4 // (1 if whole else size))
    for root, in_place in enumerate((False, True) if line.in_place else (False,)):
        for turns in (TURNS[form], 2) if form != "persistent" else (TURNS[form],):
            asked = Question(quick.Get_rank(), size, root % size, count, np.dtype("f"), in_place)
            perform(quick, form, method, line.make(asked), turns=turns, algorithm=algorithm)


ODD = {
    "of another dtype": lambda: (ones(8, "i2"), ones(8, "i2")),
    "small floats": lambda: (ones(8, ml_dtypes.bfloat16), ones(8, ml_dtypes.bfloat16)),
    "complex": lambda: (ones(1, "D"), ones(1, "D")),
    "of two columns": lambda: (ones((1, 2)), ones((1, 2))),
    "without dimensions": lambda: (np.array(1.0), np.array(1.0)),
    "lists": lambda: ([ones(2), 2, MPI.DOUBLE], [ones(2), 2, MPI.DOUBLE]),
    "list and array": lambda: ([ones(2), 2, MPI.DOUBLE], ones(2)),
    "read-only sendbuf": lambda: (np.broadcast_to(ones(2), (2,)), ones(2)),
    "in place": lambda: (MPI.IN_PLACE, ones(2)),
    "another shape each": lambda: (ones((2, 1)), ones(2)),
}


@pytest.mark.parametrize("odd", ODD)
def test_arrays_that_do_not_fit_go_the_long_way(quick, odd):
    for _ in range(6):
        mine, total = ones(2), ones(2) * 5
        quick.Allreduce(mine, total)
        assert (total == quick.Get_size()).all()
        mine, total = ODD[odd]()
        quick.Allreduce(mine, total)
        assert (np.asarray(total[0] if isinstance(total, list) else total) == quick.Get_size()).all()


WRONG = {
    "read-only recvbuf": lambda: (ones(2), np.frombuffer(bytes(16))),
    "not contiguous": lambda: (ones(4)[::2], ones(2)),
    "recvbuf not contiguous": lambda: (ones(2), ones(4)[::2]),
    "recvbuf shorter": lambda: (ones(2), ones(1)),
    "recvbuf longer": lambda: (ones(1), ones(2)),
    "objects": lambda: (np.array([None, None]), ones(2)),
    "nothing": lambda: (None, ones(2)),
    "of other dtypes": lambda: (ones(2), ones(2, "i8")),
    "the same array": lambda: (shared := ones(2), shared),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_the_same(quick, slow, wrong):
    """Told by all ranks before anything is sent; the next call works."""
    told = []
    for comm in (slow, quick):
        for _ in range(4):
            total = ones(2)
            comm.Allreduce(ones(2), total)
            assert (total == comm.Get_size()).all()
        outcome = "fine"
        try:
            comm.Allreduce(*WRONG[wrong]())
        except (ValueError, TypeError, MPI.Exception) as error:
            outcome = type(error), str(error)
        told.append(outcome)
    assert told[0] == told[1]
    total = ones(2)
    quick.Allreduce(ones(2), total)
    assert (total == quick.Get_size()).all()


def last(count, size):
    """Counts of two elements, but the last one."""
    return [2] * (size - 1) + [count]


REFUSED = {
    "root": (lambda comm, size, root: comm.Bcast(ones(2), root), 0, 0.0),
    "count": (lambda comm, size, count: comm.Allreduce([ones(2), count], ones(2)), 2, 2.0),
    "counts": (lambda comm, size, count: comm.Allgatherv(ones(2), [ones(2 * size), last(count, size)]), 2, 2.0),
    "recvcounts": (lambda comm, size, count: comm.Reduce_scatter(ones(2 * size), ones(2), last(count, size)), 2, 2.0),
    "not contiguous": (lambda comm, size, a: comm.Allreduce(a, ones(2), algorithm="native"), ones(2), ones(4)[::2]),
    "read-only": (
        lambda comm, size, a: comm.Allreduce(ones(2), a, algorithm="native"),
        *(ones(2), np.frombuffer(bytes(16))),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_is_treated_as_the_first_one_after_equal_calls(quick, slow, case):
    """A float that is equal to an integer, and arrays that MPI's own collectives do not take."""
    call, right, wrong = REFUSED[case]
    outcomes = []
    for comm in (slow, quick):
        for calls in (0, 6):
            for _ in range(calls):
                call(comm, comm.Get_size(), right)
            outcome = "fine"
            try:
                call(comm, comm.Get_size(), wrong)
            except (ValueError, TypeError) as error:
                outcome = type(error), str(error)
            outcomes.append(outcome)
            call(comm, comm.Get_size(), right)
    assert outcomes == outcomes[:1] * 4


@pytest.mark.parametrize("kind", [int, np.int32, np.int64])
def test_counts_of_any_integers(quick, kind):
    size = quick.Get_size()
    for _ in range(6):
        mine = np.zeros(2)
        quick.Reduce_scatter(ones(2 * size), mine, [kind(2)] * size)
        quick.Bcast(mine, kind(size - 1))
        assert (mine == size).all()


def test_other_shapes_of_equal_lengths(quick, slow):
    for comm in (slow, quick):
        for shape in [(6,), (2, 3), (6, 1), (6,), (1, 6), (3, 2), ()] * 3:
            total = ones(shape)
            comm.Allreduce(MPI.IN_PLACE, total)
            assert (total == comm.Get_size()).all()


def test_blocks_of_one_array(quick):
    """Send and receive buffer in one array, then in two arrays that overlap, apart and not."""
    rank, size = quick.Get_rank(), quick.Get_size()
    for turn in range(12):
        memory = np.zeros(2 * size + 8)
        first, second = memory[4:-2], memory[6:] if turn % 2 else memory[4:-2]
        first[2 * size :] = rank + turn, 0
        if turn > 6 and turn % 2:
            second = memory[2:-4]
            with pytest.raises(ValueError, match="overlap"):
                quick.Allgatherv([second, (2, 2 * size)], [first, ([2] * size, None)])
            continue
        first, second = (first, first) if turn % 2 == 0 else (first, memory[:-6])
        quick.Allgatherv([first, (1, 2 * size)], [second, ([1] * size, None)])
        assert second[:size].tolist() == [float(other + turn) for other in range(size)]


@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce"])
def test_parts_of_arrays_at_several_offsets(quick, form):
    """Calls that differ in nothing else, in turn: each is cached at its own offset."""
    rank, size = quick.Get_rank(), quick.Get_size()
    for turn in range(24):
        for sent, received in ((0, 0), (3, 0), (0, 2), (3, 2)):
            mine, total = np.arange(10.0) + rank + turn, np.zeros(10)
            request = getattr(quick, form)([mine, (4, sent)], [total, (4, received)])
            if request is not None:
                request.Wait()
            expected = np.zeros(10)
            expected[received : received + 4] = size * (np.arange(4.0) + sent + turn) + size * (size - 1) // 2
            assert (total == expected).all(), (turn, sent, received)


def test_a_call_on_one_array_among_those_on_two(quick):
    """The first one sends from a gap between the blocks that it receives. It runs there again after the others."""
    rank, size = quick.Get_rank(), quick.Get_size()
    both = np.zeros(4 * size)
    for turn in range(8):
        for mine, total in ((both[2:4], both), (np.zeros(2), np.zeros(4 * size))):
            total[:] = -1
            mine[:] = rank, turn
            quick.Allgatherv(mine if total is both else [mine, 2], [total, ([2] * size, list(range(0, 4 * size, 4)))])
            assert (total.reshape(-1, 4)[:, :2] == [[other, turn] for other in range(size)]).all(), turn


@pytest.mark.parametrize("form", ["Alltoallv", "Ialltoallv", "Scatterv"])
def test_blocks_of_one_array_and_then_of_two(quick, form):
    """The span of the send buffer begins with the receive buffer."""
    rank, size, n = quick.Get_rank(), quick.Get_size(), 1000
    counts, early, late = [n] * size, [n * i for i in range(size)], [n * (size + i) for i in range(size)]
    for turn in range(12):
        source = np.repeat(np.arange(2.0 * size) + turn, n)
        target = source if turn < 8 else np.zeros(2 * size * n)
        before = source.copy()
        if form == "Scatterv":
            quick.Scatterv([source, (counts, late)] if rank == 0 else None, target[:n], algorithm="linear")
            wanted = [size + rank + turn]
        else:
            request = getattr(quick, form)([source, (counts, late)], [target, (counts, early)], algorithm="pairwise")
            if request is not None:
                request.Wait()
            wanted = [size + rank + turn] * size
        assert (target[: n * len(wanted)].reshape(-1, n) == np.array(wanted)[:, None]).all(), turn
        if target is not source:
            assert (source == before).all()


@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce", "Allreduce_init", "Reduce"])
def test_small_floats_of_other_packages(quick, form):
    mine, total = np.ones(8, ml_dtypes.float8_e5m2), np.zeros(8, ml_dtypes.float8_e5m2)
    bound = quick.Allreduce_init(mine, total) if form.endswith("init") else None
    for _ in range(15):
        if bound is not None:
            bound.Start(), bound.Wait()
        elif (request := getattr(quick, form)(mine, total)) is not None:
            request.Wait()
        if form != "Reduce" or quick.Get_rank() == 0:
            assert (total.astype(float) == quick.Get_size()).all()


def test_bytes_that_are_true(quick, slow):
    rank = quick.Get_rank()
    mine = np.array([2, 1, 255, 0] if rank % 2 else [1, 2, 1, 1], np.uint8).view(bool)
    for op in (MPI.LXOR, MPI.LAND, MPI.LOR, MPI.BAND, MPI.SUM, MPI.PROD, MPI.MIN):
        totals = np.zeros((2, 4), bool)
        for _ in range(8):
            for comm, total in zip((slow, quick), totals):
                comm.Allreduce(mine, total, op)
            assert totals[0].tobytes() == totals[1].tobytes()


def test_an_array_that_another_thread_takes_out_of_a_list_during_the_call(quick):
    rank, size, mine = quick.Get_rank(), quick.Get_size(), np.ones(50_000)
    message = [np.zeros(50_000), 50_000]
    for _ in range(8):
        quick.Allreduce([mine, 50_000], message)
    if size == 1:
        return
    gone, kept = weakref.ref(message[0]), []

    def replace():
        time.sleep(0.1)
        message[0] = np.zeros(50_000)
        kept.append(gone() is not None)

    thread = threading.Thread(target=replace)
    if rank == 0:
        thread.start()
    else:
        time.sleep(0.3)
    quick.Allreduce([mine, 50_000], message)
    if rank == 0:
        thread.join()
        assert kept == [True], "freed while peers read and write it"


def test_products_of_complex_numbers(quick, slow):
    chance = np.random.default_rng(quick.Get_rank())
    for dtype in "FD":
        mine = (chance.standard_normal(101) + 1j * chance.standard_normal(101)).astype(dtype)
        total, model = np.zeros_like(mine), np.zeros_like(mine)
        slow.Allreduce(mine, model, MPI.PROD)
        for _ in range(5):
            quick.Allreduce(mine, total, MPI.PROD)
            assert total.tobytes() == model.tobytes()


def test_equal_calls_are_compiled_in_every_spelling(quick, monkeypatch):
    """A dtype object of an array's own, as unpickling makes it, and calls that are all of one spelling."""
    if quick._planner.node is None or not available():
        pytest.skip("nothing is compiled")
    own, size = np.dtype("f8").newbyteorder().newbyteorder(), quick.Get_size()
    assert own is not np.dtype("f8")
    calls = {
        "Allgatherv": lambda: quick.Allgatherv([ones(1), 1], [ones(size), [1] * size]),
        "Allreduce": lambda: quick.Allreduce(ones(3), ones(3)),
    }
    for call in calls.values():
        for _ in range(6):
            call()
    assert {name for name, _ in entries(quick)} == set(calls)
    monkeypatch.setattr(quick._planner, "run", None)
    quick.Allreduce(ones(3, own), ones(3))


def test_a_compiled_rank_and_one_that_is_not(world, monkeypatch):
    if world.Get_rank() % 2 == 0:
        use_interpreter(monkeypatch)
    with Communicator(world) as comm:
        rank, size = comm.Get_rank(), comm.Get_size()
        for turn in range(60):
            count = COUNTS[turn % 3 * 2]
            mine, total = np.full(count, float(rank + turn)), np.zeros(count)
            if turn % 7 == rank % 7:
                time.sleep(0.002)
            comm.Allreduce(mine, total)
            assert (total == size * (size - 1) // 2 + size * turn).all()


@pytest.mark.parametrize("late", [0, 1])
def test_late_peers(quick, late):
    """Longer than anyone looks for a message."""
    rank, size = quick.Get_rank(), quick.Get_size()
    bound_mine, bound_total = np.zeros(5), np.zeros(5)
    bound = quick.Allreduce_init(bound_mine, bound_total)
    for turn in range(8):
        mine, total = np.full(5, rank + turn, "i4"), np.zeros(5, "i4")
        bound_mine[:] = mine
        if rank == late and turn % 2:
            time.sleep(0.01)
        quick.Allreduce(mine, total)
        bound.Start()
        if rank == late and turn % 2:
            time.sleep(0.01)
        if turn % 3:
            bound.Wait()
        else:
            while not bound.Test():
                pass
        expected = size * (size - 1) // 2 + size * turn
        assert (total == expected).all() and (bound_total == expected).all()
    bound.Free()


@pytest.mark.parametrize("count", [5, 100])
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "in Python"])
def test_whoever_is_ahead_waits_for_room(world, monkeypatch, is_compiled, count):
    """The root of broadcasts runs ahead until there is no room, and swaps then: nothing is lost."""
    if not is_compiled:
        use_interpreter(monkeypatch)
    with Communicator(world) as comm:
        rank, size = comm.Get_rank(), comm.Get_size()
        for ahead in range(6):
            vectors = [np.full(count, float(rank + i)) for i in range(ahead)]
            mine, total, sums = np.full(count, float(rank)), np.zeros(count), np.zeros(count + ahead)
            if rank == 1:
                time.sleep(0.02)
            for vector in vectors:
                comm.Bcast(vector)
            comm.Allreduce(np.ones(count + ahead), sums)  # bound now, and not before
            comm.Allreduce(mine, total)
            assert all((vector == i).all() for i, vector in enumerate(vectors))
            assert (total == size * (size - 1) // 2).all() and (sums == size).all()


def test_a_start_never_waits(comm):
    """Rank 0 starts a broadcast for which there is no room; rank 1 takes none before another collective is over."""
    rank = comm.Get_rank()
    vector, total = np.zeros(100), np.zeros(3)
    broadcast, other = comm.Bcast_init(vector), comm.Allreduce_init(np.ones(3), total)
    if rank == 0:
        for turn in range(3):
            vector[:] = turn
            broadcast.Start()
            if turn < 2:
                broadcast.Wait()
        other.Start()
        other.Wait()
        broadcast.Wait()
    else:
        other.Start()
        other.Wait()
        for turn in range(3):
            broadcast.Start()
            broadcast.Wait()
            assert (vector == turn).all()
    assert (total == comm.Get_size()).all()
    for request in (broadcast, other):
        request.Free()


def test_a_blocking_call_without_room_moves_what_is_under_way(quick):
    """Rank 1 waits for a collective that hangs on rank 0, which is in a call for which there is no room."""
    rank, size = quick.Get_rank(), quick.Get_size()
    for turn in range(6):
        mine, total = np.ones(3000), np.zeros(3000)
        request = quick.Iallreduce(mine, total, algorithm="mst" if turn % 2 else "ring")
        if rank == 1:
            time.sleep(0.005)
            request.Wait()
        for _ in range(3):
            quick.Bcast(vector := np.full(100, float(rank)))
            assert not vector.any()
        quick.Allreduce(np.ones(100), sums := np.zeros(100))
        request.Wait()
        assert (total == size).all() and (sums == size).all()


def test_among_non_blocking_ones(quick):
    rank, size = quick.Get_rank(), quick.Get_size()
    for turn in range(40):
        mine, totals = np.full(4, float(rank + turn)), [np.zeros(4) for _ in range(3)]
        first = quick.Iallreduce(mine, totals[0]) if turn % 3 else None
        quick.Allreduce(mine, totals[1])
        if first is None:
            first = quick.Iallreduce(mine, totals[0])
        if (turn + rank) % 2:
            first.Wait()
        quick.Allreduce(mine, totals[2])
        first.Wait()
        assert all((total == size * (size - 1) // 2 + size * turn).all() for total in totals)


def test_a_message_that_is_told_by_its_address(quick):
    """16 KiB out of symmetric memory to a rank that swaps compiled: rank 0 is in place, so nothing is copied there."""
    rank, n = quick.Get_rank(), 4096
    shown, mine, before = quick.empty(n, "f4"), np.empty(n, "f4"), np.empty(n, "f4")
    for turn in range(8):
        shown[:] = mine[:] = rank + turn
        before[:] = -1
        if rank == 0:
            quick.Exscan(MPI.IN_PLACE if turn % 4 != 1 else mine, shown)
        else:
            quick.Exscan(mine, before)
            assert (before == rank * (rank - 1) // 2 + rank * turn).all()

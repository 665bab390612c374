"""Samplers, shares of micro-batches, and prefetch: every sample once, in one order for all, and no thread left."""

import gc
import subprocess
import sys
import threading
import weakref
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.data.sampler import Sampler, contiguous, interleaved, prefetch

COUNTS = [0, 1, 2, 3, 7, 8, 64, 101]
SHARES = [contiguous, interleaved]


def numbers(parts):
    return np.concatenate([np.zeros(0, np.int64), *parts]).tolist()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("count", COUNTS)
def test_every_sample_once_an_epoch_for_any_number_of_ranks(count, size, share):
    sampler = Sampler(count, global_batch=12, micro_batch=3, seed=5)
    taken = []
    for rank in range(size):
        for step in sampler.steps(2):
            taken += numbers(step.parts[number] for number in share(len(step.parts), rank, size))
    assert sorted(taken) == list(range(count))


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_an_epoch_is_its_order_cut_in_steps_and_parts(count, global_batch, micro_batch, seed, epoch):
    sampler = Sampler(count, global_batch, micro_batch, seed)
    steps = list(sampler.steps(epoch))
    assert len(steps) == sampler.steps_per_epoch
    assert numbers(chain.from_iterable(step.parts for step in steps)) == sampler.order(epoch).tolist()
    assert sorted(sampler.order(epoch)) == list(range(count))
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        assert (step.epoch, step.number) == (epoch, number)
        assert 0 < step.samples <= global_batch and (last or step.samples == global_batch)
        assert all(len(part) == min(micro_batch, step.samples) for part in step.parts[:-1])
        assert 0 < len(step.parts[-1]) <= micro_batch


@given(st.integers(0, 50), st.integers(1, 12))
def test_shares_are_disjoint_whole_and_even(count, size):
    for share in SHARES:
        shares = [list(share(count, rank, size)) for rank in range(size)]
        assert sorted(chain(*shares)) == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert list(chain(*(contiguous(count, rank, size) for rank in range(size)))) == list(range(count))
    rounds = [[share[round] for share in shares if round < len(share)] for round in range(count // size + 1)]
    assert list(chain(*rounds)) == list(range(count)), "round after round, interleaved shares are in canonical order"


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [Sampler(50, 5, seed=seed).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for one in orders for other in orders if one is not other)
    assert orders[0] == Sampler(50, 3, 2, seed=0).order(0).tolist(), "the order knows nothing of batches"
    assert Sampler(50, 5, shuffle=False).order(3).tolist() == list(range(50))


def test_ten_million_samples():
    sampler = Sampler(10_000_000, 1024, 128, seed=1)
    last = sampler.at(0, sampler.steps_per_epoch - 1)
    assert last.samples == 10_000_000 % 1024 and len(last.parts) == 5
    seen = np.zeros(sampler.count, bool)
    seen[sampler.order(0)] = True
    assert seen.all()


@pytest.mark.parametrize("behind", [0, 1, 6, 7, 8, 20])
def test_a_position_continues_where_it_was_taken(behind):
    """Seven steps an epoch: in the middle of one, at its end, and epochs later."""
    whole = Sampler(101, 16, 4, seed=3)
    for step in islice(whole.ahead(), behind):
        whole.done(step)
    again = Sampler(101, 16, 4, seed=3)
    again.load(whole.position())
    assert (again.epoch, again.step) == divmod(behind, 7)
    expected = islice(Sampler(101, 16, 4, seed=3).ahead(), behind, behind + 15)
    for one, other in zip(expected, islice(again.ahead(), 15), strict=True):
        assert one[:2] == other[:2]
        assert [part.tolist() for part in one.parts] == [part.tolist() for part in other.parts]


def test_looking_ahead_does_not_move_the_position():
    sampler = Sampler(10, 4, seed=1)
    steps = prefetch(sampler.ahead(), depth=3)
    sampler.done(next(steps))
    assert (sampler.epoch, sampler.step) == (0, 1)
    steps.close()
    assert sampler.position() == {
        "epoch": 0,
        "step": 1,
        "count": 10,
        "global_batch": 4,
        "seed": 1,
        "shuffle": 1,
        "window": 0,
        "drop_last": 0,
    }


def test_a_position_is_of_any_micro_batch_but_of_this_count_batch_and_seed():
    position = Sampler(10, 4, 2, seed=1).position()
    Sampler(10, 4, 1, seed=1).load(position)
    for other in (
        Sampler(11, 4, seed=1),
        Sampler(10, 5, seed=1),
        Sampler(10, 4, seed=2),
        Sampler(10, 4, 1, seed=1, shuffle=False),
    ):
        before = other.position()
        with pytest.raises(ValueError, match="it was saved with"):
            other.load(position)
        assert other.position() == before


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step": 3}, "step 3, where an epoch has 3 steps"),
        ({"step": -1}, "step: expected a whole number from 0 on, found -1"),
        ({"epoch": -1}, "epoch: expected a whole number from 0 on, found -1"),
        ({"seed": None}, "seed is missing"),
    ],
)
def test_positions_that_are_none(change, message):
    sampler = Sampler(10, 4, seed=1)
    position = {name: value for name, value in (sampler.position() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        sampler.load(position)


def test_no_samples():
    sampler = Sampler(0, 4)
    assert list(sampler.ahead()) == [] and sampler.steps_per_epoch == 0
    sampler.load(sampler.position())
    with pytest.raises(IndexError, match="an epoch of 0 samples has 0 steps"):
        sampler.at(0, 0)


@pytest.mark.parametrize("name", ["count", "global_batch", "micro_batch", "seed"])
def test_arguments(name):
    with pytest.raises(ValueError, match=f"{name}: expected an integer from . on, found -1"):
        Sampler(**{"count": 1, "global_batch": 1} | {name: -1})


def test_batches_hold_what_their_numbers_say():
    class Squares:
        def __len__(self):
            return 10

        def take(self, indices):
            return indices * 1.0, indices**2

    step = Sampler(10, 7, 3, seed=1).at(0, 0)
    batches = list(step.batches(Squares(), interleaved(3, 1, 2)))
    assert [batch.number for batch in batches] == [1]
    assert batches[0].samples.tolist() == step.parts[1].tolist()
    assert batches[0].x.tolist() == step.parts[1].tolist() and batches[0].y.tolist() == (step.parts[1] ** 2).tolist()


# Prefetch.


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    if set(threading.enumerate()) != before:
        gc.collect()  # ends the threads of iterators that nobody holds; a second for each test if always called
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_prefetch_changes_nothing(depth):
    assert list(prefetch(iter(range(20)), depth)) == list(range(20))
    assert list(prefetch([], depth)) == []


def test_prefetch_is_ahead_by_its_depth_and_no_further():
    made, third = [], threading.Event()

    def source():
        for number in range(10):
            made.append(number)
            if number == 3:
                third.set()
            yield number

    items = prefetch(source(), depth=3)
    assert made == [], "nothing starts before it is asked for"
    assert next(items) == 0
    assert third.wait(10), "items 1, 2 and 3 are made without being asked for"
    assert next(items) == 1
    assert len(made) <= 5
    items.close()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_what_the_source_raises_comes_in_its_place(depth):
    def source():
        yield from (0, 1)
        raise OSError("no third")

    items, seen = prefetch(source(), depth), []
    with pytest.raises(OSError, match="no third"):
        for item in items:
            seen.append(item)  # noqa: PERF402 (what came before the error stays)
    assert seen == [0, 1]
    with pytest.raises(StopIteration):
        next(items)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_stopping_early_closes_the_source(taken):
    closed = []

    def source():
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    items = prefetch(source(), 2)
    assert list(islice(items, taken)) == [1] * taken
    items.close()
    gc.collect()
    assert closed == ([True] if taken else [])


def test_an_iterator_that_nobody_holds_ends_its_thread():
    items = prefetch(iter(int, 1), 2)
    next(items)
    gone = weakref.ref(items)
    del items
    gc.collect()
    assert gone() is None  # and the fixture finds no thread


def test_an_error_while_the_source_is_closed():
    def source():
        try:
            yield from range(100)
        finally:
            raise OSError("cannot close")

    items = prefetch(source(), 1)
    next(items)
    with pytest.raises(OSError, match="cannot close"):
        items.close()


def test_depth_below_zero():
    with pytest.raises(ValueError, match="depth: expected an integer from 0 on, found -1"):
        prefetch([], -1)


PROGRAMS = {
    "held to the end": "next(items)",
    "Ctrl-C in the loop": "next(items)\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1000)",
    "Ctrl-C while it waits": "signal.setitimer(signal.ITIMER_REAL, 0.3)\nfor item in items: pass",
    "an error in the loop": "next(items)\nraise OSError('wanted')",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends(name):
    """However it does, no thread keeps it until the test's limit of time."""
    source = "range(10**9)" if "waits" not in name else "(time.sleep(0.2) for _ in range(10**9))"
    start = (
        "import os, signal, time\nfrom parallel.data.sampler import prefetch\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        f"items = prefetch({source}, 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", start + PROGRAMS[name]], capture_output=True, text=True, check=False)
    assert ("KeyboardInterrupt" in done.stderr) == ("Ctrl-C" in name)
    assert ("wanted" in done.stderr) == ("error" in name)
    assert (done.returncode == 0) == (name == "held to the end"), done.stderr

"""scripts/fuzz.py: sequences that are drawn step by step, and how they shrink."""

from argparse import ArgumentTypeError

import numpy as np
import pytest
from fuzzing import fuzz
from fuzzing.messages import WAYS
from fuzzing.presentations import HAS_TORCH, PRESENTATIONS, allocate_plain, presented
from fuzzing.refusals import refusal
from fuzzing.sequences import FORMS, MOVING, OTHERS, REDUCING, sequence
from mpi4py import MPI

from collectives import Communicator
from collectives.cli.arguments import numbers


def test_a_seed_draws_the_same_steps_whatever_else_is_drawn():
    few, many = sequence(3, 1, 10), sequence(3, 2, 50)
    assert few == many[:10]
    assert len(many) == 100 and len({step[2:] for step in many}) > 50


def test_seeds_draw_everything_there_is():
    steps = [step for seed in range(50) for step in sequence(seed, 2, 40)]
    assert {step.kind for step in steps} == {"call", *OTHERS}
    assert {step.method for step in steps if step.kind == "call"} == {"Barrier", *REDUCING, *MOVING}
    assert {step.form for step in steps if step.form} == set(FORMS)
    assert {step.method for step in steps if step.kind == "message"} == set(WAYS)


@pytest.mark.parametrize("comm", [MPI.COMM_SELF, Communicator(MPI.COMM_SELF)], ids=["native", "ours"])
def test_wrong_arguments_are_refused(comm):
    for pick in range(300):
        method, arguments, keywords, error = refusal(pick, 1)
        with pytest.raises(error):
            getattr(comm, method)(*arguments, **keywords)


@pytest.mark.parametrize("name", PRESENTATIONS)
@pytest.mark.parametrize("count", [0, 1, 6])
def test_presentations_are_of_the_array_itself(name, count):
    for typecode in PRESENTATIONS[name].typecodes:
        array = allocate_plain(count, np.dtype(typecode)) if name == "array.array" else np.zeros(count, typecode)
        obj = presented(array[:count].reshape(-1), frozenset([name]))
        assert name == "Fortran" or (name == "tensor" and not HAS_TORCH) or type(obj) is not np.ndarray
        MPI.COMM_SELF.Sendrecv(np.ones(count, typecode), 0, 0, obj, 0, 0)
        assert (array == 1).all()


@pytest.mark.parametrize("culprits", [{(0, 3)}, {(0, 3), (1, 17)}, {(0, 0), (0, 39), (1, 39)}], ids=len)
def test_a_seed_shrinks_to_the_steps_that_it_takes(monkeypatch, culprits):
    tried = []

    def run(self, seeds, only=()):
        tried.append(len(only))
        there = {(step.thread, step.number) for step in only}
        return 0, fuzz.Fault(seeds[0], "wrong") if culprits <= there else None

    monkeypatch.setattr(fuzz.Job, "run", run)
    steps, fault = fuzz.Job("mpiexec", 2, threads=2, calls=40, limit=1).shrink(5, seconds=60)
    assert {(step.thread, step.number) for step in steps} == culprits
    assert fault is not None and len(tried) < 100


@pytest.mark.parametrize("seeds", [[3, 5], [5, 3], [5, 3, 4]])
def test_a_fault_is_that_of_the_seed_begun_last(monkeypatch, seeds):
    class Launch(fuzz.Launch):
        def run(self, options, limit):
            return 3, ""

        def lines(self, rank):
            return [{"seed": seeds[0]}, {"seed": seeds[0], "calls": 4, "fault": ""}, {"seed": seeds[1]}]

        def stack(self, rank):
            return "a loop"

    monkeypatch.setattr(fuzz, "Launch", Launch)
    calls, fault = fuzz.Job("mpiexec", 2, threads=1, calls=4, limit=1).run(seeds)
    assert (calls, fault.seed) == (8, seeds[1])
    assert fault.text.count("stood in\na loop") == 2


def test_numbers_and_ranges_of_seeds():
    assert numbers("3,5") == [3, 5] and numbers("2:5") == [2, 3, 4]
    with pytest.raises(ArgumentTypeError, match="expected numbers"):
        numbers("5:5")

"""Decentralised layouts on threads: changes by the user, reads of the weights, and the clock of schedules."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads

from parallel import SGD, Adam, Engine, LRSchedule, nn

X = np.random.default_rng(0).normal(size=(12, 6))
Y = np.arange(12) % 5


def trained(ranks, program, optimizer=None, **settings):
    """Results of ``program(engine, model)`` on all ranks."""

    def rank_main(comm):
        model, made = nn.mlp([6, 8, 5]), (optimizer or (lambda: SGD(lr=0.1, momentum=0.9)))()
        options = {"micro_batch": 2, "batch": 12, "precision": "fp64"} | settings
        with Engine(model, nn.SoftmaxCrossEntropy(), comm, made, **options) as engine:
            return program(engine, model)

    return run_threads(ranks, rank_main)


def halve(model):
    model.items[0].parameters()[0].data[...] *= 0.5


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "settings", [{"layout": "local", "tau": 2}, {"layout": "group", "tau": 4, "group": 2}], ids=str
)
def test_changed_weights_are_read_at_once(settings, ranks, precision):
    """Before another step, in which they would be exchanged, and with unequal masses of the replicas."""

    def program(engine, model):
        found = []
        for _ in range(3):
            engine.step(X, Y)
            before = engine.state_dict()
            halve(model)
            after = engine.state_dict()
            changed = model.items[0].parameters()[0].name
            found += [(before[name] * (0.5 if name == changed else 1), after[name]) for name in before]
        return found

    for expected, found in trained(ranks, program, **settings, precision=precision)[0]:
        unit = {"fp64": 1e-14, "bf16": 2**-8}[precision]  # a changed replica is rounded; others of both signs cancel
        np.testing.assert_allclose(found, expected, rtol=0, atol=unit * np.abs(expected).max())


@pytest.mark.parametrize("layout", [{"layout": "local", "tau": 4}, {"layout": "group", "tau": 4, "group": 2}], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_reads_leave_the_training_unchanged(layout, ranks):
    """Replicas, and the optimizer states of each, are those of a training without reads, bit for bit."""

    def program(reads):
        def play(engine, model):
            for _ in range(5):
                engine.step(X, Y)
                if reads:
                    engine.state_dict()
                    engine.evaluate(X, Y)
            return [one.data.copy() for one in model.parameters()]

        return play

    results = [trained(ranks, program(reads), lambda: Adam(lr=0.1), **layout) for reads in (False, True)]
    for without, with_reads in zip(*results):
        assert all(np.array_equal(*pair) for pair in zip(without, with_reads))


def test_loaded_weights_leave_optimizer_states_unchanged():
    def program(engine, model):
        for _ in range(2):
            engine.step(X, Y)
        before = [vector.copy() for piece in engine.inner._engine.pieces for vector in piece.state.values()]
        engine.load_state_dict(engine.state_dict())
        after = [vector for piece in engine.inner._engine.pieces for vector in piece.state.values()]
        return all(np.array_equal(*pair) for pair in zip(before, after)) and any(vector.any() for vector in before)

    assert all(trained(2, program, lambda: Adam(lr=0.1), layout="local", tau=2))


def test_a_replica_without_samples_follows_the_schedule():
    schedule = LRSchedule("linear_warm_up", rate=0.4, warm_up=8)

    def program(engine, model):
        reports = [engine.step(X[:2], Y[:2]), engine.step(X, Y), engine.step(X[:2], Y[:2]), engine.step(X, Y)]
        return [report.rate for report in reports], engine.updates

    found = trained(3, program, lambda: SGD(lr=schedule), layout="local", tau=1)
    assert sorted(updates for _, updates in found) == [2, 2, 4]
    assert all(rates == [schedule(step) for step in range(4)] for rates, _ in found)


def test_mismatches_name_ranks_of_all():
    """Also those of a stage, whose ranks have numbers of their own."""

    def program(engine, model):
        if engine._comm.Get_rank() == 3:
            for place in engine.inner._parts[0].copied:
                place.parameter.data[...] += 1
        with pytest.raises(RuntimeError, match="of rank 3 differs from that of rank 2"):
            engine.step(X, Y)

    trained(4, program, layout="pp:1f1b", mesh="pp=2,tp=2", check_every=1)

"""Predictions of engines in every layout that threads can run: the scores of PyTorch in float64, whole on all ranks."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads
from support.differential.columns import COLUMNS
from support.differential.predictions import prediction_problem
from support.differential.rules import trainable
from support.differential.tasks import GPT, MIXTURE, MLP
from support.tiers import combinations

from parallel import AdamW, Engine, nn
from parallel.runtime.consistency_check import RankMismatch

CASES = [
    (task, column) for column in COLUMNS for task in (GPT, MLP, MIXTURE) if column.threads and trainable(task, column)
]


@pytest.mark.parametrize(("task", "column"), combinations(CASES), ids=lambda one: getattr(one, "name", str(one)))
def test_scores_of_every_layout(task, column):
    assert run_threads(column.ranks, lambda comm: prediction_problem(comm, task, column)) == [""] * column.ranks


def test_every_layout_is_there():
    assert {str(column) for column in COLUMNS if column.threads} == {str(column) for _, column in CASES}


X = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


def engine(comm, **options):
    return Engine(nn.mlp([6, 8, 4]), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), **options)


@pytest.mark.parametrize("layout", ["dp", "zero3", "local"])
def test_micro_batches_are_those_of_a_step(layout, monkeypatch):
    def main(comm):
        sizes = []
        forward = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x, run: (sizes.append(len(x)), forward(self, x, run))[1])
        with engine(comm, layout=layout, batch=6) as made:
            found = made.predict(X)
            return max(sizes), found

    for largest, found in run_threads(2, main):
        assert largest == 3 and found.shape == (40, 4) and found.dtype == np.float32


def test_the_model_keeps_what_was_trained():
    """After the engine, in layouts that have whole weights on every rank; a copy of it in all."""

    def main(comm, layout):
        with engine(comm, layout=layout) as made:
            made.step(X, np.arange(40) % 4)
            found, copy, model = made.predict(X), made.model_on_one_rank(), made.model
        with engine_of(copy, comm) as again:
            return found, copy, again.predict(X), model

    def engine_of(model, comm):
        return Engine(model, nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01))

    for layout in ("dp", "zero1", "zero3"):
        for found, copy, continued, model in run_threads(2, lambda comm, layout=layout: main(comm, layout)):
            np.testing.assert_allclose(copy(X), found, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(continued, found, rtol=1e-6, atol=1e-6)
            if layout != "zero3":
                np.testing.assert_allclose(model(X), found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((X[:0],), ValueError, "at least one sample"),
        ((np.float32(3),), TypeError, "x: expected an array of numbers"),
        ((np.zeros((4, 5), np.float32),), Exception, "0.1"),
        (
            (X, np.zeros((40, 3), np.float32)),
            ValueError,
            r"out: expected a writable array of float32 and shape \(40, 4",
        ),
        ((X, np.zeros((40, 4), np.int64)), ValueError, "out: expected a writable array of float32"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    """On all ranks; the engine goes on."""

    def main(comm):
        with engine(comm, layout="zero2") as made:
            with pytest.raises(error, match=text):
                made.predict(*arguments)
            return made.predict(X).shape

    assert run_threads(2, main) == [(40, 4)] * 2


def test_an_array_with_room():
    def main(comm):
        with engine(comm) as made:
            out = np.zeros((40, 8))[:, ::2]
            assert made.predict(X, out) is out
            return np.abs(out - made.predict(X)).max()

    assert run_threads(2, main) == [0, 0]


def test_an_array_on_one_rank():
    """The other rank has an array of its own, and an error is one of both."""

    def main(comm):
        with engine(comm) as made:
            expected = made.predict(X)
            out = np.zeros((40, 4), np.float32) if comm.Get_rank() else None
            with pytest.raises(ValueError, match="out: expected a writable array"):
                made.predict(X, None if out is None else out[:3])
            return np.array_equal(made.predict(X, out), expected)

    assert run_threads(2, main) == [True, True]


@pytest.mark.parametrize("layout", ["dp", "zero3", "local"])
def test_averages_on_one_rank_are_refused(layout):
    def main(comm):
        with engine(comm, layout=layout) as made:
            for call in (made.predict, made.state_dict):
                with pytest.raises(RankMismatch, match="ema"):
                    call(*([X] if call == made.predict else []), ema=bool(comm.Get_rank()))
            return made.predict(X).shape

    assert run_threads(2, main) == [(40, 4)] * 2


class Sum(nn.Operator):
    """Sum of a tuple of two arrays, one of integers."""

    def forward(self, x, run):
        return x[0] + x[1], None

    def backward(self, dy, saved, grads):
        return dy, None


def test_operators_of_tuples():
    """Outside of an engine too they get the arrays, not one of both."""
    assert Sum()((np.ones((3, 2)), np.arange(6).reshape(3, 2))).tolist() == [[1, 2], [3, 4], [5, 6]]

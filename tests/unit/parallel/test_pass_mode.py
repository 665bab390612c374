"""Uses of operators in a pass: each has random numbers and records of its own, in every division of the model."""

import numpy as np
import pytest

from parallel import nn
from parallel.engine.microbatch_pass import MicrobatchPass
from parallel.engine.operator_records import OperatorRecords
from parallel.nn import kernels
from parallel.nn.compose import Recompute, Residual
from parallel.nn.depths import MixtureOfDepths
from parallel.nn.operator import name_all
from parallel.nn.placement import PlacementError
from parallel.nn.router import Router, RouterSettings
from parallel.sharding.context.sequence_parts import works_by_part

SAMPLES = np.array([4, 1, 9])


def mode(**options):
    return nn.PassMode(seed=3, step=2, samples=SAMPLES, **options)


class Twice(nn.Operator):
    """Dropout of x, twice, side by side."""

    mixes = (-1,)

    def __init__(self, drop):
        self.drop = drop

    def forward(self, x, run):
        pairs = [self.drop.forward(x, run) for _ in range(2)]
        return np.concatenate([y for y, _ in pairs], -1), tuple(saved for _, saved in pairs)


def masks(model, run=None):
    """Result of the units of a model for ones, unit by unit."""
    name_all(model)
    x, run, found = np.ones((3, 40)), run or mode(), []
    for number, unit in enumerate(model.items):
        run.enter(model.items, number)
        found.append(unit.forward(x, run)[0])
    return found


def test_the_first_use_has_the_key_of_the_name():
    drop = nn.Dropout(0.5)
    y = masks(nn.Sequential([nn.ReLU(), nn.Sequential([nn.ReLU(), drop])]))[1]
    assert np.array_equal(y != 0, kernels.keep(SAMPLES, 40, 0.5, kernels.key_of(3, 2, "1.1")))


def test_one_object_at_several_places():
    drop = nn.Dropout(0.5)
    block = nn.Sequential([Residual(drop)])
    first, *others = masks(nn.Sequential([drop, block, nn.ReLU(), drop, block]))
    assert np.array_equal(first != 0, kernels.keep(SAMPLES, 40, 0.5, kernels.key_of(3, 2, "0")))
    every = [first, others[0] - 1, others[2], others[3] - 1]
    assert len({y.tobytes() for y in every}) == 4
    assert masks(nn.Sequential([block, nn.ReLU(), block]))[0].tobytes() != others[0].tobytes()


def test_one_object_twice_in_an_operator():
    left, right = np.split(masks(nn.Sequential([Twice(nn.Dropout(0.5))]))[0], 2, -1)
    assert np.array_equal(left != 0, kernels.keep(SAMPLES, 40, 0.5, kernels.key_of(3, 2, "0.drop")))
    assert 0.3 < (left * right != 0).mean() / (left != 0).mean() < 0.7  # independent


def test_units_do_not_depend_on_those_of_other_stages():
    """A stage with its own mode, as on another rank of a pipeline."""
    drop = nn.Dropout(0.5)
    model = nn.Sequential([Twice(drop), Twice(drop), drop])
    whole, run = masks(model), mode()
    run.enter(model.items, 2)
    assert np.array_equal(drop.forward(np.ones((3, 40)), run)[0], whole[2])
    run.enter(model.items, 1)
    assert np.array_equal(model.items[1].forward(np.ones((3, 40)), run)[0], whole[1])


def test_recomputed_uses_are_those_of_the_forward_pass():
    drop = nn.Dropout(0.5)
    inner = Recompute(nn.Sequential([drop, Recompute(nn.Sequential([drop, drop]))]))
    model = nn.Sequential([inner, nn.Sequential([drop]), inner])
    name_all(model)
    x, run, passed = np.ones((3, 40)), mode(), []
    for number, unit in enumerate(model.items):
        run.enter(model.items, number)
        passed.append(unit.forward(x, run))
    for unit, (y, saved) in reversed([*zip(model.items, passed)]):
        assert np.array_equal(unit.backward(np.ones((3, 40)), saved, lambda *_: None), y)
    assert len({y.tobytes() for y, _ in passed}) == 3


def test_router_noise_and_terms_of_several_uses():
    settings = RouterSettings(noise=True, jitter=0.1, balance_loss=0.1, z_loss=0.1)
    router = Router(4, 6, settings)
    for parameter in name_all(nn.Sequential([router, nn.ReLU(), router])):
        parameter.data = np.full(parameter.shape, 0.5)
    x, units, run = np.ones((3, 5, 4)), [router, nn.ReLU(), router], mode()
    saved = []
    for number in (0, 2):
        run.enter(units, number)
        saved.append(router.forward(x, run)[1])
    assert not np.array_equal(saved[0].noise, saved[1].noise) and not np.array_equal(saved[0].jitter, saved[1].jitter)
    assert len(run.terms) == 4 and len(run.records) == 4

    class Alone:
        def allgather(self, value):
            return [value]

    found = OperatorRecords([router], Alone()).end_step([run], True, Alone(), 1, True)
    assert found.terms["0 z"] == pytest.approx(sum(run.terms[use, "z"].sum() for use in ("0", "0 #0 in 2")))
    assert sum(found.counts["0 chosen"]) == 2 * 3 * 5 * 2


def test_depths_note_every_use():
    depths = MixtureOfDepths(nn.ReLU(), 4, 0.5)
    for parameter in name_all(nn.Sequential([depths])):
        parameter.data = np.full(parameter.shape, 0.5)
    run = mode()
    for _ in range(2):
        depths.forward(np.ones((3, 5, 4)), run)
    assert [*run.terms] == [("0", "predictor"), ("0 #1", "predictor")]


def test_a_pass_of_an_engine_counts_by_unit():
    drop = nn.Dropout(0.5)
    model = nn.Sequential([drop, drop])
    name_all(model)
    passes = MicrobatchPass(np.ones((3, 40)), np.ones(3), mode(), None)
    for number in range(2):
        passes.forward(model.items, number)
    first, second = (saved.reshape(3, 40) for saved in passes.saved)
    assert np.array_equal(first, kernels.keep(SAMPLES, 40, 0.5, kernels.key_of(3, 2, "0")))
    assert np.array_equal(second, kernels.keep(SAMPLES, 40, 0.5, kernels.key_of(3, 2, "0 #0 in 1")))


def test_random_operators_are_not_applied_part_by_part():
    """Their random numbers would be the same for all parts of a sequence."""
    with pytest.raises(PlacementError, match=r"Twice: expected .* to apply part by part, found Dropout"):
        works_by_part(Twice(nn.Dropout(0.5)))
    assert works_by_part(nn.Linear(3, 3))

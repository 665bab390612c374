"""Properties and values of parameters that users set, in every layout: those of one rank."""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.property_cases import CASES, expect_equal, trained

from parallel import Adam, AdamW, Engine
from parallel.nn.operator import ParameterNotGathered

FROZEN, STEPS = 4, 7
"""Steps of a frozen unit, and of the whole training."""
LONG_FROZEN = 12
"""Steps after which a step of Adam that counts them is less than half of the learning rate."""
LAYOUTS = {
    "dp": {"accumulate": 3},
    "zero1": {"micro_batch": 3},
    "zero3": {"reproducible": True},
    "pp": {},
    "pp:zb-h1": {"micro_batch": 5},
    "ps": {},
}
RULES = ("bsp", "ssp:2", "async")


def meshes(ranks):
    """Settings of all meshes of so many ranks that cut the model."""
    yield {"mesh": f"tp={ranks}", "tensor_shards": ranks if ranks > 1 else 2}
    yield {"mesh": f"tp={ranks}", "tensor_shards": 2 * ranks, "sequence_parallel": ranks in (1, 2, 4)}
    if ranks % 2 == 0:
        yield {"mesh": f"pp=2,tp={ranks // 2}", "layout": "pp:1f1b", "microbatches": 1}


@pytest.mark.parametrize("case", CASES)
def test_properties_are_those_of_one_rank(comm, case):
    expected = trained(MPI.COMM_SELF, case)
    for settings in meshes(comm.size):
        expect_equal(comm.allgather(trained(comm, case, **settings)), expected)


def layouts_for(ranks):
    return {name for name in LAYOUTS if not (name == "ps" and ranks < 2) and not (name.startswith("pp") and ranks > 5)}


def batch(step):
    x = np.random.default_rng(step).normal(size=(24, 7))
    return x, np.tanh(x[:, ::-1])


def engine(comm, layout, model, optimizer, **options):
    options = {"precision": "fp64", "batch": 24, "bucket_bytes": 3000, "first_bytes": 1} | options
    return Engine(model, tiny_models.Squares(), comm, optimizer, layout=layout, **options)


def released(comm, layout, load=None, save=None, steps=range(STEPS), **options):
    """State after steps of which a unit is frozen in the first ones, and the updates that it has missed."""
    model = tiny_models.model(tied=False)
    model.items[1].requires_grad_(steps[0] >= FROZEN)
    with engine(comm, layout, model, Adam(lr=0.01), **options) as made:
        if load:
            made.load(load)
        for step in steps:
            model.items[1].requires_grad_(step >= FROZEN)
            made.step(*batch(step))
        if save:
            made.save(save)
        return made.state_dict(), made.inner.state().get("missed")


@pytest.fixture(scope="module")
def released_alone():
    return released(MPI.COMM_SELF, "dp-naive")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_released_unit_counts_its_own_updates(comm, released_alone, layout, tmp_path):
    """Also after a checkpoint of this layout was loaded, in it and in another."""
    pytest.importorskip("safetensors")
    if layout not in layouts_for(comm.size):
        pytest.skip("servers and workers; five units")
    folder, options = Path(comm.bcast(str(tmp_path))), LAYOUTS[layout]
    expected, missed = released_alone
    assert set(missed.values()) == {FROZEN} and all(name.startswith("1.") for name in missed)
    released(comm, layout, save=folder, steps=range(FROZEN + 1), **options)
    rest = range(FROZEN + 1, STEPS)
    for found, count in (
        released(comm, layout, **options),
        released(comm, layout, load=folder, steps=rest, **options),
        released(comm, "zero2", load=folder, steps=rest),
    ):
        assert count == missed
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
def test_servers_count_updates_of_every_gradient(comm, rule):
    """The first step of a released unit is no longer than the learning rate, which several updates share."""
    if comm.size < 2:
        pytest.skip("servers and workers")
    model = tiny_models.model(tied=False)
    with engine(comm, "ps", model, Adam(lr=0.01), consistency=rule, accumulate=3) as made:
        model.items[1].requires_grad_(False)
        for step in range(LONG_FROZEN):
            made.step(*batch(step))
        before, missed = made.state_dict(), made.inner.state()["missed"]
        assert set(missed.values()) == {made.updates} and len(missed) == 4
        model.items[1].requires_grad_(True)
        updates = made.updates
        made.step(*batch(LONG_FROZEN))
        after = made.state_dict()
        moved = max(np.abs(after[name] - before[name]).max() for name in missed)
        assert 0.005 < moved <= 0.01 * (1.1 if made.updates > updates + 1 else 1 + 1e-9)
        assert made.inner.state()["missed"] == missed


@pytest.mark.parametrize("layout", ["local", "sgp"])
def test_replicas_take_changed_weights(comm, layout):
    model = tiny_models.model(tied=False)
    with engine(comm, layout, model, AdamW(lr=0.0)) as made:
        made.step(*batch(0))
        weight = model.items[0].weight
        comm.Barrier()
        weight.data[2:5] = 1.5
        comm.Barrier()
        made.step(*batch(1))
        np.testing.assert_allclose(made.state_dict()[weight.name][2:5], 1.5, rtol=1e-12)


def test_clients_take_changed_weights(comm):
    model = tiny_models.model(tied=False)
    clients = comm.size + 2
    options = {"clients": clients, "client_fraction": 1.0, "local_epochs": 1, "batch": 4}
    with engine(comm, "federated", model, AdamW(lr=0.0), **options) as made:
        x, y = batch(0)
        weight = model.items[0].weight
        weight.data[2:5] = 1.5
        mine = [(number, x[:4], y[:4], np.arange(4)) for number in range(comm.rank, clients, comm.size)]
        made.step(mine)
        np.testing.assert_allclose(made.state_dict()[weight.name][2:5], 1.5, rtol=1e-12)


def test_weights_of_servers_are_refused(comm):
    if comm.size < 2:
        pytest.skip("servers and workers")
    model = tiny_models.model(tied=False)
    weight = model.items[0].weight
    with engine(comm, "ps", model, AdamW(lr=0.0)) as made:
        for step in range(2):
            with pytest.raises(ParameterNotGathered, match=r"0.weight .* `Engine.load_state_dict"):
                weight.data[...] = 1
            made.step(*batch(step))
            made.evaluate(*batch(step))
        made.load_state_dict({"0.weight": np.full(weight.shape, 1.5)}, strict=False)
        assert (made.state_dict()["0.weight"] == 1.5).all()

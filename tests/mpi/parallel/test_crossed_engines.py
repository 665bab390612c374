"""Two open engines that ranks call in different orders: all ranks raise, with the places of both, within seconds."""

import time

import numpy as np
import pytest
from support.tiers import default

from collectives import Communicator
from parallel import AdamW, Engine, StepFailed, nn
from parallel.runtime import call_order
from parallel.runtime.consistency_check import RankLeft

pytestmark = pytest.mark.timeout(60)

X, Y = np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32), np.arange(24) % 4

LAYOUTS = {
    "dp": lambda ranks: {"layout": "dp"},
    "zero1": lambda ranks: {"layout": "zero1", "reproducible": True},
    "zero3": lambda ranks: {"layout": "zero3"},
    "pool": lambda ranks: {"pool": True},
    "pp": lambda ranks: {"layout": "pp:1f1b", "microbatches": 4},
    "tp": lambda ranks: {"mesh": f"tp={ranks}"},
    "bsp": lambda ranks: {"layout": "ps"},
    "async": lambda ranks: {"layout": "ps", "consistency": "async"},
    "local": lambda ranks: {"layout": "local", "tau": 2},
    "sgp": lambda ranks: {"layout": "sgp"},
    "sgp, late": lambda ranks: {"layout": "sgp", "tau": 1},
    "group": lambda ranks: {"layout": "group", "tau": 4},
    "hogwild": lambda ranks: {"layout": "hogwild"},
    "federated": lambda ranks: {"layout": "federated"},
}
REPLICAS = ("local", "sgp", "sgp, late", "group", "hogwild")


@pytest.fixture
def engine(comm):
    """engine(layout, on): open engine, of which a call takes long after 0.3 s."""

    def make(layout, on):
        if comm.size == 1:
            pytest.skip("no rank waits")
        if (layout == "tp" and 12 % comm.size) or (layout == "pp" and comm.size > 7):
            pytest.skip("not with these ranks")
        model, settings = nn.mlp([8, 12, 12, 12, 12, 12, 4]), {"batch": 24, **LAYOUTS[layout](comm.size)}
        return Engine(model, nn.SoftmaxCrossEntropy(), on, AdamW(lr=0.05), **settings)

    return make


@pytest.fixture
def soon(monkeypatch):
    """Calls take long after 0.3 s."""
    monkeypatch.setattr(call_order, "PATIENCE", 0.3)


def step(engine):
    if engine.settings.layout == "federated":
        return engine.step([(client, X[:2], Y[:2], range(2)) for client in engine.inner.train_share(20)])
    return engine.step(X, Y)


def train(engine):
    """Steps, in one of which ranks of every layout but hogwild wait for each other, and an evaluation."""
    for _ in range(6):
        step(engine)
    engine.evaluate(X, Y) if engine.settings.layout != "federated" else engine.evaluate([])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("second", default(["the same layout", "dp on a communicator of its own"], "the same layout"))
def test_engines_in_different_orders(comm, engine, soon, layout, second):
    ours = Communicator(comm)
    engines = [engine(layout, ours)]
    engines.append(engine(layout, ours) if second == "the same layout" else engine("dp", Communicator(comm)))
    for one in engines:
        step(one)
    comm.Barrier()
    began = time.monotonic()
    with pytest.raises(StepFailed, match=PLACES), engines[0], engines[1]:
        for one in engines if comm.rank else engines[::-1]:
            train(one)
    assert time.monotonic() - began < 2


PLACES = r"rank \d+ is in \w+ of engine \d+, rank \d+ in \w+ of engine \d+; expected calls in one order on all ranks"


@pytest.mark.ranks(3)
def test_engines_of_some_ranks(comm, engine):
    """The last two ranks differ in the order of an engine of their own; the others notice that they have left."""
    if comm.size < 3:
        pytest.skip("no other ranks")
    pair = comm.Split(comm.rank >= comm.size - 2, comm.rank)
    engines = [engine("dp", Communicator(pair)), engine("dp", Communicator(comm))]
    comm.Barrier()
    began = time.monotonic()
    with pytest.raises(StepFailed, match=PLACES), engines[0], engines[1]:
        for one in engines[::-1] if comm.rank == comm.size - 1 else engines:
            train(one)
    assert time.monotonic() - began < 3  # a second of patience
    pair.Free()


def test_ranks_of_unequal_speed(comm, engine, soon):
    """A rank that is late in one engine, and others that wait for it in another, are in one order."""
    first, second, third = (engine(layout, Communicator(comm)) for layout in ("sgp", "async", "dp"))
    with first, second, third:
        for _ in range(3):
            first.step(X, Y)
            if comm.rank == comm.size - 1:
                time.sleep(0.5)
            second.step(X, Y)
            third.step(X, Y)
        third.evaluate(X, Y)


@pytest.mark.parametrize("layout", REPLICAS)
def test_replicas_in_different_calls(comm, engine, soon, layout):
    made = engine(layout, Communicator(comm))
    made.step(X, Y)
    began = time.monotonic()
    with pytest.raises(StepFailed, match=r"rank \d (is in|has called) (step|evaluate|failures).*, rank \d "), made:
        for _ in range(6):
            made.evaluate(X, Y) if comm.rank == comm.size - 1 else made.step(X, Y)
    assert time.monotonic() - began < 2


def test_hogwild_notices_a_rank_that_has_left(comm, engine):
    made = engine("hogwild", Communicator(comm))
    with pytest.raises(RankLeft if comm.rank else KeyError, match="mine"), made:
        for _ in range(10_000):
            made.step(X, Y)
            if comm.rank == 0:
                raise KeyError("mine")
            began = time.monotonic()
    assert comm.rank == 0 or time.monotonic() - began < 2


def test_an_engine_that_its_rank_has_left(comm, engine, monkeypatch):
    """It refuses calls without patience."""
    monkeypatch.setattr(call_order, "PATIENCE", 100.0)
    made = engine("dp", Communicator(comm))
    with pytest.raises(RankLeft if comm.rank else ValueError, match="mine"):
        made.step(X, Y)
        if comm.rank == 0:
            made.inner.leave(ValueError("mine"))
            raise ValueError("mine")
        made.step(X, Y)
    began = time.monotonic()
    with pytest.raises(RankLeft, match="rank 0 has left the engine: ValueError: mine"), made:
        made.step(X, Y)
    assert time.monotonic() - began < 50

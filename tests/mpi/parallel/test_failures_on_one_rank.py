"""An exception on one rank, at any point of a training: all ranks raise, with the rank and the cause; none waits.

A rank that waits ends the test by its limit of time.
"""

import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from support.tiers import default

from collectives import Communicator
from parallel import AdamW, Engine, nn
from parallel.asynchronous.server.messages import MessageKind
from parallel.asynchronous.server.server_loop import HANDLERS
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.models import transformer
from parallel.nn.norm import LayerNorm
from parallel.nn.router import RouterSettings
from parallel.pipeline import runner
from parallel.runtime.consistency_check import RankLeft, StepFailed

pytestmark = pytest.mark.ranks(3)

TOKENS, LENGTH, WIDTH, SAMPLES = 24, 12, 12, 12


class Exit(BaseException):
    """An exception of a user's own that is no Exception."""


ERRORS = (ValueError, SystemExit, KeyboardInterrupt, MemoryError, RecursionError, StopIteration, IndexError, Exit)


class Fault:
    """Point of the training at which this rank raises an error; copies of a model share it."""

    def __init__(self):
        self.at, self.error = "", ValueError

    def pass_(self, point):
        if point == self.at:
            raise self.error("it is broken")

    def __deepcopy__(self, memo):
        return self


class FaultyNorm(LayerNorm):
    """Norm that fails, also where a forward pass on zeros finds its outline."""

    outline = nn.Operator.outline

    def __init__(self, fault):
        super().__init__(WIDTH)
        self.fault = fault

    def forward(self, x, run):
        self.fault.pass_("forward" if run.training else "forward in evaluation")
        self.fault.pass_("any forward")
        return super().forward(x, run)

    def backward(self, dy, saved, grads):
        self.fault.pass_("backward")

        def sink(parameter, compute):
            self.fault.pass_("sink")

            def write(out):
                self.fault.pass_("gradient")
                return compute(out)

            grads(parameter, write)

        return super().backward(dy, saved, sink)


class FaultyLoss(nn.SoftmaxCrossEntropy):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, y, targets):
        self.fault.pass_("loss")
        return super().forward(y, targets)

    def backward(self, scale, saved):
        self.fault.pass_("loss backward")
        return super().backward(scale, saved)

    def count(self, targets):
        self.fault.pass_("count")
        return super().count(targets)


class FaultyData:
    """Data set; each rank loads its own share."""

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return SAMPLES

    def take(self, indices):
        self.fault.pass_("take")
        return tuple(array[indices] for array in batch())


def batch():
    tokens = np.random.default_rng(0).integers(0, TOKENS, (SAMPLES, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def model(fault, experts):
    router = RouterSettings(balance_loss=0.1, capacity=1.0)
    made = transformer(TOKENS, LENGTH, 4, 12, WIDTH, experts=ExpertLayers(12, router, every=2) if experts else None)
    for block in made.items[1:-1]:
        block.items[0].inner.items[0] = FaultyNorm(fault)
    made.items[-1].items[0] = FaultyNorm(fault)

    def hook(gradient):
        fault.pass_("hook")

    for parameter in made.parameters():
        parameter.register_hook(hook)
    return made


LAYOUTS = {
    "dp": lambda ranks: {"layout": "dp"},
    "zero1": lambda ranks: {"layout": "zero1", "reproducible": True},
    "zero3": lambda ranks: {"layout": "zero3"},
    "pool": lambda ranks: {"pool": True},
    "pp": lambda ranks: {"layout": "pp:1f1b", "stages": ranks, "microbatches": 4},
    "zb": lambda ranks: {"layout": "pp:zb-h1", "stages": ranks, "microbatches": 4},
    "tp": lambda ranks: {"mesh": f"tp={ranks}"},
    "sp": lambda ranks: {"mesh": f"tp={ranks}", "sequence_parallel": True},
    "cp": lambda ranks: {"mesh": f"cp={ranks}"},
    "ep": lambda ranks: {"mesh": f"dp={ranks},ep={ranks}"},
    "ps": lambda ranks: {"layout": "ps"} if ranks > 1 else {"layout": "dp"},
    "ssp": lambda ranks: {"layout": "ps", "consistency": "ssp:1"} if ranks > 1 else {"layout": "dp"},
    "local": lambda ranks: {"layout": "local", "tau": 2},
    "sgp": lambda ranks: {"layout": "sgp"},
    "hogwild": lambda ranks: {"layout": "hogwild"},
    "group": lambda ranks: {"layout": "group", "tau": 4},
    "pp, tp": lambda ranks: {"layout": "pp:1f1b", "mesh": f"pp=2,tp={ranks // 2}", "microbatches": 3},
    "zero3, cp": lambda ranks: {"layout": "zero3", "mesh": f"dp=2,cp={ranks // 2}"},
    "cp, tp": lambda ranks: {"mesh": f"cp=2,tp={ranks // 2}"},
}
DIVIDED = ("pp, tp", "zero3, cp", "cp, tp")
"""Layouts for an even number of ranks above 2."""

CUT = ("tp", "sp", "pp, tp", "cp, tp")
"""Layouts whose vocabulary is cut; a user's own loss is refused there."""

REPLICAS = ("local", "sgp", "hogwild", "group")
SERVERS = ("ps", "ssp")


class Case:
    """Engine with a fault on one rank: the last one, which computes in every layout."""

    def __init__(self, comm, layout):
        ranks = comm.Get_size()
        if layout in DIVIDED and (ranks < 4 or ranks % 2):
            pytest.skip("needs an even number of ranks above 2")
        self.comm, self.layout, self.fault = comm, layout, Fault()
        self.victim = ranks - 1
        self.is_victim = comm.Get_rank() == self.victim
        options = {"batch": SAMPLES, "micro_batch": 1, **LAYOUTS[layout](ranks)}
        if "pp" in options.get("layout", ""):
            del options["micro_batch"]
        loss = nn.SoftmaxCrossEntropy() if layout in CUT else FaultyLoss(self.fault)
        self.engine = Engine(model(self.fault, layout == "ep"), loss, comm, AdamW(lr=self.rate), **options)
        self.data = FaultyData(self.fault)

    def rate(self, step):
        self.fault.pass_("schedule")
        return 0.01

    def arm(self, point, error=ValueError):
        if self.is_victim:
            self.fault.at, self.fault.error = point, error

    def step(self):
        """Steps until an error. Replicas raise it some steps later; if ranks do not wait in steps, when they meet."""
        for _ in range(4):
            self.engine.step(next(iter(self.engine.batches(self.data))))
        if self.layout == "hogwild":
            self.engine.evaluate(*batch())

    def measure(self, scores, targets):
        self.fault.pass_("measure")
        return 0.0

    def expect(self, error, call, message=None):
        """The call raises the error itself on its rank if it ends programs, else StepFailed with rank and cause."""
        own = self.is_victim and not issubclass(error, Exception)
        with pytest.raises(error if own else (StepFailed, RuntimeError)) as found:
            call()
        if not own:
            text = str(found.value)
            assert error.__name__ in text or error in (ValueError, MemoryError, IndexError, RecursionError), text
            assert self.comm.Get_size() == 1 or f"rank {self.victim}" in text, text
            assert "it is broken" in text, text


def calls(case, point):
    """Call in which a rank passes a point."""
    x, y = batch()
    if point in ("measure", "forward in evaluation"):
        return partial(case.engine.evaluate, x, y, case.measure)
    return case.step


POINTS = (
    "forward",
    "any forward",
    "backward",
    "sink",
    "gradient",
    "hook",
    "loss",
    "loss backward",
    "count",
    "schedule",
    "take",
)
TESTS = ("measure", "forward in evaluation")


@pytest.fixture
def make(comm):
    """make(layout): case, whose engine is freed if all ranks have the same errors."""
    return partial(Case, comm)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("point", [*POINTS, *TESTS])
def test_an_error_in_a_call(make, layout, point):
    if layout in CUT and point in ("loss", "loss backward", "count"):
        pytest.skip("the loss is not the user's")
    case = make(layout)
    for error in errors_at(layout, point):
        case.arm(point, error)
        case.expect(error, calls(case, point))
        case.fault.at = ""
    if layout not in SERVERS:
        case.engine.step(next(iter(case.engine.batches(case.data))))
    case.engine.close()


def errors_at(layout, point):
    """Errors to raise one after another; an engine with servers is unusable after the first."""
    if layout in SERVERS:
        return [SystemExit if point in ("count", "forward") else ValueError]
    return ERRORS if point == "forward" else [ValueError, SystemExit]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_in_a_function_that_writes(make, layout):
    case = make(layout)
    case.arm("write")

    def write(comm, slices):
        case.fault.pass_("write")
        return len(list(slices))

    expected = ValueError if case.is_victim else RuntimeError
    match = "it is broken" if case.is_victim or case.comm.Get_size() == 1 else rf"it is broken \(rank {case.victim}\)"
    with pytest.raises(expected, match=match):
        case.engine.inner.save(write)
    case.fault.at = ""
    assert sum(case.comm.allgather(case.engine.inner.save(write))) > 0
    case.engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "layout", default([name for name in LAYOUTS if name not in (*REPLICAS, *SERVERS)], "dp", "zero3", "pp", "tp", "ep")
)
def test_ranks_in_different_calls(make, layout):
    case = make(layout)
    if case.comm.Get_size() == 1:
        pytest.skip("nobody waits")
    x, y = batch()
    case.engine.step(x, y)
    with pytest.raises(StepFailed, match=f"rank 0 has called (step|draw), rank {case.victim} evaluate"):
        case.engine.evaluate(x, y) if case.is_victim else case.engine.step(x, y)
    case.engine.step(x, y)
    case.engine.close()


def leave(case, error):
    """Leave the engine's block by an exception between two calls."""
    with pytest.raises(error), case.engine:
        case.step()
        raise error("out of luck")


NEXT_CALLS = {
    "step": lambda engine, folder: [engine.step(*batch()) for _ in range(4)],
    "evaluate": lambda engine, folder: engine.evaluate(*batch()),
    "save": lambda engine, folder: engine.save(folder),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "load_state_dict": lambda engine, folder: engine.load_state_dict({}),
    "load": lambda engine, folder: engine.load(folder),
    "close": lambda engine, folder: engine.close(),
    "end": lambda engine, folder: engine.__exit__(None, None, None),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", default(LAYOUTS, "dp", "zero3", "pool", "pp", "ep", "ps", "local", "hogwild"))
@pytest.mark.parametrize("name", NEXT_CALLS)
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_rank_that_leaves_between_two_calls(make, layout, name, error, folder):
    case = make(layout)
    if case.comm.Get_size() == 1:
        pytest.skip("nobody waits")
    case.arm("")
    if case.is_victim:
        return leave(case, error)
    why = rf"rank {case.victim} has left the engine: {error.__name__}: out of luck"
    with pytest.raises(RankLeft, match=why), case.engine:
        case.step()
        NEXT_CALLS[name](case.engine, folder)
    with pytest.raises(RuntimeError, match="evaluate: expected an open engine"):
        case.engine.evaluate(*batch())


SYNCHRONOUS = [layout for layout in LAYOUTS if layout not in (*REPLICAS, *SERVERS, "pool")]
EXCHANGES = "Allreduce", "Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Reduce_scatter", "Bcast"


def break_exchange(monkeypatch, number):
    """Let the exchange with this number fail on this rank, before it begins."""
    left = [number]

    def failing(name, method):
        def call(comm, *arguments, **keywords):
            left[0] -= 1
            if not left[0]:
                error = MemoryError("it is broken")
                comm._break_off("blocking", error, name)  # as in every collective
                raise error
            return method(comm, *arguments, **keywords)

        return call

    for name in EXCHANGES:
        monkeypatch.setattr(Communicator, name, failing(name, getattr(Communicator, name)))


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", default(SYNCHRONOUS, "dp", "zero3", "pp", "cp", "ep"))
@pytest.mark.parametrize(
    "number", [1, pytest.param(2, marks=pytest.mark.full), 3, pytest.param(8, marks=pytest.mark.full)]
)
def test_an_error_in_the_middle_of_a_call(comm, monkeypatch, layout, number):
    """What a rank cannot make up for by zeros, as an exchange that fails, ends the waits of the others."""
    case = Case(Communicator(comm), layout)  # which no call can use afterwards
    case.step()
    if case.is_victim:
        break_exchange(monkeypatch, number)
    try:
        case.step()
    except (MemoryError, StepFailed) as error:
        if case.comm.Get_size() > 1:
            assert case.is_victim or f"rank {case.victim}" in str(error), error
        assert "it is broken" in str(error), error
    finally:
        monkeypatch.undo()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", ["pp", "zb"])
def test_an_error_of_a_stage_that_sends_nothing_more(comm, monkeypatch, layout):
    """The other stages wait for its messages, asleep between polls for most of the time, and have a notice of it."""

    def broken(array):
        time.sleep(0.1)
        raise MemoryError("it is broken")

    case = Case(Communicator(comm), layout)
    case.step()
    if case.is_victim:
        monkeypatch.setattr(runner, "to_host", broken)
    with pytest.raises((MemoryError, StepFailed), match="it is broken") if comm.size > 1 else nullcontext():
        case.step()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "async"])
def test_a_worker_that_has_missed_a_step(comm, consistency):
    """As after an exception that the program has caught on this rank alone."""
    if comm.size == 1:
        pytest.skip("no workers")
    x, y = np.eye(12, dtype=np.float32), np.arange(12) % 4
    made = Engine(
        nn.mlp([12, 8, 4]), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), layout="ps", consistency=consistency
    )
    with pytest.raises(StepFailed, match=r"rank \d waits for all ranks after 2 steps, and a server for step 3"), made:
        made.step(x, y)
        if comm.rank != comm.size - 1:
            made.step(x, y)
        made.step(x, y)
        made.evaluate(x, y)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("consistency", ["bsp", "async"])
def test_workers_that_have_all_missed_a_step(comm, monkeypatch, consistency):
    """Both servers are still in the step before, and wait for each other's sums, as requests to rest arrive."""
    if comm.size < 3:
        pytest.skip("no worker beside two servers")

    def late(loop, envelope):
        time.sleep(0.1 if comm.rank == 0 else 0.3)
        tick(loop, envelope)
        time.sleep(0.0 if comm.rank == 0 else 0.3)

    tick = HANDLERS[MessageKind.TICK]
    monkeypatch.setitem(HANDLERS, MessageKind.TICK, late)
    x, y = np.eye(12, dtype=np.float32), np.arange(12) % 4
    made = Engine(
        nn.mlp([12, 8, 4]), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), layout="ps", servers=2,
        consistency=consistency,
    )  # fmt: skip
    with pytest.raises(StepFailed, match=r"rank \d waits for all ranks after 1 steps, and a server for step 2"), made:
        made.step(x, y)
        if comm.rank < 2:
            made.step(x, y)
        made.evaluate(x, y)

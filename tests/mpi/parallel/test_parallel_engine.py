"""Every layout does what one rank does alone, to the last bit where that is asked for; and nobody is left waiting."""

import math
import signal

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.training_states import differing, whole

from collectives import Communicator
from collectives.runtime.execution.progress import active_requests
from parallel.data.work_queue import WorkQueue
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import BLOCK
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.nn.operator import ParameterNotGathered
from parallel.optim.optimizers import LAMB, SGD, AdamW
from parallel.runtime.consistency_check import ParameterMismatch, RankMismatch, StepFailed
from parallel.runtime.signals import InterruptFlag

pytestmark = pytest.mark.ranks(3)

STEPS = (7, 1, 4, 3)
"""Micro-batches of each step: more than ranks, fewer than ranks, not divisible."""

layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def alone():
    with Communicator(MPI.COMM_SELF) as comm:
        yield comm


def engine(comm, layout="dp", model=None, optimizer=None, **settings):
    """Buckets small enough that there are several."""
    settings = {"first_bytes": 1, "bucket_bytes": 5000, **settings}
    optimizer = optimizer or SGD(rate=0.05, momentum=0.9)
    return DataParallelEngine(
        model or tiny_models.model(), tiny_models.Squares(), comm, optimizer, Settings(layout=layout, **settings)
    )


def trained(comm, layout, steps=STEPS, **settings):
    """The state, the reports and an evaluation after some steps."""
    with engine(comm, layout, **settings) as made:
        reports = [made.step(tiny_models.batches(made.share(count), step)) for step, count in enumerate(steps)]
        return (
            whole(comm, made),
            reports,
            made.evaluate(tiny_models.batches(made.share(5), 99), lambda scores, y: len(y)),
        )


@pytest.fixture(scope="module")
def reference(alone):
    """What one rank comes to, by settings."""
    known = {}

    def find(**settings):
        key = tuple(sorted(settings.items()))
        if key not in known:
            known[key] = trained(alone, "dp-naive", **settings)
        return known[key]

    return find


# ------------------------------------------------------------------------------------------ the same as one rank


@layouts
def test_as_one_rank_does(comm, layout, reference):
    state, reports, evaluation = trained(comm, layout, precision="fp64", clip=3.0)
    expected, expected_reports, expected_evaluation = reference(precision="fp64", clip=3.0)
    for name, values in expected.items():
        np.testing.assert_allclose(state[name], values, rtol=1e-12, atol=1e-12, err_msg=name)
    for report, other in zip(reports, expected_reports):
        assert report.count == other.count and report.step == other.step
        assert report.loss == pytest.approx(other.loss, rel=1e-12)
        assert report.norm == pytest.approx(other.norm, rel=1e-12)
    assert evaluation.loss == pytest.approx(expected_evaluation.loss, rel=1e-12)
    assert evaluation.measure == 1 and evaluation.count == 25


@layouts
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_bits(comm, layout, precision, reference):
    settings = {"precision": precision, "clip": 1.0, "reproducible": True}
    expected, expected_reports, expected_evaluation = reference(**settings)
    state, reports, evaluation = trained(comm, layout, model=tiny_models.model(recompute=True), **settings)
    assert differing(state, expected) == []
    assert evaluation == expected_evaluation
    for report, other in zip(reports, expected_reports):
        assert (report.loss, report.norm, report.skipped) == (other.loss, other.norm, other.skipped)
    assert any(report.skipped for report in reports) == (precision == "fp16")  # its first loss scale is too large


@layouts
def test_the_same_bits_of_a_transformer(comm, layout, alone):
    def tokens(numbers):
        for number in numbers:
            text = np.random.default_rng(number).integers(0, 30, (2, 9))
            yield number, text[:, :-1], text[:, 1:], np.arange(2) + 2 * number

    def after(comm, layout, recompute):
        model = transformer(30, 8, 2, 2, 16, dropout=0.2, recompute=recompute)
        settings = {"layout": layout, "reproducible": True, "bucket_bytes": 4000, "first_bytes": 1000}
        with DataParallelEngine(model, SoftmaxCrossEntropy(), comm, LAMB(rate=0.01), Settings(**settings)) as made:
            for _ in range(3):
                made.step(list(tokens(made.share(5))))
            assert made.ledger.allocated["parameters"] == made.ledger.predicted["parameters"]
            return whole(comm, made)

    assert differing(after(comm, layout, True), after(alone, "dp-naive", False)) == []


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("layout", ["dp-bucket", "dp"])
def test_norms_of_tensors_whatever_the_pieces(comm, layout, in_pieces, monkeypatch):
    """LAMB's, of several buckets: also where a rank's pieces of the vector are not in the vector's order."""

    class InPieces(LAYOUTS[layout].gradients):
        def spans(self):
            return [bucket.span for bucket in self.buckets]

    if in_pieces:
        monkeypatch.setitem(LAYOUTS, layout, LAYOUTS[layout]._replace(gradients=InPieces))

    def after(comm, layout):
        with engine(comm, layout, optimizer=LAMB(rate=0.1), reproducible=True) as made:
            for step, count in enumerate(STEPS):
                made.step(tiny_models.batches(made.share(count), step))
            return whole(comm, made)

    assert differing(after(comm, layout), after(comm, "dp-naive")) == []


@layouts
def test_whoever_has_which(comm, layout, alone):
    """In reproducible training it does not matter how micro-batches are dealt out, or in which order they come."""
    turns = np.random.default_rng(5).integers(0, comm.size, 9)
    with engine(comm, layout, reproducible=True) as made, engine(alone, reproducible=True) as other:
        mine = np.flatnonzero(turns == comm.rank)[::-1].tolist()
        assert made.step(tiny_models.batches(mine)).loss == other.step(tiny_models.batches(range(9))).loss
        assert differing(whole(comm, made), whole(alone, other)) == []


@layouts
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_knows_no_layout(comm, layout, precision, alone, reference):
    """What one layout has trained another one goes on with."""
    settings = {"precision": precision, "reproducible": True}
    with engine(alone, "dp-naive", **settings) as before:
        for step, count in enumerate(STEPS[:2]):
            before.step(tiny_models.batches(range(count), step))
        saved, numbers = whole(alone, before), before.state()
    with engine(comm, layout, seed=8, **settings) as made:  # first values are others
        made.load(numbers)
        for piece in made.tensor_slices():
            piece.array[...] = saved[piece.name][piece.start : piece.start + len(piece.array)]
        made.refresh()
        for step, count in enumerate(STEPS[2:], 2):
            assert made.step(tiny_models.batches(made.share(count), step)).step == step
        assert differing(whole(comm, made), reference(**settings)[0]) == []


@pytest.mark.parametrize("layout", ["dp", "zero3"])
def test_a_model_that_is_one_unit_or_nothing(comm, layout, alone):
    with (
        engine(comm, layout, tiny_models.Dense(7, 7)) as made,
        engine(alone, "dp-naive", tiny_models.Dense(7, 7)) as other,
    ):
        mine, theirs = made.step(tiny_models.batches(made.share(3))), other.step(tiny_models.batches(range(3)))
        assert mine.loss == pytest.approx(theirs.loss)
    with engine(comm, layout, Sequential([])) as made:
        assert made.step(tiny_models.batches(made.share(3))).count == 15


# ------------------------------------------------------------------------------------------ when things are exchanged


def communications(made, *names):
    return [event for event in made.events if event.kind == "communication" and event.name in names]


def assert_all_after_the_backward(made):
    ends = max((event.end for event in made.events if event.name == "backward"), default=0.0)
    exchanges = communications(made, "allreduce", "start", "reduce_scatter")
    assert exchanges and all(event.start >= ends for event in exchanges)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["dp-naive", "dp-bucket", "dp", "zero1"])
@pytest.mark.parametrize("count", [1, 5])
def test_one_exchange_a_step_however_many_micro_batches(comm, layout, count):
    with engine(comm, layout, trace=True) as made:
        made.step(tiny_models.batches(made.share(count * comm.size)))
        exchanges = communications(made, "allreduce", "start", "reduce_scatter")
        buckets = [event.about["bucket"] for event in exchanges]
        assert buckets == list(range(1 if layout == "dp-naive" else 6))


@pytest.mark.ranks(2)
def test_allreduces_start_before_the_backward_ends(comm):
    with engine(comm, "dp", trace=True) as made:
        report = made.step(tiny_models.batches(made.share(2 * comm.size)))
        ends = max(event.end for event in made.events if event.name == "backward")
        starts = [event.end for event in communications(made, "start")]
        flights = [event for event in made.events if event.kind == "flight"]
        assert len(starts) == len(flights) == 6
        assert sum(start < ends for start in starts) >= 5
        assert 0 < report.communication < report.seconds
    with engine(comm, "dp-naive", trace=True) as made:
        made.step(tiny_models.batches(made.share(2 * comm.size)))
        assert_all_after_the_backward(made)
    with engine(comm, "dp-naive") as made:
        made.step(tiny_models.batches(made.share(comm.size)))
        assert not made.events


@pytest.mark.ranks(2)
def test_weights_are_at_hand_while_they_are_used(comm):
    """Of stage 3: those of a unit and of what is tied to it, and nobody else's."""
    seen = []

    class Probe(tiny_models.Dense):
        def forward(self, x, run):
            at_hand = []
            for unit in units:
                try:
                    at_hand.append(unit.bias.data is not None)
                except ParameterNotGathered:
                    at_hand.append(False)
            seen.append(at_hand)
            return super().forward(x, run)

    units = [Probe(7, 7) for _ in range(4)]
    with engine(comm, "zero3", Sequential(units), trace=True) as made:
        made.step(tiny_models.batches(made.share(comm.size)))
        assert seen == np.eye(4, dtype=bool).tolist()
        gathered = [event.about["bucket"] for event in communications(made, "start gather")]
        assert gathered == [3, 2, 1, 0, 2, 3]  # two units stay, and are not gathered again for the backward


# ------------------------------------------------------------------------------------------ ranks without work


@layouts
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_step_for_one_rank_only(comm, layout, reproducible, alone):
    last = comm.size - 1
    with engine(comm, layout, precision="fp64", reproducible=reproducible) as made:
        report = made.step(tiny_models.batches([0, 1, 2] if comm.rank == last else []))
        with engine(alone, precision="fp64", reproducible=reproducible) as other:
            assert report.loss == pytest.approx(other.step(tiny_models.batches([0, 1, 2])).loss, rel=1e-12)
            expected = whole(alone, other)
        for name, values in whole(comm, made).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-12, atol=1e-12)
        assert made.evaluate(tiny_models.batches([0] if comm.rank == last else [], 1)).count == 5


@pytest.mark.ranks(2)
@layouts
def test_nothing_to_learn(comm, layout):
    with engine(comm, layout, clip=1.0) as made:
        before = whole(comm, made)
        report = made.step([])
        assert report.count == 0 and report.skipped and math.isnan(report.loss)
        assert math.isnan(made.evaluate([]).loss)
        assert differing(before, whole(comm, made)) == []
        assert (made.steps, made.updates) == (1, 0)


# ------------------------------------------------------------------------------------------ trouble


@pytest.mark.ranks(2)
@layouts
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_loss_that_is_no_number(comm, layout, reproducible):
    with engine(comm, layout, reproducible=reproducible) as made:
        before = whole(comm, made)
        mine = tiny_models.batches(made.share(comm.size + 1))
        for number, x, _, _ in mine:
            x[0] = np.nan if number == comm.size else x[0]
        where = [
            rank for rank in range(comm.size) if comm.size in comm.allgather(list(made.share(comm.size + 1)))[rank]
        ]
        with pytest.raises(StepFailed, match=rf"nothing was updated; rank {where[0]}: .*micro-batch .* step 0"):
            made.step(mine)
        assert differing(before, whole(comm, made)) == []
        assert made.step(tiny_models.batches(made.share(3))).loss > 0


@pytest.mark.ranks(2)
@layouts
@pytest.mark.parametrize("when", ["forward", "backward", "before"])
def test_one_rank_fails(comm, layout, when, alone):
    """Its model raises an exception, or its batch is wrong: all hear of it, and go on as if nothing had been."""
    last = comm.size - 1

    class Fails(tiny_models.Dense):
        _broken = None

        def forward(self, x, run):
            if self._broken == "forward":
                raise ArithmeticError("no more")
            return super().forward(x, run)

        def backward(self, dy, saved, grads):
            if self._broken == "backward":
                raise ArithmeticError("no more")
            return super().backward(dy, saved, grads)

    model = tiny_models.model()
    model.items[2] = Fails(20, 20)
    with engine(comm, layout, model, precision="fp64") as made:
        before, mine = whole(comm, made), tiny_models.batches(made.share(2 * comm.size))
        model.items[2]._broken = when if comm.rank == last else None
        if when == "before" and comm.rank == last:
            mine[0] = (*mine[0][:2], mine[0][2][:2], mine[0][3])
        told = rf"rank {last}: (ArithmeticError: no more|ValueError: micro-batch \d+ has 5 inputs, 2 targets)"
        with pytest.raises(StepFailed, match=told):
            made.step(mine)
        model.items[2]._broken = None
        assert differing(before, whole(comm, made)) == []
        report = made.step(tiny_models.batches(made.share(4)))
    model = tiny_models.model()
    model.items[2] = Fails(20, 20)
    with engine(alone, "dp-naive", model, precision="fp64") as other:
        assert report.loss == pytest.approx(other.step(tiny_models.batches(range(4))).loss, rel=1e-12)


class Overflows(tiny_models.Squares):
    """The loss is finite, the gradient is not."""

    def backward(self, scale, saved):
        return saved * saved.dtype.type(np.inf)


@pytest.mark.ranks(2)
@layouts
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_no_number(comm, layout, clip):
    with DataParallelEngine(
        tiny_models.model(), Overflows(), comm, SGD(rate=0.1), Settings(layout=layout, clip=clip)
    ) as made:
        before = whole(comm, made)
        with pytest.raises(StepFailed, match=r"nothing was updated; the gradient of 0\.weight, .*not finite in step 0"):
            made.step(tiny_models.batches(made.share(2)))
        assert made.updates == 0 and differing(before, whole(comm, made)) == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_norm_that_is_no_number(comm, clip, monkeypatch):
    """Squares of every block are finite, their sum is not: no step is made, least of all one of length 0."""
    monkeypatch.setattr(
        "parallel.engine.data_parallel.sharded_optimizer.block_squares",
        lambda gradient: np.full(len(gradient) // BLOCK, 1e308),
    )
    with engine(comm, precision="fp64", clip=clip) as made:
        with pytest.raises(StepFailed, match=r"nothing was updated; the norm of the gradient is not finite in step 0"):
            made.step(tiny_models.batches(made.share(2)))
        assert made.updates == 0
    with engine(comm, precision="fp16", clip=clip) as made:
        report = made.step(tiny_models.batches(made.share(2)))
        assert (report.skipped, report.norm, made.updates) == (True, math.inf, 0)


@pytest.mark.ranks(2)
def test_a_loss_scale_that_can_do_no_more(comm):
    with DataParallelEngine(tiny_models.model(), Overflows(), comm, SGD(rate=0.1), Settings(precision="fp16")) as made:
        made.scaling.value, made.scaling.patience = 2.0, 2
        for _ in range(3):  # at 2, and twice at 1
            assert made.step(tiny_models.batches(made.share(2))).skipped
        with pytest.raises(StepFailed, match=r"4 steps in a row, in the last 3 of them .* floor 1\.0, in step 3"):
            made.step(tiny_models.batches(made.share(2)))


@pytest.mark.ranks(2)
def test_models_that_differ(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(RankMismatch, match=r"rank 0 has parameter 0.weight: \(7, 20\); rank 1 has .*\(7, 21\)"):
        engine(comm, model=tiny_models.model(20 + comm.rank))
    with pytest.raises(RankMismatch, match=r"rank 0 has layout: zero1; ranks? 1\b.* ha(s|ve) layout: zero2"):
        engine(comm, "zero1" if comm.rank == 0 else "zero2")
    with pytest.raises(RankMismatch, match=r"rank 0 has layout: dp9; ranks? 1\b.* ha(s|ve) layout: dp"):
        engine(comm, "dp" if comm.rank else "dp9")
    with pytest.raises(RankMismatch, match="rank 0 has optimizer"):
        engine(comm, optimizer=AdamW(rate=0.1) if comm.rank else SGD(rate=0.1))
    with pytest.raises(RankMismatch, match=r"rank(s 0, 2 have| 0 has) optimizer's rate: 0\.1; rank 1 has .* 0\.2"):
        engine(comm, optimizer=AdamW(rate=0.2 if comm.rank == 1 else 0.1))
    with pytest.raises(RankMismatch, match=r"rank 0 has optimizer's decay: 0\.0; rank 1 has optimizer's decay: 0\.5"):
        engine(comm, optimizer=AdamW(rate=0.1, decay=comm.rank / 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["dp-naive", "dp-bucket", "dp"])
def test_weights_that_part(comm, layout):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    model = tiny_models.model()
    with engine(comm, layout, model, check_every=2) as made:
        made.step(tiny_models.batches(made.share(3)))
        if comm.rank == 1:
            for unit in (model.items[4], model.items[2].inner.items[1]):
                unit.bias.data[3] += 1
        with pytest.raises(
            ParameterMismatch, match=r"after step 1 parameter 2\.inner\.1\.bias of rank 1 differs from that of rank 0"
        ):
            made.step(tiny_models.batches(made.share(3)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["forward", "between"])
def test_ctrl_c_on_one_rank_ends_all(comm, when):
    class Presses(tiny_models.Dense):
        def forward(self, x, run):
            if when == "forward" and run.step == 2 and comm.rank == 0:
                signal.raise_signal(signal.SIGINT)
            return super().forward(x, run)

    with engine(comm, model=Sequential([Presses(7, 7)])) as made, InterruptFlag() as interrupt:
        for step in range(10):
            if when == "between" and step == 3 and comm.rank == 0:
                signal.raise_signal(signal.SIGINT)
            report = made.step(tiny_models.batches(made.share(comm.size), step), stop=interrupt.seen)
            if report.stop:
                break
        assert (report.step, interrupt.seen) == (3, comm.rank == 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("numbers", ["from 1 on", "one twice", "no integer"])
def test_numbers_that_are_no_order(comm, reproducible, numbers):
    with engine(comm, reproducible=reproducible) as made:
        mine = {"from 1 on": [1 + comm.rank], "one twice": [comm.rank, 0], "no integer": [comm.rank]}[numbers]
        batches = tiny_models.batches(mine)
        if numbers == "no integer" and comm.rank == comm.size - 1:
            batches = [(str(number), *rest) for number, *rest in batches]
        no_integer = f"rank {comm.size - 1}: ValueError: micro-batch at 0: expected an integer as its number, found '"
        told = "each of the numbers 0 to" if numbers != "no integer" else no_integer
        with pytest.raises((ValueError, StepFailed), match=told):
            made.step(batches)
        assert made.step(tiny_models.batches([comm.rank])).count == 5 * comm.size


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"layout": "zero4"}, "layout: expected one of dp-naive, .*; found 'zero4'"),
        ({"precision": "fp8"}, "precision: expected one of .*found 'fp8'"),
        ({"clip": -1.0}, "clip: expected a number from 0 on, found -1"),
        ({"check_every": -1}, "check_every: .*found -1"),
        ({"device": "tpu"}, "device: expected"),
    ],
)
def test_settings_without_a_meaning(comm, settings, told):
    with pytest.raises(ValueError, match=told):
        engine(comm, **settings)


@pytest.mark.ranks(2)
def test_a_communicator_of_others(world):
    with pytest.raises(TypeError, match=r"comm: expected a collectives.Communicator"):
        engine(world)


@pytest.mark.ranks(2)
def test_what_was_held_is_given_back(comm):
    """More engines, one after another, than a communicator has persistent requests through shared memory."""
    for _ in range(8):
        model = tiny_models.model()
        with engine(comm, "dp", model) as made:
            made.step(tiny_models.batches(made.share(comm.size)))
        assert not active_requests
        assert model.items[0].bias.data.base is None  # no memory of the engine


# ------------------------------------------------------------------------------------------ the ledger


@pytest.mark.ranks(2)
@layouts
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_forecast_and_account_agree(comm, layout, precision, reproducible):
    with engine(comm, layout, precision=precision, reproducible=reproducible, optimizer=AdamW(rate=0.1)) as made:
        for count in (1, 11, 4):
            made.step(tiny_models.batches(made.share(count)))
        assert made.ledger.allocated == made.ledger.predicted


@pytest.mark.ranks(2)
def test_of_a_data_set_the_account_has_what_a_step_takes(comm):
    """Micro-batches that are views of it."""
    _, x, y, samples = tiny_models.batches([0], size=1000)[0]
    with engine(comm, precision="fp64") as made:
        made.step([(number, x[:5], y[5:10], samples[:5]) for number in made.share(comm.size)])
        assert made.ledger.allocated == made.ledger.predicted


# ------------------------------------------------------------------------------------------ micro-batches are drawn


drawing = pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.drawn])


def dealt(comm, numbers, step):
    """A rank's micro-batches, each made when it is asked for."""
    for number in numbers:
        yield tiny_models.batches([number], step)[0]


@drawing
@pytest.mark.parametrize("slow", [0, -1])
def test_a_slow_rank_draws_less_and_no_bit_changes(comm, layout, slow, reference):
    """One rank holds on to its first micro-batch of each step until the others have had all the rest."""
    slow = range(comm.size)[slow]
    settings = {"precision": "fp32", "clip": 1.0, "reproducible": True}
    expected, expected_reports, _ = reference(**settings)

    def mine(pool, count, had, step):
        for batch in dealt(comm, pool.draw(count), step):
            had.append(batch[0])
            if comm.rank == slow and len(had) == 1:
                for _ in range(comm.size - 1):
                    comm.recv(tag=step)
            yield batch
        if comm.rank != slow:
            comm.send(None, slow, tag=step)

    with WorkQueue(comm) as pool, engine(comm, layout, **settings) as made:
        for step, count in enumerate(STEPS):
            had = []
            report = made.step(mine(pool, count, had, step), drawn=True)
            everyone = comm.allgather(had)
            if comm.rank == slow and comm.size > 1 and not had:  # it came too late for any: take the news
                for _ in range(comm.size - 1):
                    comm.recv(tag=step)
            assert sorted(number for some in everyone for number in some) == list(range(count))
            assert len(everyone[slow]) == (count if comm.size == 1 else min(1, len(everyone[slow])))
            wanted = expected_reports[step]
            assert (report.loss, report.norm, report.count) == (wanted.loss, wanted.norm, wanted.count)
        assert differing(whole(comm, made), expected) == []
        assert made.ledger.predicted == made.ledger.allocated


@drawing
def test_drawn_without_the_canonical_order(comm, layout, reference):
    """All that one rank has, others have not: the sum is the same but for rounding."""
    expected, _, _ = reference(precision="fp64", clip=3.0)
    with engine(comm, layout, precision="fp64", clip=3.0, trace=True) as made:
        for step, count in enumerate(STEPS):
            numbers = range(count) if comm.rank == step % comm.size else ()
            made.step(dealt(comm, numbers, step), drawn=True)
            assert_all_after_the_backward(made)
            made.events.clear()
        for name, values in whole(comm, made).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if not layout.drawn])
def test_where_nothing_can_be_drawn(comm, layout):
    with engine(comm, layout) as made, pytest.raises(ValueError, match=rf"in dp-naive, .*, and the layout is {layout}"):
        made.step(iter(()), drawn=True)


class Late(RuntimeError):
    """Of a source of micro-batches."""


@pytest.mark.ranks(2)
@drawing
@pytest.mark.parametrize("wrong", ["source", "batch", "twice", "missing"])
def test_a_draw_that_fails_leaves_nothing_behind(comm, layout, wrong, reference):
    """Told on all ranks; and the next step has its bits, whatever was added up before."""
    settings = {"precision": "fp32", "clip": 1.0, "reproducible": True}
    expected, last = reference(**settings)[0], comm.size - 1

    def failing():
        share = list(range(2 * comm.rank, 2 * comm.rank + 2))
        if comm.rank == last:
            share = {"twice": [0, 0], "missing": [2 * last, 2 * last + 5]}.get(wrong, share)
        for at, batch in enumerate(dealt(comm, share, 50)):
            if at and comm.rank == last and wrong == "source":
                raise Late("no more")
            yield (*batch[:2], batch[2][:1], batch[3]) if at and comm.rank == last and wrong == "batch" else batch

    kind = ValueError if wrong in ("twice", "missing") else StepFailed
    told = {"source": f"rank {last}: Late: no more", "batch": f"rank {last}: ValueError: micro-batch"}
    with engine(comm, layout, **settings) as made:
        before = whole(comm, made)
        with pytest.raises(kind, match=told.get(wrong, "expected each of the numbers")):
            made.step(failing(), drawn=True)
        assert differing(before, whole(comm, made)) == [] and made.steps == 0
        for step, count in enumerate(STEPS):
            made.step(dealt(comm, made.share(count), step), drawn=True)
        assert differing(whole(comm, made), expected) == []

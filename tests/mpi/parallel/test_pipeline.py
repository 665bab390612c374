"""Every schedule does what one rank does alone, to the last bit; messages are those planned; nobody is left waiting."""

from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.tiers import default
from support.training_states import differing, whole

from collectives import Communicator
from collectives.runtime.requests.program_end import open_communicators
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.nn.operator import Operator
from parallel.optim.optimizers import LAMB, SGD, AdamW
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.actions import BW, F
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.stage_placement import loop
from parallel.pipeline.stage_params import REPLICAS
from parallel.runtime.consistency_check import ParameterMismatch, RankMismatch, StepFailed

pytestmark = pytest.mark.ranks(3)

STEPS = (6, 6, 5, 1)
"""Micro-batches of each step: as many as are planned, fewer, and fewer than there are replicas."""
MICROBATCHES = 6

SYNCHRONOUS = [name for name, entry in SCHEDULES.items() if entry.version is None]
schedules = pytest.mark.parametrize("schedule", SYNCHRONOUS)


@pytest.fixture(scope="module")
def alone():
    with Communicator(MPI.COMM_SELF) as comm:
        yield comm


def meshes(ranks):
    """All ways to divide the ranks into stages and replicas of either kind."""
    found = [f"pp={ranks}"]
    for stages in range(1, ranks):
        if ranks % stages == 0:
            found += [f"pp={stages},dp={ranks // stages}", f"zero1={ranks // stages},pp={stages}"]
    return found


MESHES = meshes(MPI.COMM_WORLD.Get_size())


def pipeline(comm, schedule="1f1b", mesh=None, model=None, optimizer=None, **settings):
    """As many units as any schedule wants parts, and one more."""
    ranks = comm.Get_size()
    settings = {"first_bytes": 1, "bucket_bytes": 5000, "microbatches": MICROBATCHES, **settings}
    optimizer = optimizer or SGD(rate=0.05, momentum=0.9)
    name, plan = (schedule, None) if isinstance(schedule, str) else ("1f1b", schedule)
    return Pipeline(
        model or tiny_models.model(depth=2 * ranks), tiny_models.Squares(), comm, optimizer,
        Settings(layout=f"pp:{name}", mesh=mesh or f"pp={ranks}", **settings), plan,
    )  # fmt: skip


def after(comm, made):
    """The state, the reports and an evaluation after some steps."""
    with made:
        reports = [made.step(tiny_models.batches(made.share(count), step)) for step, count in enumerate(STEPS)]
        assert dict(made.ledger.allocated) == dict(made.ledger.predicted)
        return (
            whole(comm, made),
            reports,
            made.evaluate(tiny_models.batches(made.share(7), 99), lambda scores, y: len(y)),
        )


def test_of_a_data_set_the_account_has_what_a_step_takes(comm):
    """Micro-batches that are views of it."""
    _, x, y, samples = tiny_models.batches([0], size=1000)[0]
    with pipeline(comm, precision="fp64") as made:
        made.step([(number, x[:5], y[5:10], samples[:5]) for number in made.share(MICROBATCHES)])
        assert made.ledger.allocated == made.ledger.predicted


@pytest.fixture(scope="module")
def reference(alone):
    """What one rank comes to, by settings."""
    known = {}

    def find(depth, **settings):
        key = depth, tuple(sorted(settings.items()))
        if key not in known:
            optimizer = SGD(rate=0.05, momentum=0.9)
            made = DataParallelEngine(
                tiny_models.model(depth=depth),
                tiny_models.Squares(),
                alone,
                optimizer,
                Settings(layout="dp-naive", **settings),
            )
            known[key] = after(alone, made)
        return known[key]

    return find


def same(found, expected):
    (state, reports, evaluation), (other_state, others, other_evaluation) = found, expected
    assert differing(state, other_state) == []
    assert evaluation == other_evaluation
    for report, other in zip(reports, others, strict=True):
        assert (report.loss, report.norm, report.skipped) == (other.loss, other.norm, other.skipped)


# ------------------------------------------------------------------------------------------ the same as one rank


@schedules
@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_bits(comm, schedule, mesh, reference):
    settings = {"clip": 1.0, "reproducible": True}
    same(after(comm, pipeline(comm, schedule, mesh, **settings)), reference(2 * comm.size, **settings))


RANKS = MPI.COMM_WORLD.Get_size()
REPLICATED = [f"pp={stages},{{}}={RANKS // stages}" for stages in (1, 2) if RANKS % stages == 0]


@pytest.mark.parametrize("layout", REPLICAS)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"])
@pytest.mark.parametrize("mesh", REPLICATED)
def test_the_same_bits_in_every_layout_of_the_replicas(comm, schedule, layout, mesh, reference):
    """Steps of fewer micro-batches than replicas included, and of a tied matrix, which two stages hold."""
    settings = {"clip": 1.0, "reproducible": True, "precision": "bf16"}
    found = after(comm, pipeline(comm, schedule, mesh.format(layout), **settings))
    same(found, reference(2 * comm.size, **settings))


@pytest.mark.parametrize("layout", REPLICAS)
@pytest.mark.parametrize("mesh", REPLICATED)
def test_the_same_up_to_rounding_in_every_layout_of_the_replicas(comm, layout, mesh, reference):
    settings = {"precision": "fp64", "clip": 3.0}
    state, _, _ = after(comm, pipeline(comm, "zb-h1", mesh.format(layout), **settings))
    for name, values in reference(2 * comm.size, **settings)[0].items():
        np.testing.assert_allclose(state[name], values, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
@pytest.mark.parametrize("stages", [stages for stages in (1, 2) if RANKS % stages == 0 and stages < RANKS] or [1])
def test_sharded_replicas_store_parts(comm, layout, stages):
    """Weights of which a single stage has need; the sums of a tied matrix are made at the end, as in zero1."""
    if comm.size == 1:
        pytest.skip("no replicas")
    mesh = f"pp={stages},{{}}={comm.size // stages}"
    bytes_ = {}
    for name in ("zero1", layout):
        with pipeline(comm, mesh=mesh.format(name), model=tiny_models.model(depth=20, tied=False)) as made:
            made.step(tiny_models.batches(made.share(6)))
            bytes_[name] = dict(made.ledger.allocated)
            assert bytes_[name] == dict(made.ledger.predicted)
    assert bytes_[layout]["gradients"] < bytes_["zero1"]["gradients"]
    assert (bytes_[layout]["parameters"] < bytes_["zero1"]["parameters"]) == (layout == "zero3")


@pytest.mark.parametrize("schedule", default(SYNCHRONOUS, "1f1b", "zb-v", "dualpipe"))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_same_bits_in_half_precision_and_recomputed(comm, schedule, precision, reference):
    settings = {"clip": 1.0, "reproducible": True, "precision": precision}
    model = tiny_models.model(depth=2 * comm.size, recompute=True)
    expected = reference(2 * comm.size, **settings)
    same(after(comm, pipeline(comm, schedule, model=model, **settings)), expected)
    assert any(report.skipped for report in expected[1]) == (precision == "fp16")  # its first loss scale is too large


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_up_to_rounding(comm, schedule, mesh, reference):
    settings = {"precision": "fp64", "clip": 3.0}
    state, reports, _ = after(comm, pipeline(comm, schedule, mesh, **settings))
    expected, others, _ = reference(2 * comm.size, **settings)
    for name, values in expected.items():
        np.testing.assert_allclose(state[name], values, rtol=1e-12, atol=1e-12, err_msg=name)
    for report, other in zip(reports, others):
        assert report.norm == pytest.approx(other.norm, rel=1e-12)
        assert report.count == other.count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
def test_uneven_parts(comm, schedule, tied, alone):
    settings = {"reproducible": True, "clip": 1.0}
    parts = comm.size * (2 if schedule == "zb-v" else 1)
    depth = 2 * comm.size
    cuts = (0, *range(depth + 3 - parts, depth + 2), depth + 2)  # all but one of the parts have one unit
    assert len(cuts) == parts + 1
    made = pipeline(
        comm, schedule, model=tiny_models.model(depth=depth, tied=tied), cuts=",".join(map(str, cuts)), **settings
    )
    other = DataParallelEngine(
        tiny_models.model(depth=depth, tied=tied),
        tiny_models.Squares(),
        alone,
        SGD(rate=0.05, momentum=0.9),
        Settings(**settings),
    )
    same(after(comm, made), after(alone, other))


def tokens(numbers):
    for number in numbers:
        text = np.random.default_rng(number).integers(0, 30, (2, 9))
        yield number, text[:, :-1], text[:, 1:], np.arange(2) + 2 * number


def trained_transformer(comm, engine, recompute=False, **settings):
    """Tied embeddings, dropout, LAMB's norms of whole tensors; units enough for a pipeline of all ranks."""
    model = transformer(30, 8, 2 * MPI.COMM_WORLD.Get_size(), 2, 16, dropout=0.2, recompute=recompute)
    settings = Settings(reproducible=True, bucket_bytes=4000, first_bytes=1000, **settings)
    with engine(model, SoftmaxCrossEntropy(), comm, LAMB(rate=0.01), settings) as made:
        for count in (5, 4):
            made.step(list(tokens(made.share(count))))
        return whole(comm, made)


@pytest.fixture(scope="module")
def transformer_alone(alone):
    return trained_transformer(alone, DataParallelEngine)


@pytest.mark.parametrize("schedule", default(SYNCHRONOUS, "interleaved", "zb-h1", "dualpipe-v"))
@pytest.mark.parametrize("mesh", MESHES[:2])
def test_the_same_bits_of_a_transformer(comm, schedule, mesh, transformer_alone):
    plan = {"layout": f"pp:{schedule}", "mesh": mesh, "microbatches": 5}
    assert differing(trained_transformer(comm, Pipeline, recompute=True, **plan), transformer_alone) == []


@pytest.mark.parametrize("mesh", MESHES)
def test_a_state_knows_no_layout(comm, mesh, alone):
    """What data parallelism has trained a pipeline goes on with, and the other way round."""
    settings = {"reproducible": True, "precision": "bf16"}

    def handed(made, other):
        saved, numbers = whole(comm, made), made.state()
        other.load(numbers)
        for piece in other.tensor_slices():
            piece.array[...] = saved[piece.name][piece.start : piece.start + len(piece.array)]
        other.refresh()

    def replicas(seed):
        model = tiny_models.model(depth=2 * comm.size)
        return DataParallelEngine(
            model, tiny_models.Squares(), comm, AdamW(rate=0.01), Settings(layout="dp", seed=seed, **settings)
        )

    def stages(seed):
        return pipeline(comm, "zb-h1", mesh, optimizer=AdamW(rate=0.01), seed=seed, **settings)

    with replicas(0) as one, stages(1) as two, replicas(2) as three:
        one.step(tiny_models.batches(one.share(6), 0))
        handed(one, two)
        two.step(tiny_models.batches(two.share(6), 1))
        handed(two, three)
        three.step(tiny_models.batches(three.share(6), 2))
        found = whole(comm, three)
    model = tiny_models.model(depth=2 * comm.size)
    with DataParallelEngine(model, tiny_models.Squares(), alone, AdamW(rate=0.01), Settings(**settings)) as made:
        for step in range(3):
            made.step(tiny_models.batches(range(6), step))
        assert differing(found, whole(alone, made)) == []


# ------------------------------------------------------------------------------------------ what is sent


@schedules
def test_messages_are_those_of_the_plan(comm, schedule):
    with pipeline(comm, schedule, trace=True) as made:
        made.step(tiny_models.batches(made.share(MICROBATCHES)))
        planned = {peer: count for (stage, peer), count in made.plan.messages().items() if stage == comm.Get_rank()}
        assert dict(made.sent) == planned
        assert comm.Get_rank() not in made.sent
        done = [event.name for event in made.events if event.name[-1].isdigit()]
        line = made.plan.actions[comm.Get_rank()]
        assert done == [str(action) for action in line if action.kind in ("F", "B", "W", "BW")]
        made.events.clear()
        made.evaluate(tiny_models.batches(made.share(MICROBATCHES)))
        assert all(event.name.startswith("evaluate ") for event in made.events if event.kind == "compute")


def test_sums_of_gradients_start_when_a_stage_is_through(comm):
    if comm.size % 2:
        pytest.skip("two replicas need an even number of ranks")
    with pipeline(comm, "gpipe", f"pp={comm.size // 2},dp=2", trace=True) as made:
        made.step(tiny_models.batches(made.share(2 * MICROBATCHES)))
        names = [(event.kind, event.name) for event in made.events]
        last = max(
            at for at, (kind, name) in enumerate(names) if kind == "compute" and name.endswith(f"BW{MICROBATCHES - 1}")
        )
        starts = [at for at, name in enumerate(names) if name == ("communication", "start")]
        assert starts and min(starts) < last < max(at for at, name in enumerate(names) if name[1] == "finish")


# ------------------------------------------------------------------------------------------ when something is wrong


class Failing(tiny_models.Dense):
    """Raises an exception in the motion that it is told."""

    when = ""

    def forward(self, x, run):
        if self.when == "forward" and run.step == 1:
            raise RuntimeError("the unit has had enough")
        return super().forward(x, run)

    def backward(self, dy, saved, grads):
        if self.when == "backward":
            raise RuntimeError("the unit has had enough")
        if self.when == "weights":

            def fail(out):
                raise RuntimeError("the unit has had enough")

            grads(self.weight, fail)
        return super().backward(dy, saved, grads)


@pytest.mark.parametrize("when", ["forward", "backward", "weights"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-v", "dualpipe"])
def test_a_stage_that_fails(comm, schedule, when):
    model = tiny_models.model(depth=2 * comm.size, tied=False)
    middle = Failing(20, 20)
    model.items.insert(len(model.items) // 2, middle)
    with pipeline(comm, schedule, model=model, reproducible=True) as made:
        made.step(tiny_models.batches(made.share(6), 0))
        middle.when, before = when, whole(comm, made)
        with pytest.raises(StepFailed, match=r"nothing was updated; .*rank \d+: RuntimeError: the unit has had enough"):
            made.step(tiny_models.batches(made.share(6), 1))
        assert differing(whole(comm, made), before) == []
        middle.when = ""
        made.step(tiny_models.batches(made.share(6), 2))
        assert differing(whole(comm, made), before) != []


def test_a_unit_whose_outline_is_wrong(comm):
    class Odd(tiny_models.Dense):
        def forward(self, x, run):
            y, saved = super().forward(x, run)
            return y[:, :10], saved

    model = tiny_models.model(depth=2 * comm.size, tied=False)
    model.items[0] = Odd(7, 20)
    expected = "part 0 of the model makes" if comm.size > 1 else "matmul"
    cuts = (0, *range(1, comm.size), len(model.items))
    with pipeline(comm, model=model, cuts=",".join(map(str, cuts))) as made, pytest.raises(StepFailed, match=expected):
        made.step(tiny_models.batches(made.share(6)))


def test_a_unit_without_an_outline(comm):
    """A trial of the unit gives the sizes of messages."""

    class Silent(tiny_models.Dense):
        outline = Operator.outline

    model = tiny_models.model(depth=2 * comm.size, tied=False)
    model.items[1] = Silent(20, 20)
    with pipeline(comm, model=model) as made:
        assert made.step(tiny_models.batches(made.share(6))).count == 30


def test_a_loss_that_is_no_number(comm):
    with pipeline(comm) as made:
        bad = [(number, x * np.inf, y, samples) for number, x, y, samples in tiny_models.batches(made.share(6))]
        with pytest.raises(StepFailed, match="loss of micro-batch"):
            made.step(bad)
        assert made.step(tiny_models.batches(made.share(6))).step == 0


def test_a_loss_scale_for_all(comm):
    """In fp16 a gradient that overflows on one stage makes all of them skip."""
    with pipeline(comm, precision="fp16") as made:
        reports = [made.step(tiny_models.batches(made.share(6))) for _ in range(10)]
        assert reports[0].skipped and not reports[-1].skipped
        assert len(set(comm.allgather((made.scaling.value, made.updates)))) == 1


def test_weights_that_part(comm):
    """Whoever notices tells all."""
    if comm.size < 2:
        pytest.skip("one rank has nobody to part with")
    with pipeline(comm, "dualpipe", check_every=1) as made:
        made.step(tiny_models.batches(made.share(6)))
        if comm.Get_rank() == comm.size - 1:
            next(iter(made.tensor_slices())).array[0] += 1
        with pytest.raises(ParameterMismatch, match=f"of ranks? .*{comm.size - 1}|from that of rank {comm.size - 1}"):
            made.step(tiny_models.batches(made.share(6)))


def test_fewer_units_than_parts(comm):
    with pytest.raises(ValueError, match=r"stages: \d+ units cannot be cut in \d+ parts"):
        pipeline(comm, "interleaved", model=tiny_models.model(depth=2 * comm.size - 2), virtual=3)


def test_more_micro_batches_than_planned(comm):
    with pipeline(comm) as made, pytest.raises(ValueError, match="expected at most 6 for each pipeline, found 7"):
        made.step(tiny_models.batches(made.share(7)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ("dp=1", "expected pp|would fit"),
        ("pp=1,sp=1", "expected axes of pp"),
        ("pp=77", "is for 77 ranks"),
        ("pp", "as in dp=2"),
    ],
)
def test_a_mesh_without_a_meaning(comm, mesh, told):
    with pytest.raises(ValueError, match=told):
        pipeline(comm, mesh=mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cuts", [(0, 1), (0, 0, 1), (1, 2, 3), (0, 99)])
def test_cuts_without_a_meaning(comm, cuts):
    with pytest.raises(ValueError, match="cuts: expected"):
        pipeline(comm, cuts=",".join(map(str, cuts)))


def test_stages_with_other_micro_batches(comm):
    if comm.size == 1:
        pytest.skip("one stage has nobody to differ from")
    with pipeline(comm) as made, pytest.raises(ValueError, match="run parts of one model and must have the same"):
        made.step(tiny_models.batches(range(5 + (comm.Get_rank() == 1))))


@pytest.mark.ranks(2)
def test_models_that_differ(comm):
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    with pytest.raises(RankMismatch, match="ranks differ"):
        cuts = (0, *range(2, comm.size + 1), 2 * comm.size + 2)
        pipeline(comm, cuts=None if comm.Get_rank() else ",".join(map(str, cuts)))
    model = tiny_models.model(depth=2 * comm.size)
    if comm.Get_rank() == 0:
        del model.items[1:]
    with pytest.raises(RankMismatch, match=r"number of units: 1; (rank 1 has|ranks 1, .* have) number of units"):
        pipeline(comm, model=model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [{"cuts": "0,1,9"}, {"mesh": "pp=99"}, {"virtual": 3}], ids=str)
def test_an_invalid_setting_of_one_rank_is_an_error_of_all(comm, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: "):
        pipeline(comm, **({} if comm.Get_rank() else wrong))


@pytest.mark.ranks(2)
def test_plans_that_do_not_work_out(comm):
    """A deadlock and a missing action are refused on all ranks, with the place where progress stops."""
    placement = loop(comm.size)

    def plan(lines):
        return PipelinePlan("mine", placement, 2, tuple(map(tuple, lines)))

    good = [[F(s, 0), F(s, 1), BW(s, 0), BW(s, 1)] for s in range(comm.size)]
    with pipeline(comm, plan(good), microbatches=2) as made:
        assert made.step(tiny_models.batches(made.share(2))).count == 10
    missing = [line if stage else line[:-1] for stage, line in enumerate(good)]
    with pytest.raises(ValueError, match="0B1 is missing; 0W1 is missing"):
        pipeline(comm, plan(missing), microbatches=2)
    with pytest.raises(ValueError, match=f"mine is for {comm.size + 1} stages, the mesh is"):
        pipeline(comm, replace(plan(good), placement=loop(comm.size + 1)))
    if comm.size > 1:
        with pytest.raises(RankMismatch, match="placement: "):
            pipeline(comm, replace(plan(good), placement=loop(comm.size + (comm.Get_rank() == 0))))
    backwards = [[BW(s, 0), F(s, 0), F(s, 1), BW(s, 1)] for s in range(comm.size)]
    with pytest.raises(ValueError, match=r"deadlock(.|\n)*stage  0 .*waits for"):
        pipeline(comm, plan(backwards), microbatches=2)


def test_what_was_held_is_given_back(comm):
    before = len(open_communicators)
    for _ in range(3):
        with pipeline(comm, "dualpipe") as made:
            made.step(tiny_models.batches(made.share(6)))
    assert len(open_communicators) == before

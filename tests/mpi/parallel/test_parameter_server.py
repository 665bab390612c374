"""Servers and workers: the same bits where that is promised, gaps no larger than that, and nobody left waiting."""

import math
from pathlib import Path

import numpy as np
import pytest
from support import tiny_models
from support.training_states import same, whole

from parallel.asynchronous.server import naive_bsp
from parallel.asynchronous.server.messages import MessageKind
from parallel.asynchronous.server.server_engine import ParameterServer
from parallel.checkpoint import checkpoint_files
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.embedding import Embedding
from parallel.nn.flat_params import FlatParams, Span
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.operator import Operator, Parameter, PassMode, constant
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.optimizers import LAMB, SGD, AdamW
from parallel.runtime.consistency_check import StepFailed

pytestmark = pytest.mark.ranks(3)

STEPS = (7, 1, 4, 3)
"""Parts of each step."""

RULES = ("bsp", "ssp:0", "ssp:2", "async")

rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def several(comm):
    if comm.size == 1:
        pytest.skip("one rank is no server and workers")


def served(comm, rule="bsp", model=None, loss=None, optimizer=None, **settings):
    settings = {"first_bytes": 1, "bucket_bytes": 5000, **settings}
    optimizer = optimizer or AdamW(rate=0.01)
    return ParameterServer(
        model or tiny_models.model(),
        loss or tiny_models.Squares(),
        comm,
        optimizer,
        Settings(layout="ps", consistency=rule, **settings),
    )


def outcomes(made, step):
    """What was done in the step that has just been made: on the first server, of all parts."""
    return made.server.work.outcome(step) if made.server else []


def trained(comm, rule="bsp", steps=STEPS, **settings):
    """The state, the reports, an evaluation, and how the ranks fared."""
    with served(comm, rule, **settings) as made:
        reports = [made.step(tiny_models.batches(range(parts), step)) for step, parts in enumerate(steps)]
        evaluation = made.evaluate(tiny_models.batches(made.share(5), 99), lambda scores, y: len(y))
        fared = made.server or made.worker
        return whole(comm, made), reports, evaluation, fared


def data_parallel(comm, steps=STEPS, model=None, loss=None, optimizer=None, batches=tiny_models.batches, **settings):
    model, loss, optimizer = model or tiny_models.model(), loss or tiny_models.Squares(), optimizer or AdamW(rate=0.01)
    with DataParallelEngine(model, loss, comm, optimizer, Settings(reproducible=True, **settings)) as made:
        reports = [made.step(batches(made.share(parts), step)) for step, parts in enumerate(steps)]
        return whole(comm, made), reports, made.evaluate(batches(made.share(5), 99), lambda scores, y: len(y))


def some_servers(comm):
    """Numbers of servers that leave workers."""
    return sorted({1, comm.size // 2, comm.size - 1})


# ---------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("rule", ["bsp", "ssp:0"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_steps_that_are_one_update_equal_data_parallelism(comm, rule, clip):
    optimizer = AdamW(rate=lambda step: 0.01 / (1 + step))
    want, reports, evaluation = data_parallel(comm, clip=clip, optimizer=optimizer)
    for servers in some_servers(comm):
        state, seen, measured, _ = trained(
            comm, rule, clip=clip, servers=servers, reproducible=True, optimizer=optimizer
        )
        assert same(state, want)
        assert measured == evaluation
        assert [r.rate for r in seen] == [r.rate for r in reports]
        assert comm.rank < servers or all(r.norm is None for r in seen)  # workers have no norm of the whole gradient
        if comm.rank == 0:
            assert [(r.loss, r.count, r.norm, r.rate) for r in seen] == [
                (r.loss, r.count, r.norm, r.rate) for r in reports
            ]


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_so_they_do_in_other_precisions(comm, precision):
    want, _, evaluation = data_parallel(comm, precision=precision)
    state, _, measured, _ = trained(comm, precision=precision, reproducible=True)
    assert same(state, want)
    assert measured == evaluation


def test_so_they_do_with_norms_of_tensors(comm):
    want, _, _ = data_parallel(comm, optimizer=LAMB(rate=0.01))
    assert same(trained(comm, optimizer=LAMB(rate=0.01), reproducible=True)[0], want)


def test_without_canonical_order_only_the_last_digits_differ(comm):
    want, _, _ = data_parallel(comm)
    state, _, _, _ = trained(comm)
    assert all(np.allclose(state[name], want[name], rtol=1e-3, atol=1e-5) for name in want)


@rules
def test_replay_ends_in_the_same_bits(comm, tmp_path, rule):
    folder = Path(comm.bcast(str(tmp_path)))
    state, reports, _, _ = trained(comm, rule, record=str(folder / "order"), delay=0.002)
    again, others, _, _ = trained(comm, rule, replay=str(folder / "order"), record=str(folder / "second"))
    assert same(again, state)
    if comm.rank == 0:
        assert [r.loss for r in others] == [r.loss for r in reports]
        assert (folder / "second.0").read_text() == (folder / "order.0").read_text()


def test_a_record_of_another_training_is_refused(comm, tmp_path):
    folder = Path(comm.bcast(str(tmp_path)))
    trained(comm, "async", record=str(folder / "order"))
    with pytest.raises(ValueError, match="is of another training: consistency is bsp here, and async there"):
        served(comm, "bsp", replay=str(folder / "order"))
    with pytest.raises(ValueError, match="No such file"):
        served(comm, "bsp", replay=str(folder / "nothing"))


def test_a_replay_that_goes_on_longer_ends_with_an_error(comm, tmp_path):
    folder = Path(comm.bcast(str(tmp_path)))
    trained(comm, "async", steps=(3,), record=str(folder / "order"))
    with pytest.raises(StepFailed, match=r"the record ends before|must come after the same steps"):
        trained(comm, "async", steps=(3, 3), replay=str(folder / "order"))


@pytest.mark.parametrize("parts", [2, 4])
@rules
def test_a_replay_of_steps_with_other_micro_batches_ends_with_an_error(comm, tmp_path, rule, parts):
    folder = Path(comm.bcast(str(tmp_path)))
    trained(comm, rule, steps=(3,), record=str(folder / "order"))
    told = f"replay: expected as many micro-batches in step 0 as in the record, found {parts}"
    with pytest.raises(StepFailed, match=told):
        trained(comm, rule, steps=(parts,), replay=str(folder / "order"))


def test_a_checkpoint_goes_from_data_parallelism_to_servers_and_back(comm, tmp_path):
    folder = Path(comm.bcast(str(tmp_path)))
    want, _, _ = data_parallel(comm)

    def copied(source, target, name):
        checkpoint_files.save(comm, folder / name, 1, source.tensor_slices(), {"engine": source.state()})
        found = checkpoint_files.Checkpoint(comm, checkpoint_files.latest(comm, folder / name))
        found.restore(target.tensor_slices())
        target.load(found.facts["engine"])
        target.refresh()

    def step(engine, at):
        engine.step(tiny_models.batches(range(STEPS[at]) if engine is not first else engine.share(STEPS[at]), at))

    first = DataParallelEngine(
        tiny_models.model(), tiny_models.Squares(), comm, AdamW(rate=0.01), Settings(reproducible=True)
    )
    second = served(comm, "bsp", reproducible=True)
    third = served(comm, "bsp", reproducible=True, servers=comm.size - 1)
    with first, second, third:
        step(first, 0)
        copied(first, second, "a")
        step(second, 1)
        step(second, 2)
        copied(second, third, "b")
        step(third, 3)
        third.quiesce()
        assert same(whole(comm, third), want)
        assert third.state().items() >= {"steps": 4, "updates": 4}.items()
        assert third.state().keys() == first.state().keys()


def test_after_asynchronous_steps_rates_are_those_of_steps(comm):
    with served(comm, "bsp", optimizer=SGD(rate=lambda step: 1 / (1 + step))) as made:
        made.load(made.state() | {"steps": 3, "updates": 12})
        for step in (3, 4):
            assert made.step(tiny_models.batches(range(4), step)).rate == 1 / (1 + step)
            made.quiesce()


@rules
def test_after_a_return_to_earlier_steps_gradients_count_again(comm, rule):
    with served(comm, rule) as made:
        made.step(tiny_models.batches(range(4), 0))
        early = made.state()
        for step in (1, 2, 3):
            made.step(tiny_models.batches(range(4), step))
        made.quiesce()
        made.load(early)
        made.refresh()
        before = whole(comm, made)
        made.step(tiny_models.batches(range(4), 1))
        made.quiesce()
        assert made.updates - early["updates"] == (1 if rule in ("bsp", "ssp:0") else 4)
        assert not same(whole(comm, made), before)


# ---------------------------------------------------------------------------------------------- clocks and work


@rules
def test_every_part_is_done_once_and_counts_in_every_key(comm, rule):
    with served(comm, rule, servers=comm.size // 2) as made:
        for step, parts in enumerate(STEPS):
            made.step(tiny_models.batches(range(parts), step))
            assert len(outcomes(made, step)) == (parts if comm.rank == 0 else 0)
        made.quiesce()
        if made.server is not None:
            assert set(made.server.applied.values()) == {sum(STEPS)}
            assert not made.server.norms and not made.server._parts


def straggling(comm, rule, steps=12):
    """A training in which the last rank is slow: what all ranks know of gaps, and the parts of each worker."""
    with served(comm, rule, delay=0.002, slow=f"{comm.size - 1}:20") as made:
        shares = []
        for step in range(steps):
            made.step(tiny_models.batches(range(comm.size), step))
            shares += [outcome.worker for outcome in outcomes(made, step)]
        made.quiesce()
        gaps = (made.server or made.worker).gaps
        return comm.allgather(gaps), comm.bcast([shares.count(worker) for worker in range(comm.size - 1)])


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_gap_is_larger_than_the_staleness(comm, staleness):
    gaps, _ = straggling(comm, f"ssp:{staleness}")
    assert max(max(some, default=0) for some in gaps) <= staleness
    assert all(sum(some.values()) for some in gaps[:1])


def test_without_a_rule_gaps_are_larger_and_the_slow_one_does_less(comm):
    if comm.size < 3:
        pytest.skip("one worker is no slower than others")
    gaps, shares = straggling(comm, "async")
    assert max(max(some, default=0) for some in gaps) > 3
    assert shares[-1] < sum(shares[:-1]) / len(shares[:-1])
    assert sum(shares) == 12 * comm.size


def test_all_end_after_the_same_step_if_one_wishes_to(comm):
    for who in range(comm.size):
        with served(comm, "async") as made:
            for step in range(200):
                if made.step(tiny_models.batches(range(3), step), stop=comm.rank == who and step == 2).stop:
                    break
            assert comm.allgather(step) == [step] * comm.size
            assert step < 199


# ---------------------------------------------------------------------------------------------- traffic


def pulls(parts, synchronous):
    """Pulls of all weights by a worker with these numbers of parts: once a step, or once at first and after each."""
    return sum(map(bool, parts)) if synchronous else sum(parts) + any(parts)


@rules
def test_traffic_is_what_the_formulas_say(comm, rule):
    """A worker pushes the gradient of each of its parts; under ssp:2 it pulls weights again that are too old."""
    servers = comm.size // 2
    with served(comm, rule, servers=servers) as made:
        shares = []
        for step, parts in enumerate(STEPS):
            made.step(tiny_models.batches(range(parts), step))
            shares.append([outcome.worker for outcome in outcomes(made, step)])
        made.quiesce()
        seen = {(way, kind): 0 for way in ("sent", "received") for kind in MessageKind}
        for (way, kind, _), nbytes in made.traffic.items():
            seen[way, kind] += nbytes
        shares = comm.bcast(shares)
        parts = [[some.count(worker) for some in shares] for worker in range(comm.size - servers)]
        reads = sum(pulls(mine, rule in ("bsp", "ssp:0")) for mine in parts)
        shards = [4 * sum(key.span.size for key in made.keys if key.server == server) for server in range(servers)]
        if made.server is not None:
            assert seen["received", MessageKind.PUSH] == sum(STEPS) * shards[comm.rank]
            sent, least = seen["sent", MessageKind.WEIGHTS], reads * shards[comm.rank]
            assert sent == least if rule != "ssp:2" else sent >= least
        assert sum(shards) == made.flat.length * 4
        assert max(shards) - min(shards) <= 1024


class Words(Operator):
    """The mean over a sequence."""

    def forward(self, x, run):
        return x.mean(1), x.shape

    def backward(self, dy, saved, grads):
        return np.broadcast_to(dy[:, None] / np.float32(saved[1]), saved).copy()


def language():
    return Sequential([Embedding(3000, 10), Words(), Linear(10, 5)])


def sentences(numbers, step=0):
    made = []
    for number in numbers:
        random = np.random.default_rng([step, number])
        x = random.integers(0, 3000, (4, 6))
        made.append((number, x, x[:, 0] % 5, np.arange(4) + 4 * number))
    return made


@pytest.mark.parametrize("rule", ["bsp", "async"])
def test_tables_travel_by_rows(comm, rule):
    servers = comm.size // 2
    with served(comm, rule, language(), SoftmaxCrossEntropy(), servers=servers, reproducible=True) as made:
        reports = [made.step(sentences(range(parts), step)) for step, parts in enumerate(STEPS)]
        evaluation = made.evaluate(sentences(made.share(5), 99), lambda scores, y: len(y))
        state, up = whole(comm, made), sum(n for (way, kind, _), n in made.traffic.items() if kind is MessageKind.PUSH)
    if made.server is not None:
        assert up < sum(STEPS) * 3000 * 10 * 4 / 10
    assert made.server is not None or all(math.isfinite(r.loss) or not r.count for r in reports)
    if rule == "bsp":
        settings = {"model": language(), "loss": SoftmaxCrossEntropy(), "batches": sentences}
        want, _, wanted = data_parallel(comm, **settings)
        assert same(state, want)
        assert evaluation == wanted


# ---------------------------------------------------------------------------------------------- when something fails


class Odd(Operator):
    """Raises where it is told to."""

    def __init__(self):
        self.armed = False

    def forward(self, x, run):
        if self.armed and run.training:
            raise RuntimeError("a unit that fails")
        return x, ()

    def backward(self, dy, saved, grads):
        return dy


class Steep(Operator):
    """Its parameter's gradient overflows."""

    def __init__(self):
        self.weight = Parameter((300,), constant(1.0))

    def forward(self, x, run):
        return x, ()

    def backward(self, dy, saved, grads):
        grads(self.weight, lambda out: out.fill(np.inf))
        return dy


@rules
@pytest.mark.parametrize("role", ["worker", "server"])
def test_who_raises_is_heard_by_all(comm, rule, role):
    odd = Odd()
    with served(comm, rule, Sequential([*tiny_models.model().items, odd]), servers=comm.size // 2) as made:
        made.step(tiny_models.batches(range(4), 0))
        made.quiesce()
        odd.armed = role == "worker" and comm.rank == comm.size - 1
        if role == "server" and comm.rank == 0:
            made.server.store.push = None
        why = {"worker": "a unit that fails", "server": "'NoneType' object is not callable .rank 0"}
        with pytest.raises(StepFailed, match=why[role]):
            for step in range(1, 50):
                made.step(tiny_models.batches(range(4 * comm.size), step))
        with pytest.raises(StepFailed, match="failed before"):
            made.step([])


@rules
def test_an_error_leaves_no_message_for_the_next_engine(comm, rule):
    """The communicator of the second engine may be the one that the first engine has freed."""
    if comm.size < 3:
        pytest.skip("two servers and a worker")
    for replicas in (2, 1) * 3:
        odd = Odd()
        model = Sequential([*tiny_models.model().items, odd])
        with served(comm, rule, model, servers=2, replicas=replicas) as made:
            odd.armed = comm.rank == comm.size - 1
            with pytest.raises(StepFailed, match="a unit that fails"):
                for step in range(50):
                    made.step(tiny_models.batches(range(4 * comm.size), step))


def test_a_loss_that_is_no_number_ends_all(comm):
    def batches(step):
        made = tiny_models.batches(range(3), step)
        return [(n, x * (np.nan if step == 2 else 1), y, s) for n, x, y, s in made]

    with served(comm, "async") as made, pytest.raises(StepFailed, match=r"the loss of micro-batch . is not a finite"):
        for step in range(4):
            made.step(batches(step))
        made.quiesce()


@pytest.mark.parametrize("rule", ["bsp", "async"])
def test_a_gradient_that_overflows_ends_all(comm, rule):
    model, failed = (
        Sequential([*tiny_models.model().items, Steep()]),
        pytest.raises(StepFailed, match="not finite in step 0"),
    )
    with served(comm, rule, model) as made, failed:
        made.step(tiny_models.batches(range(3), 0))
        made.quiesce()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings, why",
    [
        ({"servers": 0}, "servers: expected a number from 1 on, found 0"),
        ({"servers": 99}, "servers: 99 of . ranks leave no workers"),
        ({"rule": "ssp"}, "consistency: expected .* a whole number S from 0 on, found 'ssp'"),
        ({"rule": "ssp:x"}, "consistency: expected .* a whole number S from 0 on, found 'ssp:x'"),
        ({"rule": "ssp:-1"}, "consistency: expected .* a whole number S from 0 on, found 'ssp:-1'"),
        ({"rule": "bsp:1"}, "consistency: expected bsp, async, or ssp:S"),
        ({"precision": "fp16"}, "precision: fp16 needs a loss scale"),
        ({"slow": "0:2"}, "slow: rank 0 is no worker"),
        ({"slow": "1:0.5"}, "slow: expected a factor from 1 on, found 0.5 for rank 1"),
        ({"optimizer": LAMB(rate=0.1), "rule": "async"}, "optimizer: lamb needs bsp on one server"),
    ],
)
def test_what_has_no_meaning_is_refused(comm, settings, why):
    with pytest.raises(ValueError, match=why):
        served(comm, **{"rule": "bsp", **settings})


def test_all_parts_of_all_steps(comm):
    """What workers did is what servers know of."""
    with served(comm, "async") as made:
        reports, targets = [], []
        for step in range(3):
            reports.append(made.step(tiny_models.batches(range(5), step)))
            targets += [outcome.targets for outcome in outcomes(made, step)]
        made.quiesce()
    counts = comm.allgather([report.count for report in reports])
    assert [sum(column) for column in zip(*counts[1:])] == counts[0] == [25, 25, 25]
    assert targets == ([5] * 15 if comm.rank == 0 else [])


# ------------------------------------------------------------------------------------------ the naive reference


def test_bsp_equals_the_naive_server(comm):
    """The weights of reproducible BSP training, bit for bit, without clipping."""
    model, loss, optimizer = tiny_models.model(tied=False), tiny_models.Squares(), AdamW(rate=0.01)
    flat = FlatParams(model)
    weights = np.zeros(flat.length, np.float64)
    flat.initialise(weights, seed=0)
    state = {name: np.zeros_like(weights) for name in optimizer.states()}

    def gradient(vector, step, part):
        flat.bind(vector)
        found = np.zeros_like(vector)
        places = {id(place.parameter): place for place in flat.places}
        ((_, x, y, samples),) = tiny_models.batches([part], step)
        scores, saved = model.forward(x, PassMode(True, 0, step, np.asarray(samples, np.int64)))
        _, kept = loss.forward(scores, y)
        model.backward(
            loss.backward(1.0, kept),
            saved,
            lambda parameter, compute: compute(FlatParams.view(found, parameter, places[id(parameter)].span.start)),
        )
        return found

    def update(vector, step, total):
        targets = sum(loss.count(y) for _, _, y, _ in tiny_models.batches(range(STEPS[step]), step))
        piece = OptimizerSpan(Span(0, flat.length), vector, total, state, flat.places)
        optimizer.update([piece], step, 1 / targets)

    naive_bsp.train(comm, weights, STEPS, gradient, update)
    found = trained(comm, model=tiny_models.model(tied=False), precision="fp64", reproducible=True)[0]
    if comm.rank == naive_bsp.SERVER:
        for parameter, span in flat.places:
            expected = FlatParams.view(weights, parameter, span.start)
            assert np.array_equal(found[f"model/{parameter.name}"], expected.reshape(-1)), parameter.name


def test_a_step_without_micro_batches_in_the_naive_version(comm):
    weights, steps = np.zeros(2), []

    def update(vector, step, total):
        steps.append(step)
        vector += total

    naive_bsp.train(comm, weights, (0, 3, 0), lambda vector, step, part: np.full(2, part + 1.0), update)
    assert comm.rank != naive_bsp.SERVER or (steps == [1] and weights.tolist() == [6, 6])

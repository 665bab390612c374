"""Replicas that meet in one style or another: what is conserved, what they agree on, what they learn, how they end."""

import math
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models

from collectives import Communicator
from parallel.asynchronous.decentralized import gossip, group_averaging
from parallel.asynchronous.decentralized.averaging_style import LocalSGD, ReplicaSums
from parallel.asynchronous.decentralized.gossip import Gossip
from parallel.asynchronous.decentralized.group_averaging import GroupAveraging
from parallel.asynchronous.decentralized.hogwild import LINE
from parallel.asynchronous.decentralized.replica_engine import ReplicaEngine
from parallel.asynchronous.decentralized.styles import STYLES
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.optim.optimizers import SGD, AdamW
from parallel.runtime.consistency_check import RankMismatch, StepFailed
from parallel.runtime.vector_memory import VectorAllocator
from parallel.trainer.engine_checkpoint import load_state_dict, state_dict
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

pytestmark = pytest.mark.ranks(1, 3)

NOTHING = ReplicaSums(0.0, 0)

ALL = {
    "local": ("local", {}),
    "local, tau 1": ("local", {"tau": 1}),
    "group": ("group", {"tau": 5}),
    "group of three": ("group", {"tau": 100, "group": 3}),
    "sgp": ("sgp", {}),
    "sgp, late": ("sgp", {"tau": 2}),
    "hogwild": ("hogwild", {}),
    "federated": ("federated", {"local_epochs": 2, "batch": 3}),
}
styles = pytest.mark.parametrize("style", ALL)
of_their_own = pytest.mark.parametrize("style", [name for name in ALL if name != "hogwild"])


def replicas(comm, name, model=None, optimizer=None, **settings):
    style, options = ALL[name]
    if style == "hogwild" and comm.size > 1 and not comm.allreduce(comm.nodes is None):
        pytest.skip("ranks share no memory")
    if options.get("group", 0) > comm.size:
        options = {"tau": options["tau"]}
    settings = Settings(layout=style, **{**options, **settings})
    return ReplicaEngine(
        model or tiny_models.model(), tiny_models.Squares(), comm, optimizer or SGD(rate=0.05, momentum=0.9), settings
    )


def context(comm):
    """What a style needs where nobody learns."""
    return SimpleNamespace(comm=comm, memory=VectorAllocator(comm))


def at_random(comm, size=1000):
    """A vector for each rank, and the mean of all."""
    vectors = np.random.default_rng(comm.size).normal(size=(comm.size, size))
    return vectors[comm.rank].copy(), vectors.mean(0)


def distance(comm, vector, mean):
    """From the furthest rank to the mean."""
    return comm.allreduce(float(np.abs(vector - mean).max()), MPI.MAX)


def equal_everywhere(comm, array):
    everyone = comm.allgather(np.asarray(array).tobytes())
    return len(set(everyone)) == 1


# ------------------------------------------------------------------------------------------ without learning


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_a_push_conserves_mass_and_comes_to_the_mean(comm, tau):
    z, mean = at_random(comm)
    style = Gossip(context(comm), z, tau)
    distances = []
    for step in range(150):
        style.mix(step, NOTHING)
        if tau == 0:
            assert comm.allreduce(style.mass.w) == pytest.approx(comm.size, rel=1e-14)
        distances.append(distance(comm, z, mean))
    style.drain()
    assert comm.allreduce(style.mass.w) == pytest.approx(comm.size, rel=1e-13)
    np.testing.assert_allclose(comm.allreduce(style.mass.x), comm.size * mean, rtol=0, atol=1e-12 * comm.size)
    period = max(1, gossip.turns(comm.size))
    if tau == 0:
        for before, after in zip(distances, distances[period:]):
            assert after <= 0.51 * math.sqrt(comm.size) * before + 1e-14  # geometrically, from period to period
        if comm.size & (comm.size - 1) == 0:
            assert distances[period] < 1e-14
    assert distance(comm, z, mean) < 1e-6
    style.close()


def test_weights_that_are_not_one(comm):
    """Masses as uneven as late messages make them: the estimates come to the mean of the masses."""
    z, _ = at_random(comm)
    style = Gossip(context(comm), z)
    style.mass.w = 0.5 + comm.rank
    total, weights = comm.allreduce(style.mass.x), comm.allreduce(style.mass.w)
    style.mass.update_estimate()
    for step in range(80):
        style.mix(step, NOTHING)
    np.testing.assert_allclose(z, total / weights, rtol=1e-9, atol=1e-12)
    assert comm.allreduce(style.mass.w) == pytest.approx(weights, rel=1e-13)
    style.close()


@pytest.mark.parametrize("start", range(3))
@pytest.mark.parametrize("most", [2, 3, 4])
def test_groups_agree_after_as_many_steps_as_there_are_axes(comm, most, start):
    if most > max(2, comm.size):
        pytest.skip("more than there are ranks")
    z, mean = at_random(comm)
    style = GroupAveraging(context(comm), z, most, tau=1000)
    steps = len(group_averaging.grid(comm.size, most))
    assert steps <= max(1, math.ceil(math.log(comm.size, most)))
    for step in range(start, start + steps):
        style.mix(step, NOTHING)
    assert distance(comm, z, mean) < 1e-14
    style.close()


def test_all_meet_every_tau_steps(comm):
    for make, met in (
        (
            lambda z: GroupAveraging(context(comm), z, 2, tau=4),
            lambda step: group_averaging.group(comm.rank, comm.size, 2, step),
        ),
        (lambda z: LocalSGD(context(comm), z, tau=4), lambda step: [comm.rank]),
    ):
        z, mean = at_random(comm)
        style = make(z)
        for step in range(4):
            told = len(met(step)) if step < 3 else comm.size
            assert style.mix(step, ReplicaSums(1.5, 2)) == (1.5 * told, 2 * told)
        assert equal_everywhere(comm, z) and distance(comm, z, mean) < 1e-14
        style.close()


# ------------------------------------------------------------------------------------------ learning


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("style", [name for name in STYLES if name != "federated"])
def test_digits_are_learned(comm, style):
    if style == "hogwild" and comm.nodes is not None:
        pytest.skip("ranks share no memory")
    with Training(complete({"data": "digits", "layout": style}), comm) as training:
        for record in training.run():
            assert record.report.skipped == (record.report.norm is None)
        assert training.score().accuracy >= 0.96


@pytest.mark.parametrize("style", ["local, tau 1", "group of three", "sgp"])
def test_means_of_everyone_after_every_step_are_data_parallelism(comm, style):
    """Of plain descent, where ranks have equal shares: tau is 1, or one group is everybody, or two ranks push."""
    if comm.size > {"local, tau 1": comm.size, "group of three": 3, "sgp": 2}[style]:
        pytest.skip("it is something else")
    with (
        replicas(comm, style, optimizer=SGD(rate=0.1), precision="fp64") as made,
        DataParallelEngine(
            tiny_models.model(), tiny_models.Squares(), comm, SGD(rate=0.1), Settings(precision="fp64")
        ) as other,
    ):
        for step in range(4):
            mine = tiny_models.batches(made.share(2 * comm.size), step)
            made.step(mine)
            report = other.step(mine)
        for one, two in zip(made.flat.places, other.flat.places):
            np.testing.assert_allclose(one.parameter.data, two.parameter.data, rtol=1e-11, atol=1e-13)
        tested = tiny_models.batches(made.share(5), 99)
        assert made.evaluate(tested).loss == pytest.approx(other.evaluate(tested).loss, rel=1e-11)
        assert report.step == 3 and made.steps == 4


def test_hogwild_is_one_vector(comm):
    """Taking turns nothing is lost: as one rank that makes all the steps."""
    with (
        Communicator(MPI.COMM_SELF, shared=False) as alone,
        replicas(comm, "hogwild", optimizer=SGD(rate=0.1)) as made,
        DataParallelEngine(
            tiny_models.model(), tiny_models.Squares(), alone, SGD(rate=0.1), Settings(layout="dp-naive")
        ) as other,
    ):
        for step, turn in product(range(3), range(comm.size)):
            comm.Barrier()
            if turn == comm.rank:
                made.step(tiny_models.batches([turn], step))
            ((_, *batch),) = tiny_models.batches([turn], step)
            other.step([(0, *batch)])
        comm.Barrier()
        for one, two in zip(made.flat.places, other.flat.places):
            np.testing.assert_array_equal(one.parameter.data, two.parameter.data)
        comm.Barrier()
        assert made.consensus() == 0


def test_weights_in_one_array_are_read_only(comm):
    """A change made on all ranks would count once for each."""
    with replicas(comm, "hogwild") as made:
        place = made.flat.places[0]
        with pytest.raises(ValueError, match="read-only"):
            place.parameter.data[...] *= 0.5
    assert place.parameter.data.flags.writeable


@styles
def test_reads_leave_optimizer_states_unchanged(comm, style):
    def states(made):
        return [vector.copy() for piece in made._engine.pieces for vector in piece.state.values()]

    with replicas(comm, style, optimizer=AdamW(rate=0.01)) as made:
        for step in range(2):
            made.step(tiny_models.batches(made.share(comm.size), step))
        made.style.drain()
        comm.Barrier()
        before, weights = states(made), made.style.vector.copy()
        read = state_dict(made)
        assert all(np.array_equal(*pair) for pair in zip(before, states(made)))
        assert np.array_equal(weights, made.style.vector)
        load_state_dict(made, comm, read, strict=True)
        assert all(np.array_equal(*pair) for pair in zip(before, states(made)))


@styles
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "fp16"])
def test_the_account_of_bytes(comm, style, precision):
    if style == "hogwild" and precision in ("bf16", "fp16"):
        pytest.skip("refused")
    with replicas(comm, style, precision=precision, optimizer=AdamW(rate=0.01)) as made:
        for step in range(7):
            made.step(tiny_models.batches(made.share(2 * comm.size), step))
        assert made.ledger.predicted == made.ledger.allocated
        assert made.evaluate(tiny_models.batches(made.share(5))).count == 25


@styles
def test_a_test_leaves_replicas_as_they_are(comm, style):
    with replicas(comm, style) as made:
        made.step(tiny_models.batches(made.share(comm.size)))
        made.style.drain()
        before = [place.parameter.data.copy() for place in made.flat.places]
        found = made.evaluate(tiny_models.batches(made.share(3), 9), lambda scores, y: len(y))
        assert found.measure == 1 and found.count == 15
        for place, values in zip(made.flat.places, before):
            np.testing.assert_array_equal(place.parameter.data, values)
        mine = np.concatenate([values.reshape(-1) for values in before])
        everyone = np.array(comm.allgather(mine.astype("f8")))
        expected = math.sqrt(((everyone - everyone.mean(0)) ** 2).sum() / comm.size)
        assert made.consensus() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@styles
def test_ranks_without_work(comm, style):
    with replicas(comm, style, clip=1.0) as made:
        for step, count in enumerate((1, 0, 2 * comm.size, 1)):
            mine = tiny_models.batches(made.share(count), step)
            report = made.step(mine)
            assert report.skipped == (not mine) and report.step == step
        assert made.evaluate(tiny_models.batches(made.share(1))).count == 5
        assert math.isnan(made.evaluate([]).loss)
    with replicas(comm, style, Sequential([])) as made:
        made.step(tiny_models.batches(made.share(comm.size)))


# ------------------------------------------------------------------------------------------ who waits for whom


def test_hogwild_ends_after_a_return_to_earlier_steps(comm):
    """Soon after the request: the largest number of steps of any rank is lower now."""
    with replicas(comm, "hogwild") as made:
        early = made.state()
        for step in range(40):
            made.step(tiny_models.batches([0], step))
        made.load(early)
        made.refresh()
        while not made.step(tiny_models.batches([0], made.steps), stop=comm.rank == comm.size - 1).stop:
            time.sleep(0.02)
        assert len(set(comm.allgather(made.steps))) == 1
        assert made.steps < 40
        made.quiesce()


@pytest.mark.parametrize(
    ("style", "free"), [("local", 7), ("group", 1), ("sgp, late", 2), ("hogwild", 50)], ids=lambda value: str(value)
)
def test_who_does_not_wait_for_a_late_rank(comm, style, free):
    """Rank 0 begins when others have made so many steps; in groups, those who are not in its first one."""
    if style == "group" and comm.size > 1:
        first = group_averaging.group(comm.rank, comm.size, group_averaging.default_size(comm.size), 0)
        free = 0 if 0 in first else free
    with replicas(comm, style) as made:
        if comm.rank == 0:
            for rank in range(1, comm.size):
                assert comm.recv(source=rank) == "free"
        for step in range(free if comm.rank else 0):
            made.step(tiny_models.batches([0], step))
        if comm.rank:
            comm.send("free", 0)
        for step in range(made.steps, 60):
            made.step(tiny_models.batches([0], step))
        assert made.evaluate(tiny_models.batches(made.share(1))).count == 5


# ------------------------------------------------------------------------------------------ an end for all


@styles
@pytest.mark.parametrize("when", [0, 3])
def test_one_rank_wants_to_stop(comm, style, when):
    with replicas(comm, style) as made:
        for _ in range(2):  # and they may go on
            begin = made.steps
            while True:
                report = made.step(
                    tiny_models.batches([0], made.steps), stop=made.steps - begin >= when and comm.rank == 0
                )
                assert report.step < begin + when + 200
                if report.stop:
                    break
            ends = comm.allgather(made.steps)
            assert len(set(ends)) == 1
            if comm.size == 1 and style in ("group", "sgp", "hogwild"):
                assert ends[0] == begin + when + 1


@styles
def test_one_rank_fails(comm, style):
    """The others hear of it where they meet, and all end after the same step."""
    last = comm.size - 1

    class Fails(tiny_models.Dense):
        broken = False

        def forward(self, x, run):
            if self.broken:
                raise ArithmeticError("no more")
            return super().forward(x, run)

    model = tiny_models.model()
    model.items[2] = Fails(20, 20)
    with replicas(comm, style, model) as made:
        for step in range(2):
            made.step(tiny_models.batches([0], step))
        model.items[2].broken = comm.rank == last
        told = r"a rank has failed: ArithmeticError: no more \(in the forward of Fails 2\)"
        with pytest.raises(StepFailed, match=rf"{told}( \(rank {last}\))?$"):
            for step in range(2, 300):
                made.step(tiny_models.batches([0], step))
        assert len(set(comm.allgather(made.steps))) == 1
        model.items[2].broken = False
        for step in range(3):
            made.step(tiny_models.batches([0], step))


@styles
def test_a_failure_is_told_by_the_next_test_at_the_latest(comm, style):
    with replicas(comm, style, **({"tau": 50} if style.startswith("local") else {})) as made:
        bad = tiny_models.batches([0])
        bad[0][1][...] = np.nan if comm.rank == 0 else bad[0][1]
        with pytest.raises(StepFailed, match=r"FloatingPointError: the loss of micro-batch 0 is not a finite number"):
            made.step(bad)
            made.evaluate(tiny_models.batches(made.share(3)))


@pytest.mark.parametrize(
    ("style", "settings", "words"),
    [
        ("local", {"tau": 0}, "tau: expected 1 steps or more, found 0"),
        ("sgp", {"tau": -1}, "tau: expected 0 steps or more, found -1"),
        ("sgp", {"group": 2}, "group: it belongs to group, and the layout is sgp"),
        ("hogwild", {"tau": 2}, "tau: it belongs to local, group, sgp, and the layout is hogwild"),
        ("group", {"group": 1}, "group: expected 2 to .* found 1"),
        ("group", {"group": 1000}, "group: expected 2 to .* found 1000"),
        ("hogwild", {"precision": "bf16"}, "precision: hogwild has fp32 or fp64, found bf16"),
        ("sgp", {"device": "cuda"}, "device: sgp is for cpu, found cuda"),
        ("local", {"reproducible": True}, "reproducible: with local the result depends on the number of ranks"),
        ("group", {"check_every": 3}, "check_every: with group ranks have different weights"),
        ("dp", {}, "layout: expected one of local, group, sgp, hogwild, federated, found 'dp'"),
    ],
)
def test_refused(comm, style, settings, words):
    with pytest.raises(ValueError, match=words):
        ReplicaEngine(
            tiny_models.model(), tiny_models.Squares(), comm, SGD(rate=0.1), Settings(layout=style, **settings)
        )


def test_hogwild_is_for_one_node(world):
    if world.Get_size() == 1:
        pytest.skip("one rank is on one node")
    words = "hogwild: the ranks must share the memory of one node, and they are on 2"
    with (
        Communicator(world, nodes=[rank % 2 for rank in range(world.Get_size())]) as two,
        pytest.raises(ValueError, match=words),
    ):
        ReplicaEngine(tiny_models.model(), tiny_models.Squares(), two, SGD(rate=0.1), Settings(layout="hogwild"))


def test_ranks_of_different_minds(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(RankMismatch, match="tau: 3"):
        replicas(comm, "local", tau=3 + comm.rank)


def test_the_window_has_room_for_the_counter():
    assert LINE % 64 == 0 and LINE >= 8

"""States of ranks in memory: the newest one that all have whole, copies on other nodes, ends that need no restart."""

from itertools import pairwise

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import PeerFailed
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.trainer import state_keeper
from parallel.trainer.recipes import complete
from parallel.trainer.state_keeper import Nodes, StateKeeper
from parallel.trainer.trainer import Training

GIVEN = {"data": "teacher_classes", "model": "mlp:tiny", "batch": 24, "steps": 9}
GIVEN |= {"optimizer": "adamw", "dropout": 0.1}
CROSSED = [
    {},
    {"layout": "zero3", "precision": "bf16"},
    {"compress": "topk:0.1", "clip": 0.5},
    {"compress": "powersgd:2"},
    {"precision": "fp16", "reproducible": True},
    {"layout": "pp"},
]


@pytest.fixture
def ranks(comm):
    with Communicator(comm) as made:
        yield made


@pytest.fixture
def folder(comm, tmp_path_factory):
    return comm.bcast(tmp_path_factory.mktemp("states") if comm.rank == 0 else None) / "job"


def settings(**more):
    return complete(GIVEN | more, None)


def weights(training):
    return [(one.name, one.start, one.array.tobytes()) for one in training.engine.tensor_slices()]


def train(ranks, keeper, chosen, steps, kept=None):
    """Train to the given step, keeping every state. Returns the state of this rank then."""
    with Training(chosen, ranks, kept.resolved() if kept else None) as training:
        if kept:
            training.resume(kept)
        keeper.begin(training)
        for _ in training.run():
            keeper.keep()
            if training.done == steps:
                break
        return weights(training), training.sampler.position()


@pytest.mark.parametrize("more", CROSSED, ids=lambda more: "-".join(map(str, more.values())) or "dp")
def test_a_restart_goes_on_with_the_same_bits(ranks, folder, more):
    chosen = settings(**more)
    if chosen.layout == "pp" and ranks.Get_size() > 2:
        pytest.skip("the model has two units")
    whole = train(ranks, StateKeeper(ranks, folder, 0, 0), chosen, 9)
    keeper = StateKeeper(ranks, folder, 0, 2, 1)
    assert keeper.newest() is None
    train(ranks, keeper, chosen, 4)
    keeper = StateKeeper(ranks, folder, 1, 2, 1)
    kept = keeper.newest()
    assert kept.step == 4
    train(ranks, keeper, chosen, 7, kept)
    keeper = StateKeeper(ranks, folder, 2, 2, 1)
    kept = keeper.newest()
    assert kept.step == 7
    assert train(ranks, keeper, chosen, 9, kept) == whole
    ranks.Barrier()
    assert not list(folder.iterdir())  # the last start keeps nothing


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "stale"])
def test_one_rank_lacks_the_newest_state(ranks, folder, damage):
    keeper = StateKeeper(ranks, folder, 0, 3, 1)
    keeper.newest()
    train(ranks, keeper, settings(), 4)
    if ranks.Get_rank() == ranks.Get_size() - 1:
        newest = max(keeper._own, key=lambda one: one.step)
        if damage == "torn":
            newest.clear()
        elif damage == "flipped":
            newest.memory[1000] ^= 1
        elif damage == "missing":
            newest.path.unlink()
        else:
            newest.write(99, [], {})
    ranks.Barrier()
    again = StateKeeper(ranks, folder, 1, 3, 1)
    kept = again.newest()
    assert kept.step == 3
    ranks.Barrier()
    assert {state_keeper._whole_step(path) for path in folder.iterdir()} == {3}  # none of another course of steps
    whole = train(ranks, StateKeeper(ranks, folder.with_name("whole"), 0, 0), settings(), 6)
    assert train(ranks, again, settings(), 6, kept) == whole


def test_no_common_state(ranks, folder):
    keeper = StateKeeper(ranks, folder, 0, 3, 1)
    keeper.newest()
    train(ranks, keeper, settings(), 2)
    if ranks.Get_rank() == 0:
        for one in keeper._own:
            one.clear()
    ranks.Barrier()
    assert StateKeeper(ranks, folder, 1, 3, 1).newest() is None
    ranks.Barrier()
    assert not list(folder.iterdir())


def test_a_first_start_removes_states(ranks, folder):
    keeper = StateKeeper(ranks, folder, 0, 3, 1)
    keeper.newest()
    train(ranks, keeper, settings(), 2)
    ranks.Barrier()
    assert StateKeeper(ranks, folder, 0, 3, 1).newest() is None
    ranks.Barrier()
    assert not list(folder.iterdir())


def joined(found):
    """Bytes of each tensor."""
    slices, _ = found
    tensors = {}
    for name, _, values in slices:
        tensors[name] = tensors.get(name, b"") + values
    return tensors


def test_fewer_ranks_go_on_with_the_same_bits(ranks, folder):
    """All but rank 1, which is as good as dead."""
    chosen, size = settings(reproducible=True), ranks.Get_size()
    whole = joined(train(ranks, StateKeeper(ranks, folder.with_name("whole"), 0, 0), chosen, 9))
    keeper = StateKeeper(ranks, folder, 0, 2, 1)
    keeper.newest()
    train(ranks, keeper, chosen, 4)
    assert keeper.can_shrink
    fewer = ranks.Split(MPI.UNDEFINED if ranks.Get_rank() == 1 else 0)
    if fewer != MPI.COMM_NULL:
        keeper.shrink(fewer)
        kept = keeper.newest()
        assert kept.step == 4 and fewer.Get_size() == max(1, size - 1)
        assert joined(train(fewer, keeper, chosen, 7, kept)) != whole
        keeper.shrink(fewer)  # again
        kept = keeper.newest()
        assert kept.step == 7 and joined(train(fewer, keeper, chosen, 9, kept)) == whole
        fewer.Free()
    ranks.Barrier()


@pytest.mark.parametrize("more", [{"layout": "zero3"}, {"mesh": "dp=1"}, {"compress": "topk:0.1"}])
def test_layouts_that_cannot_shrink(ranks, folder, more):
    keeper = StateKeeper(ranks, folder, 0, 2, 1)
    keeper.newest()
    chosen = settings(**({"mesh": f"dp={ranks.Get_size()}"} if "mesh" in more else more))
    train(ranks, keeper, chosen, 1)
    assert not keeper.can_shrink


def test_copies_on_another_node(ranks, folder, monkeypatch):
    """Two nodes, the second of which has lost its memory: its ranks get their states from the first."""
    size, rank = ranks.Get_size(), ranks.Get_rank()
    if size == 1:
        pytest.skip("needs two nodes")
    nodes = (tuple(range(size // 2)), tuple(range(size // 2, size)))
    monkeypatch.setattr(Nodes, "of", classmethod(lambda cls, comm: cls(nodes, comm.Get_rank())))
    folder = folder.with_name(f"node{rank // (size // 2) > 0:d}")
    keeper = StateKeeper(ranks, folder, 0, 3, 1)
    keeper.newest()
    train(ranks, keeper, settings(layout="zero3"), 5)
    assert {path.name.split("-")[0] for path in folder.iterdir()} == {"rank", "copy"}
    ranks.Barrier()
    if rank == size // 2:
        for path in folder.iterdir():
            path.unlink()
    ranks.Barrier()
    again = StateKeeper(ranks, folder, 1, 3, 1)
    kept = again.newest()
    assert kept.step == 5
    whole = train(ranks, StateKeeper(ranks, folder.with_name("whole"), 0, 0), settings(layout="zero3"), 7)
    assert train(ranks, again, settings(layout="zero3"), 7, kept) == whole


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (3, 1), (1, 2, 3)])
def test_every_state_has_one_copy_on_the_next_node(sizes):
    starts = np.cumsum([0, *sizes])
    ranks = tuple(tuple(range(*pair)) for pair in pairwise(starts))
    every = [Nodes(ranks, rank) for rank in range(sum(sizes))]
    copied = sorted(source for nodes in every for source in nodes.sources())
    assert copied == ([] if len(sizes) == 1 else list(range(sum(sizes))))
    for nodes in every:
        assert all(nodes.node_of(source) != nodes.node_of(nodes.rank) for source in nodes.sources())


@pytest.mark.parametrize("error", [None, ValueError("broken"), SystemExit(2)])
def test_an_end_in_order_needs_no_restart(ranks, folder, error):
    try:
        with StateKeeper(ranks, folder, 0, 3, 1) as keeper:
            keeper.newest()
            if error is not None and ranks.Get_rank() == ranks.Get_size() - 1:
                raise error
    except (ValueError, SystemExit):
        pass
    ranks.Barrier()
    with pytest.raises(CheckpointError, match=r"--survive: not restarted after (the end|an error: (broken|2)) \(rank"):
        StateKeeper(ranks, folder, 1, 3, 1).newest()


def test_the_death_of_another_rank_needs_a_restart(ranks, folder):
    def wait():
        try:
            raise PeerFailed(MPI.ERR_OTHER, "rank 1 has died")
        except PeerFailed as error:
            raise RuntimeError("the step failed") from error

    with pytest.raises(RuntimeError), StateKeeper(ranks, folder, 0, 3, 1) as keeper:
        keeper.newest()
        wait()
    ranks.Barrier()
    assert StateKeeper(ranks, folder, 1, 3, 1).newest() is None


def test_too_little_memory(ranks, folder, monkeypatch):
    monkeypatch.setattr(state_keeper, "ROOM", 1 << 60)
    keeper = StateKeeper(ranks, folder, 0, 3, 1)
    keeper.newest()
    with Training(settings(), ranks) as training, pytest.raises(ValueError, match=r"not enough memory: .*kept states"):
        keeper.begin(training)


def test_the_number_of_steps_between_states(ranks, folder, monkeypatch):
    """It is equal on all ranks, and grows with the time for a state."""
    monkeypatch.setattr(state_keeper, "SHARE", 1e-6)
    keeper = StateKeeper(ranks, folder, 0, 3)
    keeper.newest()
    train(ranks, keeper, settings(), 9)
    assert keeper.every > 1 and keeper.every == ranks.allreduce(keeper.every, MPI.MAX)
    assert max(one.step for one in keeper._own) == state_keeper.MEASURED

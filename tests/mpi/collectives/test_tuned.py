"""A communicator that goes by a table takes what was measured, alike on all ranks; and the tuner makes such tables."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import tune
from collectives.errors import InvalidType
from collectives.runtime.builders import native
from collectives.selection import timing_file
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, TimingKey, TimingTable, shape

pytestmark = pytest.mark.ranks(1, 2)


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks."""
    return world.bcast(tmp_path)


@pytest.fixture
def place(world):
    """The shape of these ranks' placement."""
    with Communicator(world, tuning=False) as comm:
        return shape(comm.nodes, comm.Get_size())


def table(world, place, fastest, collective="allreduce", form="blocking"):
    """One in which `fastest` always is, and linear comes next."""
    row = {AlgorithmChoice("linear"): 2e-6, AlgorithmChoice("mst"): 3e-6} | {fastest: 1e-6}
    return TimingTable(entries={TimingKey(collective, form, world.Get_size(), place): {8: row, 1 << 24: row}})


def total(comm, dtype="d", n=4, **keywords):
    mine, result = np.full(n, comm.Get_rank() + 1).astype(dtype), np.empty(n, dtype)
    comm.Allreduce(mine, result, **keywords)
    size = comm.Get_size()
    assert (result == size * (size + 1) // 2).all()


@pytest.mark.parametrize(
    "fastest", [AlgorithmChoice("mst", 2), AlgorithmChoice("ring"), AlgorithmChoice(NATIVE)], ids=str
)
def test_auto_takes_what_was_measured(world, place, fastest):
    with Communicator(world, tuning=table(world, place, fastest)) as comm:
        assert comm.choice("allreduce", 64)[:2] == fastest
        assert comm.choice("allreduce", 64).source == "measured"
        assert comm.choice("broadcast", 64).source == "model"
        for n in (1, 1000, 100_000):
            for _ in range(3):
                total(comm, n=n)


def test_native_is_not_taken_for_what_mpi_cannot_do(world, place):
    with Communicator(world, tuning=table(world, place, AlgorithmChoice(NATIVE))) as comm:
        assert comm.choice("allreduce", 8)[0] == NATIVE
        for dtype in ("e", "d"):
            for _ in range(2):
                total(comm, dtype)
        total(comm, segments=2)
        request = comm.Iallreduce(np.ones(3), np.empty(3))  # not measured in this form: ours
        request.Wait()
        assert comm.choice("allreduce", 8, form="nonblocking")[0] == "linear"


def test_native_is_not_promised_where_this_mpi_is_unsound(world, place, monkeypatch):
    """`choice` says what a call takes."""
    everything, mine = np.empty(2 * world.Get_size()), np.arange(2.0)
    with Communicator(world, tuning=table(world, place, AlgorithmChoice(NATIVE), "allgather", "persistent")) as comm:
        vendor = MPI.get_vendor()[0]
        monkeypatch.setattr(native, "UNSOUND", {})
        assert comm.choice("allgather", everything.nbytes, form="persistent")[0] == NATIVE
        monkeypatch.setattr(native, "UNSOUND", {(vendor, "Allgather", "persistent"): "is not right"})
        assert comm.choice("allgather", everything.nbytes, form="persistent")[0] != NATIVE
        request = comm.Allgather_init(mine, everything)
        request.Start()
        request.Wait()
        assert (everything.reshape(-1, 2) == mine).all()
        request.Free()


def test_ranks_may_hold_their_data_differently(world, place):
    """Half of them a column, which is packed first: the choice is the same on all."""
    rank, size = world.Get_rank(), world.Get_size()
    with Communicator(world, tuning=table(world, place, AlgorithmChoice(NATIVE), "broadcast")) as comm:
        column = MPI.INT.Create_vector(6, 1, 4).Commit()
        for root in range(size):
            buffer = np.full((6, 4), rank, "i4") if rank % 2 else np.full(6, rank, "i4")
            comm.Bcast([buffer, 1, column] if rank % 2 else buffer, root)
            assert ((buffer[:, 0] if rank % 2 else buffer) == root).all()
        column.Free()


def test_others_go_on_while_auto_waits_inside_mpi(world, place):
    with Communicator(world, tuning=table(world, place, AlgorithmChoice(NATIVE))) as comm:
        sums = np.empty(4)
        for _ in range(5):
            request = comm.Iallreduce(np.ones(4), sums, algorithm="linear")
            if comm.Get_rank():
                request.Wait()
            total(comm)
            request.Wait()
            assert (sums == comm.Get_size()).all()


def test_what_rank_0_finds_counts_for_all(world, folder, place):
    """Every rank names a file of its own: one good, others missing, broken, or saying something else."""
    rank = world.Get_rank()
    timing_file.write(folder / f"{rank}.json", table(world, place, AlgorithmChoice("mst" if rank == 0 else "ring")))
    if rank == 1:
        (folder / "1.json").write_text("{")
    if rank == 2:
        (folder / "2.json").unlink()
    world.Barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = Communicator(world, tuning=folder / f"{rank}.json")
    with comm:
        assert comm.choice("allreduce", 8) == ("mst", 1, 1e-6, "measured")
        total(comm)
        with comm.Dup() as twin:
            assert twin.choice("allreduce", 64) == comm.choice("allreduce", 64)
        half = comm.Split(rank % 2)
        with half:
            total(half)
        half.Free()


def test_a_broken_table_is_told_of_once_and_everything_works(world, folder):
    path = folder / "broken.json"
    path.write_text("]")
    world.Barrier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        comm = Communicator(world, tuning=path)
    assert len(told) == (world.Get_rank() == 0)
    assert all("continuing without a tuned table" in str(each.message) and each.filename == __file__ for each in told)
    with comm:
        assert comm.choice("allreduce", 64).source == "model"
        total(comm)


def test_what_rank_0_refuses_is_refused_by_all(world):
    for tuning in (3.5, 3.5 if world.Get_rank() == 0 else False):
        with pytest.raises(InvalidType, match=r"tuning: expected a path, True, False or None, found 3\.5"):
            Communicator(world, tuning=tuning)


def test_a_warning_that_is_an_error_leaves_no_rank_waiting(world, folder):
    with warnings.catch_warnings(), pytest.raises(UserWarning) if world.Get_rank() == 0 else nullcontext():
        warnings.simplefilter("error")
        Communicator(world, tuning=folder / "missing.json").close()


@pytest.mark.parametrize(
    "names", ["allreduce,barrier", pytest.param("allreduce,broadcast,barrier,gatherv", marks=pytest.mark.full)]
)
def test_the_tuner_makes_a_table_that_is_taken(world, folder, place, names):
    path = folder / "table.json"
    words = ["--collective", names, "--sizes", "8,1K,128K", "--seconds", "0", "--iterations", "5", "--table", str(path)]
    args = tune.parse(words)
    made, wins, wrong = tune.tune(args, TimingTable())
    world.Barrier()
    assert wrong == 0
    assert sum(wins.values()) == 3 * names.count(",") + 1  # a barrier has one size
    assert timing_file.read(path) == made
    size = world.Get_size()
    for collective in names.split(","):
        rows = made.entries[TimingKey(collective, "blocking", size, place)]
        assert all(AlgorithmChoice(NATIVE) in row and len(row) >= 2 for row in rows.values())
    with Communicator(world, tuning=path) as comm:
        for nbytes in (8, 1024, 4096, 1 << 17):
            chosen = comm.choice("allreduce", nbytes)
            assert chosen.source == "measured"
            total(comm, n=nbytes // 8)
        assert comm.choice("barrier", 0).source == "measured"
    again, *_ = tune.tune(tune.parse([*words[:2], "--sizes", "64", *words[4:]]), made)
    assert list(again.entries[TimingKey("allreduce", "blocking", size, place)])[:2] == [8, 64]


def test_the_tuner_measures_other_forms(world, folder, place):
    path = folder / "forms.json"
    words = ["--collective", "allreduce", "--sizes", "64", "--seconds", "0", "--iterations", "3", "--table", str(path)]
    made, *_ = tune.tune(tune.parse([*words, "--form", "nonblocking"]), TimingTable())
    assert list(made.entries) == [TimingKey("allreduce", "nonblocking", world.Get_size(), place)]

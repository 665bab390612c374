"""The benchmark, end to end: every collective in every form is measured, and its results are right."""

import pytest
from mpi4py import MPI

from collectives.benchmark.calibrate import SWEEPS, calibrate, lengths
from collectives.benchmark.cases import CASES, DTYPES
from collectives.benchmark.measure import RaceOptions, measure
from collectives.cli.bench import hidden_share, overlap_lines
from collectives.runtime.builders import native

FEW = {"iterations": 3, "warmup": 2, "seconds": 0.0}


FORMS = [
    ("blocking", False, "native"),
    ("blocking", True, "native"),
    ("nonblocking", False, "native"),
    ("persistent", False, "none"),  # not every MPI performs its own persistent collectives right
]


def forms():
    """Every collective in every form; the default tests take two collectives."""
    for collective in CASES:
        for form in FORMS:
            quick = collective in ("allreduce", "gatherv")
            yield pytest.param(collective, *form, marks=[] if quick else [pytest.mark.full])


@pytest.mark.parametrize(("collective", "mode", "in_place", "against"), list(forms()))
def test_every_form(world, comm, collective, mode, in_place, against):
    options = RaceOptions(modes=[mode], in_place=in_place, against=against, limits=FEW)
    for nbytes in (0, 1000):
        rows, absent = measure(world, comm, collective, ["auto"], nbytes, options=options)
        assert absent == {}
        assert [row["wrong"] for row in rows] == [0]
        assert rows[0]["iterations"] == 3


def test_the_share_that_is_hidden(world):
    lines = [line.split() for line in overlap_lines(world, "allreduce", 1000, "float32", 1)]
    names = [(name, work) for name in ("MPI", "Chorus", "async_progress") for work in ("sleep", "matmul")]
    assert [tuple(line[:2]) for line in lines] == names
    for *_, alone, work, both, hidden in lines:
        assert float(alone) + float(work) + float(both) > 0
        assert 0 <= float(hidden[:-1]) <= 100
    assert [hidden_share(4, 20, both) for both in (19, 20, 21, 24, 30)] == [1, 1, 0.75, 0, 0]
    assert hidden_share(0, 1, 1) == 0


def test_overlap_of_a_call_that_one_refuses(world):
    class Refuses(MPI.Intracomm):
        def Iallreduce(self, *_):
            raise BufferError("no such dtype")

    lines = [line.split() for line in overlap_lines(Refuses(world), "allreduce", 1000, "float32", 1)]
    assert lines[0] == ["MPI", "refused:", "BufferError:", "no", "such", "dtype"]
    assert [line[0] for line in lines[1:]] == ["Chorus"] * 2 + ["async_progress"] * 2


def test_several_modes_make_one_race(world, comm):
    modes = ["blocking", "nonblocking"]
    options = RaceOptions(modes=modes, limits=FEW)
    rows, absent = measure(world, comm, "allreduce", ["ring", "census"], 1000, options=options)
    assert absent == {}
    assert [(row["mode"], row["algorithm"]) for row in rows] == [(m, a) for m in modes for a in ("ring", "census")]
    assert len({(row["mode"], row["native_us"]) for row in rows}) == 2


def test_every_mode_has_a_reason_of_its_own(world, comm, monkeypatch):
    reasons = {"nonblocking": "never ends", "persistent": "is wrong"}
    vendor = MPI.get_vendor()[0]
    monkeypatch.setattr(native, "UNSOUND", {(vendor, "Allreduce", mode): reasons[mode] for mode in reasons})
    for modes, text in (
        (list(reasons), "nonblocking: this MPI never ends; persistent: this MPI is wrong"),
        (["persistent"], "this MPI is wrong"),
    ):
        _, absent = measure(world, comm, "allreduce", ["ring"], 64, options=RaceOptions(modes=modes, limits=FEW))
        assert absent == {"native": text}


@pytest.mark.parametrize("collective", ["allreduce", "gather", "scatterv", "broadcast"])
def test_both_memories_make_one_race(world, comm, collective):
    memories = ["plain", "symmetric"]
    options = RaceOptions(memories=memories, limits=FEW)
    rows, absent = measure(world, comm, collective, ["auto"], 1000, options=options)
    assert absent == {}
    assert [(row["memory"], row["wrong"]) for row in rows] == [("plain", 0), ("symmetric", 0)]


def test_messages_are_timed_for_the_model(world, comm):
    ticks = []
    costs = calibrate(world, comm, "plain", "blocking", 5000, 0.0, lambda: ticks.append(1))
    assert len(ticks) >= SWEEPS * len(lengths(5000))
    assert world.allgather(costs) == [costs] * world.Get_size()
    options = RaceOptions(costs={("plain", "blocking"): costs}, limits=FEW)
    rows, _ = measure(world, comm, "allreduce", ["auto"], 64, options=options)
    assert rows[0]["predicted_us"] > 0  # on one rank too: it copies


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(world, comm, dtype):
    (row,), _ = measure(world, comm, "allreduce", ["auto"], 100, dtype, RaceOptions(limits=FEW))
    assert row["wrong"] == 0


def test_ranks_agree_on_the_rows(world, comm):
    options = RaceOptions(limits={"iterations": 50, "seconds": 0.01})
    rows, _ = measure(world, comm, "allreduce", ["auto"], 64, options=options)
    assert world.allgather(rows) == [rows] * world.Get_size()


def test_a_wrong_result_is_counted(world, comm):
    """An Allreduce that loses an element on one rank is found out."""

    class Careless(type(comm)):
        def Allreduce(self, sendbuf, recvbuf, *args, **keywords):
            super().Allreduce(sendbuf, recvbuf, *args, **keywords)
            if self.Get_rank() == self.Get_size() - 1:
                recvbuf[-1] += 1

    rows, _ = measure(world, Careless(world), "allreduce", ["auto"], 64, options=RaceOptions(limits=FEW))
    assert rows[0]["wrong"] == 5  # one element, at each of two warm-up and three timed calls

"""A call is recorded on all ranks, and nothing of it is lost or out of order."""

import pytest
from support.span_checks import check

from collectives.algorithms import catalog
from collectives.benchmark import traces
from collectives.cli import trace


@pytest.mark.parametrize("algorithm", ["ring", "rabenseifner", "direct"])
@pytest.mark.parametrize("nbytes", ["8", "300000"])
def test_a_recorded_call(world, algorithm, nbytes):
    arguments = trace.parse(["--collective", "allreduce", "--algorithm", algorithm, "--bytes", nbytes])
    entries = trace.recorded(arguments, world)
    assert (entries is None) == (world.Get_rank() > 0)
    if entries is not None:
        check(entries)
        size = world.Get_size()
        whole = [entry for entry in entries if entry.get("cat") == "collective"]
        assert sorted(entry["tid"] for entry in whole) == list(range(size))
        rounds = sum(bool(steps) for it in catalog.build_all("allreduce", algorithm, size) for steps in it)
        told = [entry for entry in entries if entry.get("cat") == "round"]
        assert len(told) == rounds or nbytes == "8"  # a short swap is one call, whatever its rounds


def test_clocks_of_one_machine_agree(world):
    """Ranks of one machine read the same clock; what is found between them is a part of a message's way."""
    assert abs(traces.offset(world)) < 0.1

"""Ranks as threads that run their programs at once, without the GIL, over the same mailboxes.

`scripts/sanitize` runs these tests with an engine that reports data races.
"""

import threading

import pytest
from support.plain_node import CELL, PlainHub
from support.schedule_cases import ENTRIES, Case
from support.tiers import default

from collectives.algorithms.catalog import find
from collectives.engine.extension import available
from collectives.engine.instructions import DONE, WAITING, Kind

pytestmark = pytest.mark.skipif(not available(), reason="this installation has no compiled engine")

TURNS, POLLS, NAPS = 5, 10_000, 10_000

LENGTHS = {"beside the flag": 3, "short": 30, "bounce buffer": 300, "by address": 3 * CELL, "offered": 1 << 17}
"""Elements of 8 bytes on each rank, by the way of most messages."""

HUBS = {"whole": {}, "mapped": {}, "cut": {"cell": 1 << 12, "part": 1 << 12, "streamed": 1 << 20}}
"""Mailboxes; `mapped`: ranks have mapped each other's arrays, and read them there."""


def hub_of(size, **options):
    """Mailboxes of ranks that do not share cores: so they write each other's memory, too."""
    hub = PlainHub(size, **options)
    for node in hub.nodes:
        node.shares_cores, node.writes = False, True
    return hub


def run_at_once(programs, turns):
    """Run each program in a thread, several times one after the other."""
    results, start = [], threading.Barrier(len(programs))

    def run(engine):
        start.wait()
        for _ in range(turns):
            engine.begin()
            result = WAITING
            for _ in range(100):
                if result == WAITING:
                    result = engine.advance_patiently(POLLS, NAPS)
            results.append(result)

    threads = [threading.Thread(target=run, args=(program.engine,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [DONE] * len(results) and len(results) == turns * len(programs)


def names():
    """Algorithms whose reductions the engine has."""
    return [f"{collective} {name}" for collective, name in ENTRIES if not find(collective, name).ordered]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", HUBS)
@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize(
    "entry", default(names(), "allreduce ring", "alltoall pairwise", "broadcast mst", "allgather ring")
)
def test_collectives(entry, way, kind, size):
    collective, name = entry.split()
    hub = hub_of(size, **HUBS[kind])
    case = Case(collective, name, size, LENGTHS[way], hub=hub)
    if kind == "mapped":
        for rank in range(size):
            hub.map(rank, case.sources[rank]), hub.map(rank, case.targets[rank])
    assert not any(Kind.CALL in program.kinds for program in case.programs), (
        "a thread that runs Python waits for the GIL"
    )
    case.fill()
    run_at_once(case.programs, TURNS)
    case.check()

"""Tuner: transport costs, candidates of a row, their timing, and elimination."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.analysis.cost_functions import UniformNetwork
from collectives.benchmark.cases import CASES, DTYPES, CaseBuffers, elements
from collectives.benchmark.chorus_side import even
from collectives.benchmark.measure import enter
from collectives.benchmark.timing import race
from collectives.schedule.topology import Nodes
from collectives.selection.cost_model import Costs, uniform_network
from collectives.selection.select import formula
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, Row

PINGS = (8, 4096, 65536, 1 << 20, 1 << 22)
"""Sizes of the ping-pong, in bytes."""

FAR_BEHIND = 3.0
"""Multiple of the winner's time that counts as far behind."""

LONG = 1 << 16
"""Bytes from which pipelining may pay."""

MOST_SEGMENTS = 64

SMALL = 8
"""Ranks up to which algorithms may well have the same schedules."""


# ------------------------------------------------------------------------------------------ transport costs


def fit(times: dict[int, float]) -> tuple[float, float]:
    """(alpha, beta) of the line through seconds by bytes, relative errors counting alike.

    >>> alpha, beta = fit({0: 2e-6, 1000: 3e-6, 100_000: 102e-6})
    >>> round(alpha * 1e6, 3), round(beta * 1e9, 3)
    (2.0, 1.0)
    """
    sizes, seconds = np.array(list(times), float), np.array(list(times.values()))
    rows = np.stack([np.ones_like(sizes), sizes], 1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones_like(sizes), rcond=None)[0]
    quickest = seconds.min()
    return max(float(alpha), 0.1 * quickest), max(float(beta), 1e-13)


def ping_pong(comm: Communicator, seconds: float) -> dict[int, float]:
    """Seconds of one message of each size between two ranks, over our own transport; median of a few dozen."""
    found = {}
    for nbytes in PINGS:
        data = np.zeros(nbytes, np.uint8)
        both: list[float] = []
        until = perf_counter() + seconds / len(PINGS)
        while len(both) < 10 or comm.bcast(perf_counter() < until):
            for _ in range(5):
                begin = perf_counter()
                comm.Bcast(data, 0, algorithm="linear")
                comm.Bcast(data, 1, algorithm="linear")
                both.append(perf_counter() - begin)
        found[nbytes] = float(np.median(both[2:])) / 2
    return found


def combining(seconds: float, nbytes: int = 1 << 18) -> float:
    """Seconds to combine a byte that lies in the cache."""
    one, other = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    times: list[float] = []
    until = perf_counter() + seconds
    while len(times) < 10 or perf_counter() < until:
        begin = perf_counter()
        np.add(one, other, other)
        times.append(perf_counter() - begin)
    return float(np.median(times)) / nbytes


def pairs(nodes: Nodes | None, size: int) -> dict[str, tuple[int, int]]:
    """For each wire that there is, two ranks which it joins.

    >>> pairs((0, 0, 1), 3), pairs(None, 4), pairs((0, 1), 2)
    ({'shared': (0, 1), 'network': (0, 2)}, {'shared': (0, 1)}, {'network': (0, 1)})
    """
    where = nodes or (0,) * size
    found: dict[str, tuple[int, int]] = {}
    for rank in range(1, size):
        found.setdefault("shared" if where[rank] == where[0] else "network", (0, rank))
    if "shared" not in found:  # no neighbour of rank 0: the first other two ranks on one node
        later = ((where.index(where[rank], 1), rank) for rank in range(1, size))
        if pair := next(((first, rank) for first, rank in later if first < rank), None):
            found["shared"] = pair
    return found


def measure_costs(plain: MPI.Intracomm, comm: Communicator, seconds: float, known: Costs) -> Costs:
    """The costs of the wires that join these ranks; those `known` for others. Collective."""
    costs = known
    for wire, pair in pairs(comm.nodes, plain.Get_size()).items():
        mine: Any = plain.Split(0 if plain.Get_rank() in pair else MPI.UNDEFINED)
        fitted = None
        if mine != MPI.COMM_NULL:
            nodes = None if wire == "shared" else (0, 1)
            with Communicator(mine, tuning=False, nodes=nodes) as both:
                fitted = UniformNetwork(*fit(ping_pong(both, seconds)), combining(seconds / 5))
            mine.Free()
        costs = costs._replace(**{wire: plain.bcast(fitted, pair[0])})
    return costs


# ------------------------------------------------------------------------------------------ the rows


class TunerSetting(NamedTuple):
    """Parameters of one row."""

    collective: str
    form: str
    dtype: str
    nbytes: int


def candidates(collective: str, nbytes: int, size: int, nodes: Nodes | None, costs: Costs) -> list[AlgorithmChoice]:
    """Every algorithm that `auto` may choose, in segments where they may pay, and the MPI's own."""
    wire = uniform_network(nodes, costs)
    private = collective in ("scatterv", "gatherv", "alltoallv")
    found: list[AlgorithmChoice] = []
    for name, entry in catalog.CATALOG[even(collective)].items():
        if not entry.alike or (entry.placed and wire is not None):
            continue
        found.append(AlgorithmChoice(name))
        if nbytes < LONG or private:
            continue
        if entry.placed:
            found += [AlgorithmChoice(name, segments) for segments in (4, 16)]
            continue
        powers = [1 << power for power in range(MOST_SEGMENTS.bit_length())]
        best = min(powers, key=lambda k: formula(even(collective), name, size, nbytes, k, wire or costs.network))
        found += [AlgorithmChoice(name, segments) for segments in {best, max(1, best // 4), 4} if segments > 1]
    return [*_different(even(collective), sorted(set(found)), size, nodes), AlgorithmChoice(NATIVE)]


def _different(
    collective: str, choices: list[AlgorithmChoice], size: int, nodes: Nodes | None
) -> list[AlgorithmChoice]:
    """The choices with different schedules, the first of equal ones: on two ranks most are equal."""
    if size > SMALL:
        return choices
    seen: dict[object, AlgorithmChoice] = {}
    for name, segments in choices:
        built = tuple(tuple(catalog.build_all(collective, name, size, root, segments, nodes)) for root in {0, size - 1})
        seen.setdefault((catalog.blocks(collective, name, size) * segments, built), AlgorithmChoice(name, segments))
    return list(seen.values())


def contest(
    plain: MPI.Intracomm,
    comm: Communicator,
    setting: TunerSetting,
    choices: Iterable[AlgorithmChoice],
    limits: dict[str, Any],
) -> tuple[int, dict[AlgorithmChoice, float], dict[AlgorithmChoice, str]]:
    """Race the choices: (bytes, seconds of each that took part and was right, reasons of the others)."""
    collective, form, dtype, nbytes = setting
    case, kind = CASES[collective], DTYPES[dtype]
    count = 0 if collective == "barrier" else elements(case, nbytes, kind.itemsize, plain.Get_size())
    buffers = CaseBuffers(case, plain, count, kind, "plain")
    running, absent = {}, {}
    for choice in choices:
        keywords: dict[str, Any] = {"algorithm": choice.algorithm}
        if choice.algorithm != NATIVE:
            keywords["segments"] = choice.segments
        entry = enter(plain, comm, str(choice), keywords, buffers, form)
        if isinstance(entry, str):
            absent[choice] = entry
        else:
            running[choice] = entry
    timings = race(plain, list(running.values()), **limits) if running else []
    row = {}
    for (choice, contestant), timing in zip(running.items(), timings, strict=True):
        contestant.close()
        if timing.wrong:
            absent[choice] = f"wrong: {timing.wrong} elements"
        else:
            row[choice] = timing.median / 1e6
    return count * kind.itemsize, row, absent


class TunerCandidates:
    """Remaining candidates: an algorithm far behind at two consecutive sizes is dropped for larger ones."""

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}

    def left(self, choices: Iterable[AlgorithmChoice]) -> list[AlgorithmChoice]:
        """Those of the choices that are not out. The MPI's own always stays, to compare with."""
        return [choice for choice in choices if choice.algorithm == NATIVE or self._lost.get(choice.algorithm, 0) < 2]

    def note(self, row: Row) -> None:
        """Take the result of a race."""
        best: dict[str, float] = {}
        for choice, seconds in row.items():
            best[choice.algorithm] = min(seconds, best.get(choice.algorithm, seconds))
        for name, seconds in best.items():
            behind = seconds > FAR_BEHIND * min(best.values())
            self._lost[name] = self._lost.get(name, 0) + 1 if behind else 0


def say_row(setting: TunerSetting, nbytes: int, row: Row) -> str:
    """Text of a row: the winner, and the time of the MPI's own."""
    if not row:
        return f"{setting.collective:<16}{nbytes:>12}  no candidate took part"
    best = min(row, key=row.__getitem__)
    native = row.get(AlgorithmChoice(NATIVE))
    against = "" if native is None or best.algorithm == NATIVE else f"  native {native * 1e6:.1f} us"
    return f"{setting.collective:<16}{nbytes:>12}  {best!s:<28}{row[best] * 1e6:>12.1f} us{against}"

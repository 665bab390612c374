"""Tuner: measurement of transport costs, candidate algorithms, their timing, and elimination of slow ones."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.analysis.cost_functions import UniformNetwork
from collectives.benchmark.cases import CASES, DTYPES, CaseBuffers, elements, even_form
from collectives.benchmark.measure import enter, race_entries
from collectives.schedule.topology import Nodes
from collectives.selection.cost_model import Costs, uniform_network
from collectives.selection.select import formula, has_local_counts
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


def fit(times: dict[int, float]) -> tuple[float, float]:
    """Fit seconds = alpha + beta * bytes to `times` (bytes: seconds) by relative error. Return (alpha, beta).

    >>> alpha, beta = fit({0: 2e-6, 1000: 3e-6, 100_000: 102e-6})
    >>> round(alpha * 1e6, 3), round(beta * 1e9, 3)
    (2.0, 1.0)
    """
    sizes, seconds = np.array(list(times), float), np.array(list(times.values()))
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return max(float(alpha), 0.1 * seconds.min()), max(float(beta), 1e-13)


def median_seconds(call: Callable[[], object], seconds: float, agree: Callable[[bool], Any] = bool) -> float:
    """Median seconds of a call repeated for `seconds`, at least ten times. `agree` makes ranks stop at the same call.

    `agree`, such as `comm.bcast`, turns this rank's decision to go on into a decision of all ranks. The first two
    calls do not count.
    """
    times: list[float] = []
    until = perf_counter() + seconds
    while len(times) < 10 or agree(perf_counter() < until):
        for _ in range(5):
            begin = perf_counter()
            call()
            times.append(perf_counter() - begin)
    return float(np.median(times[2:]))


def ping_pong(comm: Communicator, seconds: float) -> dict[int, float]:
    """Seconds of a message one way between the two ranks of `comm`, by size in bytes, over Chorus's transport."""

    def both(data: np.ndarray) -> None:
        comm.Bcast(data, 0, algorithm="linear")
        comm.Bcast(data, 1, algorithm="linear")

    calls = {nbytes: partial(both, np.zeros(nbytes, np.uint8)) for nbytes in PINGS}
    return {nbytes: median_seconds(call, seconds / len(PINGS), comm.bcast) / 2 for nbytes, call in calls.items()}


def combining(seconds: float, nbytes: int = 1 << 18) -> float:
    """Seconds per byte to add two float32 arrays that are in the cache."""
    one, other = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    return median_seconds(partial(np.add, one, other, other), seconds) / nbytes


def pairs(nodes: Nodes | None, size: int) -> dict[str, tuple[int, int]]:
    """One pair of ranks for each kind of transport between the ranks: same node ("shared"), or "network".

    >>> pairs((0, 0, 1), 3), pairs(None, 4), pairs((0, 1), 2)
    ({'shared': (0, 1), 'network': (0, 2)}, {'shared': (0, 1)}, {'network': (0, 1)})
    """
    where = nodes or (0,) * size
    found: dict[str, tuple[int, int]] = {}
    for one, other in combinations(range(size), 2):
        found.setdefault("shared" if where[one] == where[other] else "network", (one, other))
    return found


def measure_costs(plain: MPI.Intracomm, comm: Communicator, seconds: float, known: Costs) -> Costs:
    """Measure the costs of the transports between these ranks. Absent ones keep their `known` costs. Collective."""
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


class TunerSetting(NamedTuple):
    """Setting that the tuner measures: collective, form of call, dtype and bytes."""

    collective: str
    form: str
    dtype: str
    nbytes: int


def candidates(collective: str, nbytes: int, size: int, nodes: Nodes | None, costs: Costs) -> list[AlgorithmChoice]:
    """Choices to time for `auto`: algorithms, with several segment counts where they may pay, and the MPI's own.

    On few ranks only the first of those with equal schedules: on two ranks most are equal.
    """
    wire, base = uniform_network(nodes, costs), even_form(collective)
    found: set[AlgorithmChoice] = set()
    for name, entry in catalog.CATALOG[base].items():
        if not entry.alike or (entry.placed and wire is not None):
            continue
        segments = {1}
        if nbytes >= LONG and not has_local_counts(collective):
            powers = [1 << power for power in range(MOST_SEGMENTS.bit_length())]
            best = min(powers, key=lambda k: formula(base, name, size, nbytes, k, wire or costs.network))
            segments |= {4, 16} if entry.placed else {4, best, max(1, best // 4)}
        found.update(AlgorithmChoice(name, several) for several in segments)
    choices = sorted(found)
    # timing equal schedules again would take time and show only noise
    if size <= SMALL:
        seen: dict[object, AlgorithmChoice] = {}
        for name, several in choices:
            built = [tuple(catalog.build_all(base, name, size, root, several, nodes)) for root in {0, size - 1}]
            chunks = catalog.blocks(base, name, size) * several
            seen.setdefault((chunks, tuple(built)), AlgorithmChoice(name, several))
        choices = list(seen.values())
    return [*choices, AlgorithmChoice(NATIVE)]


def contest(
    plain: MPI.Intracomm,
    comm: Communicator,
    setting: TunerSetting,
    choices: Iterable[AlgorithmChoice],
    limits: dict[str, Any],
) -> tuple[int, dict[AlgorithmChoice, float], dict[AlgorithmChoice, str]]:
    """Time the choices. Return (bytes, seconds of each correct choice, errors of the others). Collective."""
    collective, form, dtype, nbytes = setting
    case, kind = CASES[collective], DTYPES[dtype]
    count = elements(case, nbytes, kind.itemsize, plain.Get_size())
    buffers = CaseBuffers(case, plain, count, kind, "plain")
    entries = {}
    for choice in choices:
        keywords = choice._asdict() if choice.algorithm != NATIVE else {"algorithm": NATIVE}
        entries[choice] = enter(plain, comm, str(choice), keywords, buffers, form)
    timings, absent = race_entries(plain, entries, limits)
    absent |= {choice: f"wrong: {timing.wrong} elements" for choice, timing in timings.items() if timing.wrong}
    row = {choice: timing.median / 1e6 for choice, timing in timings.items() if not timing.wrong}
    return count * kind.itemsize, row, absent


def fastest(row: Row) -> AlgorithmChoice:
    return min(row, key=row.__getitem__)


class TunerCandidates:
    """Elimination of candidates: an algorithm far behind at two consecutive sizes is not timed at larger ones."""

    def __init__(self) -> None:
        self._lost: Counter[str] = Counter()

    def left(self, choices: Iterable[AlgorithmChoice]) -> list[AlgorithmChoice]:
        """Choices whose algorithms are not eliminated. The MPI's own always stays, to compare with."""
        return [choice for choice in choices if choice.algorithm == NATIVE or self._lost[choice.algorithm] < 2]

    def note(self, row: Row) -> None:
        best = {choice.algorithm: row[choice] for choice in sorted(row, key=row.__getitem__, reverse=True)}
        for name, seconds in best.items():
            behind = seconds > FAR_BEHIND * min(best.values())
            self._lost[name] = self._lost[name] + 1 if behind else 0

"""One measurement: our algorithms and the native collective, at one size, in one race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpi4py import MPI

from collectives.benchmark import chorus_side
from collectives.benchmark.calibrate import CalibratedCosts, predicted_us
from collectives.benchmark.cases import CASES, DTYPES, CaseBuffers, elements
from collectives.benchmark.result_rows import Row, make_row
from collectives.benchmark.timing import MODES, Contestant, make_call, race
from collectives.runtime import native
from collectives.selection.timing_table import NATIVE


def enter(
    plain: MPI.Intracomm,
    comm: MPI.Intracomm,
    name: str,
    keywords: dict[str, Any],
    buffers: CaseBuffers,
    method: str,
    mode: str,
) -> Contestant | str:
    """A contestant that has performed two calls; or, if it cannot take part, why.

    Ours may refuse (on all ranks); what it computes is judged in the race. The native one must also be right,
    as some libraries accept a persistent collective and then perform it wrongly.

    Raises
    ------
    RuntimeError
        If our call failed on some ranks only.
    """
    unsound = native.unsound(method, mode) if name == NATIVE else None
    if unsound is not None:
        return f"this MPI {unsound}"  # not even tried, since it may never end
    error, wrong = None, 0
    try:
        call, close = make_call(comm, method, mode, buffers.args, keywords)
        for _ in range(2):
            buffers.advance()
            buffers.poison()
            call()
            wrong += buffers.wrong()
    except Exception as caught:
        error = caught
    outcomes = plain.allgather((None if error is None else f"{type(error).__name__}: {error}", wrong))
    failures = [failure for failure, _ in outcomes if failure is not None]
    if name != NATIVE and failures and len(failures) < len(outcomes):
        raise RuntimeError(f"{method} with {name} failed on some ranks only: {outcomes}") from error
    if failures:
        return failures[0].split("\n")[0]
    if name == NATIVE and any(count for _, count in outcomes):
        return f"its results are wrong (elements per rank: {[count for _, count in outcomes]})"
    return Contestant(name, buffers, call, close)


def measure(
    plain: MPI.Intracomm,
    comm: MPI.Intracomm,
    *,
    collective: str,
    algorithms: list[str],
    nbytes: int,
    dtype: str = "float32",
    memories: Sequence[str] = ("plain",),
    modes: Sequence[str] = MODES[:1],
    in_place: bool = False,
    segments: int | None = None,
    against: str = NATIVE,
    costs: Mapping[tuple[str, str], CalibratedCosts] | None = None,
    **limits: Any,
) -> tuple[list[Row], dict[str, str]]:
    """Race `algorithms` of one collective at one size, in all memories and modes, against the native one in each mode.

    Parameters
    ----------
    plain, comm
        The MPI's communicator and ours, over the same ranks.
    collective, algorithms, dtype, memories, modes, segments
        Names as on the command line. The native collective has plain memory.
    nbytes
        Size of the whole array; rounded up to whole elements, or to equal blocks where needed.
    costs
        What messages cost, by memory and mode: rows then say what the model expects.
    limits
        `iterations`, `warmup`, `seconds` and `seed` of the race.

    Returns
    -------
    rows
        One per algorithm, memory and mode that took part, equal on all ranks.
    absent
        Who did not take part, and why.
    """
    case, size = CASES[collective], plain.Get_size()
    kind = DTYPES[dtype]
    n = 0 if collective == "barrier" else elements(case, nbytes, kind.itemsize, size)
    mine = {memory: CaseBuffers(case, comm, n, kind, memory, in_place) for memory in memories}
    running: dict[tuple[str, str, str], Contestant] = {}
    absent: dict[str, str] = {}

    def join(
        who: MPI.Intracomm, name: str, keywords: dict[str, Any], buffers: CaseBuffers, memory: str, mode: str
    ) -> None:
        entry = enter(plain, who, name, keywords, buffers, case.method, mode)
        if isinstance(entry, str):
            absent[name] = entry
        else:
            running[name, memory, mode] = entry

    for mode in modes:
        for memory in memories:
            for algorithm in algorithms:
                join(comm, algorithm, chorus_side.keywords(algorithm, segments), mine[memory], memory, mode)
    if against == NATIVE and running:
        theirs = mine.get("plain")
        if theirs is None or theirs.unknown_to_mpi:
            theirs = CaseBuffers(case, plain, n, kind, "plain", in_place, disguise=True)
        for mode in modes:
            join(plain, NATIVE, {}, theirs, "plain", mode)
    timings = dict(zip(running, race(plain, list(running.values()), **limits) if running else (), strict=True))
    for contestant in running.values():
        contestant.close()
    natives = {mode: timings.pop((NATIVE, "plain", mode), None) for mode in modes}
    actual = n * kind.itemsize
    rows = []
    for (algorithm, memory, mode), timing in timings.items():
        auto = algorithm == "auto"
        chosen, pieces = (
            chorus_side.choice(comm, collective, actual, mode, memory, in_place) if auto else (algorithm, segments)
        )
        setting = (chorus_side.even(collective), chosen, size, actual, segments or pieces or 1)
        known = None if costs is None or chosen == NATIVE else costs[memory, mode]
        expected = None if known is None else predicted_us(known, *setting, in_place=in_place)
        row = make_row(
            collective, algorithm, size, actual, timing, natives[mode], expected,
            dtype=dtype, memory=memory, mode=mode, in_place=in_place, segments=segments,
        )  # fmt: skip
        rows.append(row | {"chosen": chosen, "chosen_segments": pieces} if auto else row)
    return rows, absent

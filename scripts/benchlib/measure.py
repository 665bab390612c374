"""One measurement: our algorithms and the native collective, at one size, in one race."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from benchlib import ours
from benchlib.cases import CASES, DTYPES, Buffers, elements
from benchlib.rows import Row, make_row
from benchlib.timing import MODES, Contestant, make_call, race
from collectives.measured import NATIVE


def enter(
    plain: MPI.Intracomm,
    comm: MPI.Intracomm,
    name: str,
    keywords: dict[str, Any],
    buffers: Buffers,
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
    memory: str = "plain",
    mode: str = MODES[0],
    in_place: bool = False,
    segments: int | None = None,
    against: str = NATIVE,
    **limits: Any,
) -> tuple[list[Row], dict[str, str]]:
    """Race `algorithms` of one collective at one size against the native one.

    Parameters
    ----------
    plain, comm
        The MPI's communicator and ours, over the same ranks.
    collective, algorithms, dtype, memory, mode, segments
        Names as on the command line.
    nbytes
        Size of the whole array; rounded up to whole elements, or to equal blocks where needed.
    limits
        `iterations`, `warmup`, `seconds` and `seed` of the race.

    Returns
    -------
    rows
        One per algorithm that took part, equal on all ranks.
    absent
        Who did not take part, and why.
    """
    case, size = CASES[collective], plain.Get_size()
    kind = DTYPES[dtype]
    n = 0 if collective == "barrier" else elements(case, nbytes, kind.itemsize, size)
    mine = Buffers(case, plain if memory == "plain" else comm, n, kind, memory, in_place)
    running: list[Contestant] = []
    absent: dict[str, str] = {}
    for algorithm in algorithms:
        entry = enter(plain, comm, algorithm, ours.keywords(algorithm, segments), mine, case.method, mode)
        if isinstance(entry, str):
            absent[algorithm] = entry
        else:
            running.append(entry)
    if against == NATIVE and running:
        theirs = mine
        if memory != "plain" or mine.unknown_to_mpi:
            theirs = Buffers(case, plain, n, kind, "plain", in_place, disguise=True)
        entry = enter(plain, plain, NATIVE, {}, theirs, case.method, mode)
        if isinstance(entry, str):
            absent[NATIVE] = entry
        else:
            running.append(entry)
    names = [entry.name for entry in running]
    timings = dict(zip(names, race(plain, running, **limits), strict=True)) if running else {}
    for entry in running:
        entry.close()
    native = timings.pop(NATIVE, None)
    actual = n * kind.itemsize
    rows = []
    for algorithm, timing in timings.items():
        auto = algorithm == "auto"
        chosen, pieces = ours.choice(comm, collective, actual) if auto else (algorithm, segments)
        expected = ours.predicted_us(collective, chosen, size, actual, segments or pieces)
        row = make_row(
            collective, algorithm, size, actual, timing, native, expected,
            dtype=dtype, memory=memory, mode=mode, in_place=in_place, segments=segments,
        )  # fmt: skip
        rows.append(row | {"chosen": chosen, "chosen_segments": pieces} if auto else row)
    return rows, absent

"""One measurement: our algorithms and the native collective, at one size, in one race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.benchmark import chorus_side
from collectives.benchmark.calibrate import CalibratedCosts, predicted_us
from collectives.benchmark.cases import CASES, DTYPES, BenchmarkCase, CaseBuffers, elements
from collectives.benchmark.result_rows import Row, make_row
from collectives.benchmark.timing import MODES, Contestant, Timing, make_call, race
from collectives.runtime import native
from collectives.selection.timing_table import NATIVE


class RaceOptions(NamedTuple):
    """Options of a race; names as on the command line."""

    memories: Sequence[str] = ("plain",)  # of our arrays; the native collective has plain memory
    modes: Sequence[str] = MODES[:1]
    in_place: bool = False
    segments: int | None = None
    against: str = NATIVE
    costs: Mapping[tuple[str, str], CalibratedCosts] | None = None  # by memory and mode: rows get predictions
    limits: Mapping[str, Any] = MappingProxyType({})  # `iterations`, `warmup`, `seconds` and `seed` of the race


Contestants = dict[tuple[str, str, str], Contestant]
"""By algorithm, memory and mode."""


def enter(
    plain: MPI.Intracomm, comm: MPI.Intracomm, name: str, keywords: dict[str, Any], buffers: CaseBuffers, mode: str
) -> Contestant | str:
    """A contestant that has performed two calls; or, if it cannot take part, the reason.

    Ours may refuse (on all ranks); its result is checked in the race. The native one must also be right, as some
    libraries accept a persistent collective and then perform it wrongly. RuntimeError if our call failed on some ranks
    only.
    """
    method = buffers.case.method
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
        return str(failures[0]).split("\n")[0]
    if name == NATIVE and any(count for _, count in outcomes):
        return f"its results are wrong (elements per rank: {[count for _, count in outcomes]})"
    return Contestant(name, buffers, call, close)


def measure(
    plain: MPI.Intracomm,
    comm: MPI.Intracomm,
    collective: str,
    algorithms: list[str],
    nbytes: int,
    dtype: str = "float32",
    options: RaceOptions = RaceOptions(),  # noqa: B008
) -> tuple[list[Row], dict[str, str]]:
    """Race `algorithms` of one collective at one size, in all memories and modes, against the native one in each mode.

    Parameters
    ----------
    plain, comm
        The MPI's communicator and ours, over the same ranks.
    nbytes
        Size of the whole array; rounded up to whole elements, or to equal blocks where needed.

    Returns
    -------
    rows
        One per algorithm, memory and mode that took part, equal on all ranks.
    absent
        The others, with the reason.
    """
    case, kind = CASES[collective], DTYPES[dtype]
    n = 0 if collective == "barrier" else elements(case, nbytes, kind.itemsize, plain.Get_size())
    running, absent = _contestants(plain, comm, case, n, kind, algorithms, options)
    timings = dict(zip(running, race(plain, list(running.values()), **options.limits) if running else (), strict=True))
    for contestant in running.values():
        contestant.close()
    natives = {mode: timings.pop((NATIVE, "plain", mode), None) for mode in options.modes}
    rows = [
        _row(comm, collective, key, n * kind.itemsize, timing, natives[key[2]], dtype, options)
        for key, timing in timings.items()
    ]
    return rows, absent


def _contestants(
    plain: MPI.Intracomm,
    comm: MPI.Intracomm,
    case: BenchmarkCase,
    n: int,
    kind: np.dtype[Any],
    algorithms: list[str],
    options: RaceOptions,
) -> tuple[Contestants, dict[str, str]]:
    """All that take part in the race, and the others with the reason."""
    entries: dict[tuple[str, str, str], Contestant | str] = {}
    ours = {memory: CaseBuffers(case, comm, n, kind, memory, options.in_place) for memory in options.memories}
    for mode, (memory, buffers), name in product(options.modes, ours.items(), algorithms):
        keywords = chorus_side.keywords(name, options.segments)
        entries[name, memory, mode] = enter(plain, comm, name, keywords, buffers, mode)
    if options.against == NATIVE and any(isinstance(entry, Contestant) for entry in entries.values()):
        shared = ours.get("plain")
        if shared is None or shared.unknown_to_mpi:
            shared = CaseBuffers(case, plain, n, kind, "plain", options.in_place, disguise=True)
        for mode in options.modes:
            entries[NATIVE, "plain", mode] = enter(plain, plain, NATIVE, {}, shared, mode)
    running = {key: entry for key, entry in entries.items() if isinstance(entry, Contestant)}
    return running, {key[0]: entry for key, entry in entries.items() if isinstance(entry, str)}


def _row(
    comm: MPI.Intracomm,
    collective: str,
    key: tuple[str, str, str],
    nbytes: int,
    timing: Timing,
    native_timing: Timing | None,
    dtype: str,
    options: RaceOptions,
) -> Row:
    """The row of one contestant, with the model's prediction if there are costs."""
    (algorithm, memory, mode), size, segments = key, comm.Get_size(), options.segments
    chosen, pieces = algorithm, segments
    if algorithm == "auto":
        chosen, pieces = chorus_side.choice(comm, collective, nbytes, mode, memory, options.in_place)
    expected = None
    if options.costs is not None and chosen != NATIVE:
        setting = (chorus_side.even(collective), chosen, size, nbytes, segments or pieces or 1)
        expected = predicted_us(options.costs[memory, mode], *setting, in_place=options.in_place)
    row = make_row(
        collective, algorithm, size, nbytes, timing, native_timing, expected,
        dtype=dtype, memory=memory, mode=mode, in_place=options.in_place, segments=segments,
    )  # fmt: skip
    return row | {"chosen": chosen, "chosen_segments": pieces} if algorithm == "auto" else row

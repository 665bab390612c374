"""One measurement: Chorus's algorithms and the MPI library's own collective at one size, timed in turns."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from collectives.benchmark.calibrate import CalibratedCosts, predicted_us
from collectives.benchmark.cases import CASES, DTYPES, CaseBuffers, elements, even_form
from collectives.benchmark.result_rows import Row, make_row
from collectives.benchmark.timing import MODES, Contestant, Timing, make_call, race
from collectives.runtime.builders import native
from collectives.selection.select import has_local_counts
from collectives.selection.timing_table import NATIVE


class RaceOptions(NamedTuple):
    """Options of a race (implementations timed against each other), with the names of the command line."""

    memories: Sequence[str] = ("plain",)  # of our arrays; the native collective has plain memory
    modes: Sequence[str] = MODES[:1]
    in_place: bool = False
    segments: int | None = None
    against: str = NATIVE
    costs: Mapping[tuple[str, str], CalibratedCosts] | None = None  # by memory and mode: rows get predictions
    limits: Mapping[str, Any] = MappingProxyType({})  # `iterations`, `warmup` and `seconds` of the race


def enter(
    plain: MPI.Intracomm, comm: MPI.Intracomm, name: str, keywords: dict[str, Any], buffers: CaseBuffers, mode: str
) -> Contestant | str:
    """Try implementation `name` twice. Return a contestant to time, or the reason why it cannot be timed. Collective.

    Ours may refuse (on all ranks). Its result is checked in the race. The native one must also be right, as some
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


Key = TypeVar("Key")


def race_entries(
    plain: MPI.Intracomm, entries: Mapping[Key, Contestant | str], limits: Mapping[str, Any]
) -> tuple[dict[Key, Timing], dict[Key, str]]:
    """Time and close the contestants in `entries`. Return timings, and reasons for all others, by key. Collective."""
    running = {key: entry for key, entry in entries.items() if isinstance(entry, Contestant)}
    timings = race(plain, list(running.values()), **limits) if running else []
    for contestant in running.values():
        contestant.close()
    absent = {key: entry for key, entry in entries.items() if isinstance(entry, str)}
    return dict(zip(running, timings, strict=True)), absent


def measure(
    plain: MPI.Intracomm,
    comm: Any,
    collective: str,
    algorithms: list[str],
    nbytes: int,
    dtype: str = "float32",
    options: RaceOptions = RaceOptions(),  # noqa: B008
) -> tuple[list[Row], dict[str, str]]:
    """Time algorithms at one size, in each memory and mode, by default also the MPI's own. Return rows, and errors.

    `plain` and `comm` are the MPI's communicator and ours, over the same ranks. `nbytes`, the size of the whole array,
    is rounded up to whole elements, or to equal blocks where needed. Returns a row per algorithm, memory and mode that
    took part, and the reasons of each algorithm that did not take part in some, with memory and mode if there are
    several. Equal on all ranks. Collective.
    """
    case, kind, size = CASES[collective], DTYPES[dtype], plain.Get_size()
    n = elements(case, nbytes, kind.itemsize, size)
    nbytes = n * kind.itemsize
    entries: dict[tuple[str, str, str], Contestant | str] = {}
    ours = {memory: CaseBuffers(case, comm, n, kind, memory, options.in_place) for memory in options.memories}
    for mode, (memory, buffers), name in product(options.modes, ours.items(), algorithms):
        given = {"algorithm": name, "segments": options.segments}
        keywords = {key: value for key, value in given.items() if value not in ("auto", None)}
        entries[name, memory, mode] = enter(plain, comm, name, keywords, buffers, mode)
    # a native row without any of ours would compare nothing
    if options.against == NATIVE and any(isinstance(entry, Contestant) for entry in entries.values()):
        shared = ours.get("plain") or CaseBuffers(case, plain, n, kind, "plain", options.in_place)
        for mode in options.modes:
            entries[NATIVE, "plain", mode] = enter(plain, plain, NATIVE, {}, shared, mode)
    timings, absent = race_entries(plain, entries, options.limits)
    natives = {mode: timings.pop((NATIVE, "plain", mode), None) for mode in options.modes}
    rows = []
    for (algorithm, memory, mode), timing in timings.items():
        labels = {"dtype": dtype, "memory": memory, "mode": mode, "in_place": options.in_place}
        labels["segments"] = options.segments
        chosen, pieces = algorithm, options.segments
        if algorithm == "auto":
            name = even_form(collective) if collective == "reduce_scatterv" else collective
            symmetric = memory == "symmetric"
            choice = comm.choice(name, nbytes, form=mode, symmetric=symmetric, in_place=options.in_place)
            chosen, pieces = choice.algorithm, choice.segments
            expected_us = None if has_local_counts(collective) else 1e6 * choice.seconds
            labels |= {"chosen": chosen, "chosen_segments": pieces, "expected_us": expected_us}
        if options.costs is not None and chosen != NATIVE:
            setting = even_form(collective), chosen, size, nbytes, options.segments or pieces or 1, options.in_place
            labels["predicted_us"] = predicted_us(options.costs[memory, mode], *setting)
        rows.append(make_row(collective, algorithm, size, nbytes, timing, natives[mode], **labels))
    return rows, _reasons(absent, options)


def _reasons(absent: Mapping[tuple[str, str, str], str], options: RaceOptions) -> dict[str, str]:
    """Join the reasons by algorithm, memory and mode to one text per algorithm."""
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for (name, memory, mode), reason in absent.items():
        labels = ", ".join([memory] * (len(options.memories) > 1) + [mode] * (len(options.modes) > 1))
        by_name[name].append(f"{labels}: {reason}" if labels else reason)
    return {name: "; ".join(reasons) for name, reasons in by_name.items()}

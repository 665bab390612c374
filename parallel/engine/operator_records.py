"""Loss terms and other records that operators write in their passes, combined over a step and all ranks.

A record is known by the operator's name and a word: ``"2.1.inner.1 balance"``. Terms are sums of floating-point
numbers, rounded once, so that they do not depend on the layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.checkpoint.tensor_slices import TensorSlice
from parallel.nn.operator import Operator, PassMode, StateBuffer, set_names
from parallel.nn.pass_mode import user_of
from parallel.nn.rewrite import operators_in
from parallel.runtime.step_report import StepReport
from parallel.runtime.vector_memory import to_host


class StepRecords(NamedTuple):
    """Records of a step over all ranks. Keys are the name of an operator and of its record, as "1.router chosen".

    Attributes
    ----------
    terms : loss terms, per target
    counts : sums of `PassMode.records`
    traffic : sums of `PassMode.traffic`, and as "seconds" the mean over the ranks of `PassMode.seconds`
    """

    terms: dict[str, float]
    counts: dict[str, list[int]]
    traffic: dict[str, float]


class OperatorRecords:
    """Records of the operators of all ranks. Construction is collective.

    Attributes
    ----------
    buffers : dict of str to StateBuffer
        Of all operators, by name; those of this rank's operators are theirs.
    """

    def __init__(self, units: Sequence[Operator], comm: Any):
        operators = [one for unit in units for one in operators_in(unit)]
        ours, writes = buffers_of(operators), any(one.writes_records for one in operators)
        every = comm.allgather((writes, set(ours)))
        # Usually all have the same: then the values, which may be large, need no message.
        known = [{}] if all(names == set(ours) for _, names in every) else comm.allgather(ours)
        self.buffers = dict(sorted({name: one for some in (*known, ours) for name, one in some.items()}.items()))
        self._exists = bool(self.buffers) or any(some for some, _ in every)

    def end_step(self, runs: Sequence[PassMode], counts: bool, comm: Any, count: float, updated: bool) -> StepRecords:
        """Combine the records of a step, and apply them to buffers if weights were `updated`. Collective.

        `runs` are the passes of this rank's micro-batches. Ranks with shards of the same operators have the same terms
        and counts, those of one, which `counts`, and traffic of their own. `count` is the number of targets of the
        step.
        """
        if not self._exists:
            return StepRecords({}, {}, {})
        arrived = {(run.number, *key): values for run in runs for key, values in run.buffers.items()}
        mine = PartRecords.of(runs)
        every = comm.allgather((mine, arrived) if counts else (mine._replace(terms={}, counts={}), {}))
        records = step_records([part for part, _ in every], count)
        # In the order of micro-batches, whichever ranks had them.
        values = sorted((item for _, some in every for item in some.items()), key=lambda item: item[0])
        for name, buffer in self.buffers.items() if updated else ():
            buffer.end_step([array for (_, _, of), array in values if of == name], records.counts)
        return records

    def tensor_slices(self, mine: bool) -> Iterator[TensorSlice]:
        """Slices of all buffers; checkpoints take them from the one rank where they are `mine`."""
        for name, one in self.buffers.items():
            yield TensorSlice(f"buffers/{name}", one.values.shape, 0, one.values.reshape(-1), mine)


def buffers_of(operators: Iterable[Operator]) -> dict[str, StateBuffer]:
    """Buffers that some operators hold, by name."""
    held = (value for one in operators for _, value in one.members())
    return {value.name: value for value in held if isinstance(value, StateBuffer)}


def load_buffers(model: Operator, state: Mapping[str, np.ndarray]) -> None:
    """Set all buffers of a whole model; ValueError if these are of another."""
    buffers = buffers_of(operators_in(model))
    if set(state) != set(buffers):
        raise ValueError(f"buffers: expected {', '.join(buffers) or 'none'}; found {', '.join(state) or 'none'}")
    for name, values in state.items():
        buffers[name].load(values)


def refuse_buffers(model: Operator, layout: str) -> None:
    """Raise ValueError if an operator of the model has a buffer, which `layout` does not update."""
    set_names(model)
    if buffers := buffers_of(operators_in(model)):
        found = f"expected operators without buffers, which it does not update; found {next(iter(buffers))}"
        raise ValueError(f"layout {layout}: {found}")


class PartRecords(NamedTuple):
    """Records of a rank's micro-batches, or of one: loss terms of every sequence, and sums of the others."""

    terms: dict[str, list[float]]
    counts: dict[str, np.ndarray]
    traffic: dict[str, float]
    seconds: dict[str, float]

    @classmethod
    def of(cls, runs: Sequence[PassMode]) -> PartRecords:
        terms: dict[str, list[float]] = {}
        for run in runs:
            for record in _of_uses(run.terms):
                for name, values in record.items():
                    terms.setdefault(name, []).extend(map(float, to_host(values)))
        counts = (_sums(_of_uses(run.records, to_host)) for run in runs)
        traffic = (_sums(_of_uses(run.traffic)) for run in runs)
        return cls(terms, _sums(counts), _sums(traffic), _sums(run.seconds for run in runs))

    @classmethod
    def unpacked(cls, data: bytes) -> PartRecords:
        """Loss terms and counts that `packed` returned."""
        terms, counts = json.loads(data) if data else ({}, {})
        return cls(terms, {name: np.array(numbers) for name, numbers in counts.items()}, {}, {})

    def packed(self) -> bytes:
        """Loss terms and counts as bytes for a message, exactly; empty if there are none."""
        counts = {name: numbers.tolist() for name, numbers in self.counts.items()}
        return json.dumps([self.terms, counts]).encode() if self.terms or counts else b""


def records_of(reports: Sequence[StepReport]) -> StepRecords:
    """Records of several steps together: terms per target of all, and sums of the others."""
    count = math.fsum(report.count for report in reports) or 1  # steps may have no targets
    terms = _sums({name: value * report.count for name, value in report.terms.items()} for report in reports)
    counts = _sums({name: np.array(numbers) for name, numbers in report.counts.items()} for report in reports)
    return StepRecords(
        {name: total / count for name, total in terms.items()},
        {name: numbers.tolist() for name, numbers in counts.items()},
        _sums(report.traffic for report in reports),
    )


def step_records(parts: Sequence[PartRecords], count: float) -> StepRecords:
    """Records of a step of `count` targets from those of its parts."""
    terms: dict[str, list[float]] = {}
    for part in parts:
        for name, values in part.terms.items():
            terms.setdefault(name, []).extend(values)
    seconds = {f"{name} seconds": sum_ / len(parts) for name, sum_ in _sums(part.seconds for part in parts).items()}
    return StepRecords(
        {name: math.fsum(values) / (count or 1) for name, values in sorted(terms.items())},  # exact in any order
        {name: numbers.tolist() for name, numbers in sorted(_sums(part.counts for part in parts).items())},
        dict(sorted((_sums(part.traffic for part in parts) | seconds).items())),
    )


def _of_uses(
    records: Mapping[tuple[str, str], Any], read: Callable[[Any], Any] = lambda value: value
) -> Iterator[dict[str, Any]]:
    """Yield each record of a use by operator name and word in one text."""
    return ({f"{user_of(use)} {word}": read(value)} for (use, word), value in records.items())


def _sums(some: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of the values with equal keys."""
    found: dict[str, Any] = {}
    for one in some:
        for name, value in one.items():
            found[name] = found.get(name, 0) + value
    return found

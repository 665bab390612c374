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

from parallel.nn.operator import Operator, PassMode
from parallel.nn.pass_mode import user_of
from parallel.nn.rewrite import operators_in
from parallel.nn.router import Router
from parallel.nn.selection_bias import SelectionBias
from parallel.runtime.step_report import StepReport
from parallel.runtime.vector_memory import to_host


class StepRecords(NamedTuple):
    """Records of a step over all ranks, by operator and word.

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
    biases : dict of str to SelectionBias
        Of all routers that have one, by operator name; those of this rank's routers are theirs.
    """

    def __init__(self, units: Sequence[Operator], comm: Any):
        operators = [one for unit in units for one in operators_in(unit)]
        ours, writes = biases_of(operators), any(one.writes_records for one in operators)
        every = comm.allgather((writes, {name: (len(bias.values), bias.rate) for name, bias in ours.items()}))
        self._exists = any(some for some, _ in every)
        known = {name: about for _, some in every for name, about in some.items()}
        self.biases = {name: ours.get(name) or SelectionBias(*about) for name, about in sorted(known.items())}

    def end_step(self, runs: Sequence[PassMode], counts: bool, comm: Any, count: float, updated: bool) -> StepRecords:
        """Combine the records of a step, and apply them to biases if weights were `updated`. Collective.

        `runs` are the passes of this rank's micro-batches. Ranks with shards of the same operators have the same terms
        and counts, those of one, which `counts`, and traffic of their own. `count` is the number of targets of the
        step.
        """
        if not self._exists:
            return StepRecords({}, {}, {})
        mine = PartRecords.of(runs)
        every = comm.allgather(mine if counts else mine._replace(terms={}, counts={}))
        records = step_records(every, count)
        for name, bias in self.biases.items():
            if updated and f"{name} chosen" in records.counts:
                bias.update(np.array(records.counts[f"{name} chosen"]))
        return records

    def state(self) -> dict[str, list[float]]:
        return {name: bias.state() for name, bias in self.biases.items()}

    def checked(self, state: Any) -> Mapping[str, list[float]]:
        """Biases from a checkpoint; ValueError if they are not those of this model."""
        return _checked(self.biases, state)

    def load(self, state: Mapping[str, list[float]]) -> None:
        """Restore biases that were `checked`."""
        for name, bias in self.biases.items():
            bias.load(state[name])


def biases_of(operators: Iterable[Operator]) -> dict[str, SelectionBias]:
    """Biases of the routers among some operators, by the routers' names."""
    return {one.name: one.bias for one in operators if isinstance(one, Router) and one.bias is not None}


def load_biases(model: Operator, state: Any) -> None:
    """Restore the biases of a whole model's routers; ValueError, with none changed, if they are of another."""
    biases = biases_of(operators_in(model))
    for name, values in _checked(biases, state).items():
        biases[name].load(values)


def _checked(biases: Mapping[str, SelectionBias], state: Any) -> Mapping[str, list[float]]:
    if not isinstance(state, Mapping) or set(state) != set(biases):
        raise ValueError(f"biases: expected those of {', '.join(biases) or 'no operator'}, found {state!r}")
    for name, bias in biases.items():
        SelectionBias(len(bias.values), 0.0).load(state[name])
    return state


def refuse_biases(model: Operator, layout: str) -> None:
    """Raise ValueError if a router of the model has a selection bias, which `layout` does not update."""
    if biases_of(operators_in(model)):
        raise ValueError(f"layout {layout}: expected routers without selection biases, which it does not update")


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
    count = math.fsum(report.count for report in reports) or 1
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
        {name: math.fsum(values) / (count or 1) for name, values in sorted(terms.items())},
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

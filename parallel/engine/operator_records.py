"""Loss terms and other records that operators write in forward passes, summed over a step and all ranks.

A record is known by the operator's name and a word: ``"2.1.inner.1 balance"``. Terms are sums of floating-point
numbers, rounded once, so that they do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.nn.operator import Operator, PassMode
from parallel.nn.rewrite import operators_in
from parallel.nn.router import Router
from parallel.nn.selection_bias import SelectionBias
from parallel.runtime.vector_memory import to_host


class StepRecords(NamedTuple):
    """Records of a step over all ranks: loss terms per target, sums of counts and of traffic, by operator and word.

    Traffic in "seconds" is a mean over the ranks.
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
        self._runs: list[PassMode] = []

    def add(self, run: PassMode) -> None:
        """Include the records of a micro-batch of this step."""
        if self._exists:
            self._runs.append(run)

    def clear(self) -> None:
        """Forget the micro-batches since the last end of a step, as after an error."""
        self._runs.clear()

    def end_step(self, comm: Any, count: int, contributes: bool, updated: bool) -> StepRecords:
        """Sum the records of the step, and apply them to biases if weights were `updated`. Collective.

        `contributes` is true on one rank of each group with the same micro-batches. `count` is the number of targets
        of the step.
        """
        if not self._exists:
            return StepRecords({}, {}, {})
        runs, self._runs = self._runs, []
        every = comm.allgather(_collected(runs if contributes else []))
        terms: dict[str, list[float]] = {}
        sums: dict[str, Any] = {}
        traffic: dict[str, float] = {}
        for some_terms, some_counts, some_traffic in every:
            for name, values in some_terms.items():
                terms.setdefault(name, []).extend(values)
            for name, numbers in some_counts.items():
                sums[name] = sums.get(name, 0) + numbers
            for name, number in some_traffic.items():
                traffic[name] = traffic.get(name, 0) + number
        for name, bias in self.biases.items():
            if updated and f"{name} chosen" in sums:
                bias.update(sums[f"{name} chosen"])
        for name in traffic:
            traffic[name] /= len(every) if name.endswith(" seconds") else 1
        means = {name: math.fsum(values) / max(count, 1) for name, values in sorted(terms.items())}
        return StepRecords(means, {name: sums[name].tolist() for name in sorted(sums)}, dict(sorted(traffic.items())))

    def state(self) -> dict[str, list[float]]:
        return {name: bias.state() for name, bias in self.biases.items()}

    def checked(self, state: Any) -> Mapping[str, list[float]]:
        """Biases from a checkpoint; ValueError if they are not those of this model."""
        if not isinstance(state, Mapping) or set(state) != set(self.biases):
            raise ValueError(f"biases: expected those of {', '.join(self.biases) or 'no operator'}, found {state!r}")
        for name, bias in self.biases.items():
            SelectionBias(len(bias.values), 0.0).load(state[name])
        return state

    def load(self, state: Mapping[str, list[float]]) -> None:
        """Restore biases that were `checked`."""
        for name, bias in self.biases.items():
            bias.load(state[name])


def biases_of(operators: Iterable[Operator]) -> dict[str, SelectionBias]:
    """Biases of the routers among some operators, by the routers' names."""
    return {one.name: one.bias for one in operators if isinstance(one, Router) and one.bias is not None}


def refuse_biases(model: Operator, layout: str) -> None:
    """Raise ValueError if a router of the model has a selection bias, which `layout` does not update."""
    if biases_of(operators_in(model)):
        raise ValueError(f"layout {layout}: expected routers without selection biases, which it does not update")


def _collected(
    runs: Sequence[PassMode],
) -> tuple[dict[str, list[float]], dict[str, np.ndarray], dict[str, float]]:
    """Loss terms of every sequence, and sums of counts and of traffic, of micro-batches, by operator and word."""
    terms: dict[str, list[float]] = {}
    sums: dict[str, Any] = {}
    traffic: dict[str, float] = {}
    for run in runs:
        for (name, word), values in run.terms.items():
            terms.setdefault(f"{name} {word}", []).extend(map(float, to_host(values)))
        for (name, word), numbers in run.records.items():
            sums[f"{name} {word}"] = sums.get(f"{name} {word}", 0) + to_host(numbers)
        for (name, word), number in run.traffic.items():
            traffic[f"{name} {word}"] = traffic.get(f"{name} {word}", 0) + number
    return terms, sums, traffic

"""Load of the experts of every mixture over a training, from the lines of its metrics file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class ExpertLoad(NamedTuple):
    """Choices and dropped choices of the experts of a router.

    Attributes
    ----------
    router : str
        Name of the operator.
    steps : array of int64, of shape (n,)
        Numbers of the steps, from 1.
    chosen, dropped : arrays of int64, of shape (n, experts)
    """

    router: str
    steps: np.ndarray
    chosen: np.ndarray
    dropped: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """Choices of each expert relative to the mean of all, of shape (n, experts)."""
        return np.asarray(self.chosen / np.maximum(self.chosen.mean(axis=1, keepdims=True), 1))

    @property
    def entropy(self) -> np.ndarray:
        """Entropy of the choices relative to equal loads, from 0 (one expert) to 1, of shape (n,)."""
        p = self.chosen / np.maximum(self.chosen.sum(axis=1, keepdims=True), 1)
        logs = np.log(p, out=np.zeros_like(p), where=p > 0)
        return np.asarray(0 - (p * logs).sum(axis=1) / max(np.log(p.shape[1]), 1e-300))

    @property
    def drop_rate(self) -> np.ndarray:
        """Fraction of the choices that were dropped for lack of capacity, of shape (n,)."""
        return np.asarray(self.dropped.sum(axis=1) / np.maximum(self.chosen.sum(axis=1), 1))

    def mean_of(self, parts: int) -> ExpertLoad:
        """Sums over at most `parts` runs of neighbouring steps, each with the number of its last step."""
        ends = _cuts(len(self.steps), parts)
        chosen, dropped = (np.add.reduceat(counts, ends[:-1], axis=0) for counts in (self.chosen, self.dropped))
        return ExpertLoad(self.router, self.steps[ends[1:] - 1], chosen, dropped)


def expert_loads(lines: Iterable[Mapping[str, Any]]) -> list[ExpertLoad]:
    """Loads of all routers in the lines of a metrics file (`parallel.cli.reports.metrics`). Empty without mixtures.

    Errors of any kind (`FORM_ERRORS`) for lines that are no metrics.
    """
    rows: dict[str, list[tuple[int, list[int], list[int]]]] = {}
    for line in lines:
        counts = line.get("counts", {})
        for name, chosen in counts.items():
            router, _, word = name.rpartition(" ")
            if word == "chosen":
                rows.setdefault(router, []).append((line["step"], chosen, counts[f"{router} dropped"]))
    return [ExpertLoad(router, *map(_numbers, zip(*found), (1, 2, 2))) for router, found in rows.items()]


class ExpertTraffic(NamedTuple):
    """Exchange of tokens between the ranks that have the experts of a mixture.

    Attributes
    ----------
    experts : str
        Name of the operator.
    steps : array of int64, of shape (n,)
    copies, between_nodes : arrays of float64, of shape (n,)
        Copies of tokens to other ranks, relays too. Copies that leave a node.
    share : array of float64, of shape (n,)
        Part of the step's time in the exchange, the mean over ranks.
    """

    experts: str
    steps: np.ndarray
    copies: np.ndarray
    between_nodes: np.ndarray
    share: np.ndarray

    def between_nodes_per_choice(self, load: ExpertLoad, parts: int) -> np.ndarray:
        """Copies between nodes relative to the choices in `load` of the same steps, in the runs of `mean_of`."""
        starts = _cuts(len(self.steps), parts)[:-1]
        choices = load.chosen.sum(axis=1)[np.searchsorted(load.steps, self.steps)]
        sums = (np.add.reduceat(one, starts) for one in (self.between_nodes, np.maximum(choices, 1)))
        return np.asarray(np.divide(*sums))

    def mean_of(self, parts: int) -> ExpertTraffic:
        """Means over at most `parts` runs of neighbouring steps, each with the number of its last step."""
        ends = _cuts(len(self.steps), parts)
        means = [np.add.reduceat(one, ends[:-1]) / np.diff(ends) for one in self[2:]]
        return ExpertTraffic(self.experts, self.steps[ends[1:] - 1], *means)


def expert_traffic(lines: Iterable[Mapping[str, Any]]) -> list[ExpertTraffic]:
    """Traffic of all mixtures in the lines of a metrics file. Empty if no rank exchanges tokens."""
    rows: dict[str, list[tuple[int, float, float, float]]] = {}
    for line in lines:
        traffic = line.get("traffic", {})
        for name, copies in traffic.items():
            experts, _, word = name.rpartition(" ")
            if word == "copies":
                share = traffic[f"{experts} seconds"] / max(line["seconds"], 1e-300)
                rows.setdefault(experts, []).append((line["step"], copies, traffic[f"{experts} between nodes"], share))
    return [ExpertTraffic(experts, *map(_numbers, zip(*found), (1, 1, 1, 1))) for experts, found in rows.items()]


def _numbers(values: Sequence[Any], ndim: int) -> np.ndarray:
    array = np.array(values)
    if array.dtype.kind not in "if" or array.ndim != ndim or not np.isfinite(array).all():
        raise ValueError(f"expected numbers in {ndim} dimensions, found {array.dtype} in {array.ndim}")
    return array


def _cuts(count: int, parts: int) -> np.ndarray:
    """First number of each of at most `parts` runs of `count` numbers, and `count`."""
    return np.unique(np.linspace(0, count, min(parts, count) + 1).astype(int))

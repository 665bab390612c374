"""Load of the experts of every mixture over a training, from the lines of its metrics file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        """Entropy of the choices relative to that of equal loads, from 0 (one expert) to 1, of shape (n,)."""
        p = self.chosen / np.maximum(self.chosen.sum(axis=1, keepdims=True), 1)
        logs = np.log(p, out=np.zeros_like(p), where=p > 0)
        return np.asarray(0 - (p * logs).sum(axis=1) / max(np.log(p.shape[1]), 1e-300))

    @property
    def drop_rate(self) -> np.ndarray:
        """Fraction of the choices that were dropped for lack of capacity, of shape (n,)."""
        return np.asarray(self.dropped.sum(axis=1) / np.maximum(self.chosen.sum(axis=1), 1))

    def mean_of(self, parts: int) -> ExpertLoad:
        """Sums over at most `parts` runs of neighbouring steps, each with the number of its last step."""
        ends = np.unique(np.linspace(0, len(self.steps), min(parts, len(self.steps)) + 1).astype(int))
        chosen, dropped = (np.add.reduceat(counts, ends[:-1], axis=0) for counts in (self.chosen, self.dropped))
        return ExpertLoad(self.router, self.steps[ends[1:] - 1], chosen, dropped)


def expert_loads(lines: Iterable[Mapping[str, Any]]) -> list[ExpertLoad]:
    """Loads of all routers in the lines of a metrics file (`parallel.benchmark.metrics`); empty without mixtures."""
    rows: dict[str, list[tuple[int, list[int], list[int]]]] = {}
    for line in lines:
        counts = line.get("counts", {})
        for name, chosen in counts.items():
            router, _, word = name.rpartition(" ")
            if word == "chosen":
                rows.setdefault(router, []).append((line["step"], chosen, counts[f"{router} dropped"]))
    return [ExpertLoad(router, *map(np.array, zip(*found))) for router, found in rows.items()]

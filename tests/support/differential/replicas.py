"""Reference of layouts that average replicas after every step: engines of one rank each, averaged from outside."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parallel.data.sampler import Batch, contiguous
from parallel.runtime.step_report import Evaluation


class AveragedReplicas:
    """Engines of one rank each with the interface of one; after every step all have the mean of their weights."""

    def __init__(self, engines: Sequence[Any], period: int = 1, overlap: float = 0.0):
        self.engines, self._period, self._overlap = engines, period, overlap

    def __enter__(self) -> "AveragedReplicas":
        return self

    def __exit__(self, *error: Any) -> None:
        for engine in self.engines:
            engine.__exit__(*error)

    def step(self, x: Any, y: Any = None, samples: Any = None, stop: bool = False) -> Any:
        """Step of every replica on its run of the micro-batches, and the mean."""
        every = x if y is None else self._cut(x, y, np.arange(len(x)) if samples is None else samples)
        reports = []
        for rank, engine in enumerate(self.engines):
            share = contiguous(len(every), rank, len(self.engines))
            more = int(np.ceil(self._overlap * len(share))) if self._overlap else 0
            mine = [every[(share.start + at) % len(every)] for at in range(min(len(share) + more, len(every)))]
            reports.append(engine.step([batch._replace(number=at) for at, batch in enumerate(mine)]))
        if self.steps % self._period == 0:
            self._average()
        count = sum(report.count for report in reports)
        loss = sum(report.loss * report.count for report in reports if report.count) / count
        return replace(reports[0], loss=loss, count=count, stop=stop)

    def _cut(self, x: Any, y: Any, numbers: Any) -> list[Batch]:
        micro = replace(self.engines[0].settings, batch=len(x)).micro(len(self.engines))
        here = [slice(start, start + micro) for start in range(0, len(x), micro)]
        return [Batch(at, x[one], y[one], numbers[one]) for at, one in enumerate(here)]

    def batches(self, data: Any, batch: int | None = None, *, epoch: int = 0, shuffle: bool = True) -> Any:
        """All micro-batches of every step, as many ranks cut them."""
        first = self.engines[0]
        settings = first.settings if batch is None else replace(first.settings, batch=batch)
        sampler = first._strategy.sampler(settings, data, len(self.engines), shuffle=shuffle)
        return (list(step.batches(data, range(len(step.parts)))) for step in sampler.steps(epoch))

    def _average(self) -> None:
        self.load_state_dict(self.state_dict())

    def average_states(self) -> None:
        """Set the optimizer state of all to their mean, as before a checkpoint."""
        for pieces in zip(*(engine.inner._engine.pieces for engine in self.engines)):
            for name in pieces[0].state:
                mean = np.mean([piece.state[name] for piece in pieces], axis=0)
                for piece in pieces:
                    piece.state[name][...] = mean

    def evaluate(self, x: Any, y: Any, measure: Any = None, ema: bool = False) -> Evaluation:
        if not ema:
            return self.engines[0].evaluate(x, y, measure)
        before, average = [engine.state_dict() for engine in self.engines], self.state_dict(ema=True)
        self.load_state_dict(average)
        found = self.engines[0].evaluate(x, y, measure)
        for engine, state in zip(self.engines, before):
            engine.load_state_dict(state)
        return found

    def predict(self, x: Any, out: Any = None, ema: bool = False) -> np.ndarray:
        if not ema:
            return self.engines[0].predict(x, out)
        before, average = [engine.state_dict() for engine in self.engines], self.state_dict(ema=True)
        self.load_state_dict(average)
        found = self.engines[0].predict(x, out)
        for engine, state in zip(self.engines, before):
            engine.load_state_dict(state)
        return found

    def model_on_one_rank(self, ema: bool = False) -> Any:
        made = self.engines[0].model_on_one_rank()
        for parameter in made.parameters():
            parameter.data = self.state_dict(ema=ema)[parameter.name]
        return made

    def state_dict(self, ema: bool = False) -> dict[str, np.ndarray]:
        states = [engine.state_dict(**({"ema": True} if ema else {})) for engine in self.engines]
        return {name: np.mean([state[name] for state in states], axis=0) for name in states[0]}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        for engine in self.engines:
            engine.load_state_dict(state, strict)

    def save(self, folder: Any, **options: Any) -> Any:
        self.average_states()
        return self.engines[0].save(folder, **options)

    def load(self, folder: Any) -> Any:
        facts = [engine.load(folder) for engine in self.engines]
        return facts[0]

    @property
    def settings(self) -> Any:
        return self.engines[0].settings

    @property
    def steps(self) -> int:
        return self.engines[0].steps

    @property
    def updates(self) -> int:
        return self.engines[0].updates

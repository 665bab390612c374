"""Programs over the engine's public API: sequences of actions, and their run on a Chorus engine."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallel import ArrayDataset, Batch, Engine
from parallel.data.sequences import PaddedSequences
from support.differential.columns import Column
from support.differential.tasks import Task


class Observation(NamedTuple):
    """Named value of a program's run: a number, a list of numbers, or an array."""

    name: str
    value: Any


class Action(NamedTuple):
    """Method of a player by name, with its keyword arguments."""

    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def do(name: str, **options: Any) -> Action:
    """Action of a program."""
    return Action(name, options)


STEP, TEST, STATE, PREDICT = do("step"), do("evaluate"), do("state"), do("predict")
OWN = "raised by the user's own code"
"""Attribute of errors that no engine raises on all ranks: they end the program of one rank, and so the job."""

PLAIN = (STEP, STEP, STEP, TEST, PREDICT, STATE)
"""Program of most rows."""


class Player:
    """Base class of players: runs programs, and collects observations of them.

    Subclasses have `models` and `optimizers`: what a user of one engine holds, or of several that are averaged.
    """

    models: Sequence[Any]
    optimizers: Sequence[Any]

    def __init__(self, task: Task, samples: int):
        self.task, self.samples, self.time = task, samples, 0
        self.found: list[Observation] = []
        self._handles: list[Any] = []

    def play(self, program: Sequence[Action]) -> list[Observation]:
        for action in program:
            getattr(self, action.name)(**action.options)
        return self.found

    def note(self, name: str, value: Any) -> None:
        self.found.append(Observation(f"{self.time}: {name}", value))

    def parameters(self, pattern: str) -> list[Any]:
        """Parameters of the user's models whose names fit a pattern."""
        found = [one for model in self.models for one in model.parameters() if fnmatchcase(one.name, pattern)]
        assert found, pattern
        return found

    # ------------------------------------------------------------------------------------------ what a user changes

    def freeze(self, pattern: str, trains: bool = False) -> None:
        for parameter in self.parameters(pattern):
            parameter.requires_grad = trains

    def decay(self, pattern: str, decays: bool) -> None:
        for parameter in self.parameters(pattern):
            parameter.decay = decays

    def hook(self, pattern: str, factor: float, in_place: bool = False) -> None:
        """Scale gradients by elements: the shape of what a hook gets is a part of the result."""

        def change(gradient: Any) -> Any:
            changed = gradient * (factor * np.linspace(0.5, 1.5, gradient.size).reshape(gradient.shape))
            if not in_place:
                return changed.astype(gradient.dtype)
            gradient[...] = changed
            return None

        self._handles += [parameter.register_hook(change) for parameter in self.parameters(pattern)]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def rate(self, value: float) -> None:
        for optimizer in self.optimizers:
            optimizer.lr = value


class EnginePlayer(Player):
    """Player on an engine of Chorus, or an object like it; `make(model, optimizer)` makes one."""

    def __init__(
        self,
        task: Task,
        column: Column,
        make: Callable[..., tuple[Any, Sequence[Any], Sequence[Any]]],
        folder: Path,
        reports: Sequence[str],
    ):
        super().__init__(task, column.samples)
        self._column, self._make, self._folder, self._reports = column, make, folder, reports
        self._stack = ExitStack()

    def __enter__(self) -> "EnginePlayer":
        self._stack.__enter__()
        self._open()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._stack.__exit__(*error)

    def _open(self, **settings: Any) -> None:
        engine, self.models, self.optimizers = self._make(**settings)
        self.engine = self._stack.enter_context(engine)

    def batch(self, number: int, samples: int) -> tuple[Any, Any]:
        """Inputs and targets of a step or an evaluation."""
        return self.task.batch(number, samples)

    def data(self, samples: int) -> Any:
        """Data set of an epoch."""
        return ArrayDataset(*self.task.batch(100, samples))

    # ------------------------------------------------------------------------------------------ training

    def step(self, samples: int | None = None, dtype: Any = None, numbers: int | None = None, **options: Any) -> None:
        """Step on the next batch; `numbers` is the first sample's, `dtype` that of the targets."""
        x, y = self.batch(self.time, self.samples if samples is None else samples)
        y = y if dtype is None else y.astype(dtype)
        numbers = None if numbers is None else np.arange(numbers, numbers + len(x))
        if self.engine.settings.layout == "federated":
            report = self._round(x, y, numbers)
        else:
            report = self.engine.step(x, y, **({} if numbers is None else {"samples": numbers}), **options)
        for name in self._reports:
            value = getattr(report, name)
            for key, one in value.items() if isinstance(value, dict) else [(name, value)]:
                self.note(key, one)
        if options.get("stop"):
            self.note("stop", report.stop)
        self.time += 1

    def _round(self, x: Any, y: Any, numbers: Any) -> Any:
        """Round of federated averaging: client k has every n-th sample from k on."""
        every, count = np.arange(len(x)) if numbers is None else numbers, self.engine.settings.clients
        mine = self.engine.inner.train_share(count)
        return self.engine.step([Batch(k, x[k::count], y[k::count], every[k::count]) for k in mine])

    def epoch(self, samples: int, batch: int | None = None, **options: Any) -> None:
        """Steps of an epoch of a data set."""
        for batches in self.engine.batches(self.data(samples), batch, **options):
            self._note_loss(self.engine.step(batches))
            self.time += 1

    def _note_loss(self, report: Any) -> None:
        if "loss" in self._reports:
            self.note("loss", report.loss)

    def sequences(self) -> None:
        """Steps of an epoch of sequences of differing lengths, counted in tokens."""
        random = np.random.default_rng(5)
        data = PaddedSequences([random.integers(0, 13, 3 + at % 6) for at in range(20)])
        for batches in self.engine.batches(data):
            self._note_loss(self.engine.step(batches))
            self.time += 1

    def evaluate(self, samples: int | None = None, ema: bool = False, measure: bool = True) -> None:
        x, y = self.batch(50, self.samples if samples is None else samples)
        correct = getattr(self.task.loss(), "correct", None) if measure else None
        found = self.engine.evaluate(x, y, correct, **({"ema": True} if ema else {}))
        self.note("evaluation", found.loss)
        self.note("measure", found.measure)
        self.note("targets", found.count)

    def predict(self, ema: bool = False, room: bool = False) -> None:
        """Predict into a new array or a given one, and by a copy of the model outside of the engine."""
        (x, _), options = self.batch(50, self.samples), {"ema": True} if ema else {}
        scores = self.engine.predict(x, **options)
        if room:
            out = np.zeros_like(scores)
            assert self.engine.predict(x, out, **options) is out
            self.note("prediction into an array", out)
            self.note("prediction by a copy", self.engine.model_on_one_rank(**options)(x))
        self.note("prediction", scores)

    # ------------------------------------------------------------------------------------------ state

    def state(self, ema: bool = False) -> None:
        for name, values in self.engine.state_dict(**({"ema": True} if ema else {})).items():
            self.note(f"state {name}", values)
        self.note("steps", self.engine.steps)
        if "norm" in self._reports:
            self.note("updates", self.engine.updates)

    def load_state(self, factor: float, only: str = "*") -> None:
        """Load weights times a factor; all of them unless `only` names some."""
        state = {name: factor * values for name, values in self.engine.state_dict().items() if fnmatchcase(name, only)}
        self.engine.load_state_dict(state, **({} if only == "*" else {"strict": False}))

    def edit(self, pattern: str, factor: float) -> None:
        """Edit weights in place."""
        try:
            for parameter in self.parameters(pattern):
                parameter.data[...] *= factor
        except Exception as error:
            setattr(error, OWN, True)
            raise

    def load_edited(self, pattern: str, factor: float) -> None:
        """Load what `edit` leaves: weights of the storage dtype times a factor, or as before."""
        state = self.engine.state_dict()
        for parameter in self.parameters(pattern):
            edited = parameter.data * parameter.dtype.type(factor)
            state[parameter.name] = np.where(edited == parameter.data, state[parameter.name], edited.astype(np.float64))
        self.engine.load_state_dict(state)

    def save(self, **options: Any) -> None:
        self.engine.save(self._folder, **options)

    def restart(self) -> None:
        """Train from the beginning with a new engine, model and optimizer."""
        self._stack.close()
        self._open()

    def reopen(self, layout: str = "") -> None:
        """Continue from the checkpoint with a new engine, model and optimizer, perhaps in another layout."""
        self._stack.close()
        self._open(**({"layout": layout} if layout else {}))
        self.note("facts", sorted(self.engine.load(self._folder).items()))


KEPT = ("precision", "micro_batch", "batch", "clip", "reproducible")
"""Settings that a training keeps in another layout."""


def engine_maker(
    task: Task, optimizer: Callable[[Any], Any], comm: Any, settings: dict[str, Any]
) -> Callable[..., Any]:
    """Function that makes an engine on a communicator, and the lists of its model and optimizer. Collective."""

    def make(**others: Any) -> tuple[Any, list[Any], list[Any]]:
        model = task.model()
        made = optimizer(model)
        given = {name: settings[name] for name in settings if not others or name in KEPT} | others
        return Engine(model, task.loss(), comm, made, **given), [model], [made]

    return make

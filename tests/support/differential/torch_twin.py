"""Player of programs in PyTorch, float64: a reference that shares no code with Chorus."""

from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from parallel.nn.flat_params import FlatParams
from support.differential.programs import Player
from support.differential.tasks import Task


class TorchPlayer(Player):
    """Trains a task's twin with an optimizer of PyTorch, with the hyperparameters of one of Chorus.

    The user's model is that of Chorus, with no engine: its parameters hold names and flags, the twin the values.
    """

    def __init__(self, torch: Any, task: Task, optimizer: Any, settings: dict[str, Any], samples: int):
        super().__init__(task, samples)
        self._torch, self._settings = torch, vars(settings["settings"]) if "settings" in settings else settings
        model = task.model()
        made = optimizer(model)
        self.models, self.optimizers = [model], [made]
        flat = FlatParams(model)
        vector = np.zeros(flat.length)
        flat.initialise(vector, settings.get("seed", 0))
        flat.bind(vector)
        self._values = {one.name: torch.tensor(one.data.copy(), requires_grad=True) for one in model.parameters()}
        self._average: dict[str, Any] = {}
        self._updates = self._steps = 0
        self._inner = self._optimizer(made)

    # ------------------------------------------------------------------------------------------ optimizer

    def _optimizer(self, made: Any) -> Any:
        """Optimizer of PyTorch, one group for each parameter."""
        optim, kind = self._torch.optim, type(made).__name__
        groups = [{"params": [value], "name": name} for name, value in self._values.items()]
        if kind == "SGD":
            return optim.SGD(groups, lr=0.0, momentum=made.momentum, nesterov=made.nesterov)
        kinds = {"Adam": optim.Adam, "AdamW": optim.AdamW}
        return kinds[kind](groups, lr=0.0, betas=(made.beta1, made.beta2), eps=made.eps)

    def _group(self, parameter: Any) -> Any:
        """First group of the optimizer that has a parameter, by pattern of names or identity."""
        for group in self.optimizers[0].groups:
            for one in group.params:
                if one is parameter or (isinstance(one, str) and fnmatchcase(parameter.name, one)):
                    return group
        return None

    def _tune(self) -> float:
        """Set learning rate and decay of all parameters for the next update; returns the optimizer's rate."""
        made = self.optimizers[0]

        def at(rate: Any) -> float:
            return float(rate(self._updates) if callable(rate) else rate)

        for parameter, inner in zip(self.models[0].parameters(), self._inner.param_groups):
            assert inner["name"] == parameter.name
            group = self._group(parameter)
            inner["lr"] = at(made.rate if group is None or group.rate is None else group.rate)
            own = None if group is None else group.decay
            inner["weight_decay"] = own if own is not None else made.decay if parameter.decay else 0.0
        return at(made.rate)

    # ------------------------------------------------------------------------------------------ training

    def _mean_loss(self, x: Any, y: Any) -> tuple[Any, Any, int]:
        scores = self.task.twin(self._torch, self._values, x)
        flat, targets = scores.reshape(-1, scores.shape[-1]), self._torch.tensor(y.astype(np.int64).reshape(-1))
        smoothing, count = getattr(self.task.loss(), "smoothing", 0.0), int((y >= 0).sum())
        loss = self._torch.nn.functional.cross_entropy(
            flat, targets.clamp(min=-1), ignore_index=-1, reduction="sum", label_smoothing=smoothing
        )
        right = int(((flat.argmax(-1) == targets) & (targets >= 0)).sum())
        return loss / max(count, 1), right, count

    def step(self, samples: int | None = None, dtype: Any = None, numbers: Any = None, **options: Any) -> None:
        x, y = self.task.batch(self.time, self.samples if samples is None else samples)
        self._train(x, y if dtype is None else y.astype(dtype), **options)

    def _train(self, x: Any, y: Any, **options: Any) -> None:
        for parameter in self.models[0].parameters():
            self._values[parameter.name].requires_grad_(parameter.requires_grad)
        handles = [
            self._values[one.name].register_hook(self._hooked(hook))
            for one in self.models[0].parameters()
            for hook in one.hooks
            if one.requires_grad
        ]
        rate = self._tune()
        self._inner.zero_grad(set_to_none=True)
        loss, _, count = self._mean_loss(x, y)
        loss.backward()
        norm = float(sum((one.grad**2).sum() for one in self._values.values() if one.grad is not None)) ** 0.5
        clip = self._settings.get("clip", 0.0)
        if clip and norm > clip:
            for one in self._values.values():
                if one.grad is not None:
                    one.grad *= clip / norm
        self._inner.step()
        for handle in handles:
            handle.remove()
        self._updates += 1
        self._steps += 1
        self._move_average()
        for name, value in (("loss", loss.item()), ("count", count), ("rate", rate), ("norm", norm)):
            self.note(name, value)
        if options.get("stop"):
            self.note("stop", True)
        self.time += 1

    def _hooked(self, hook: Any) -> Any:
        def call(gradient: Any) -> Any:
            array = gradient.numpy().copy()
            changed = hook(array)
            return self._torch.tensor(array if changed is None else changed)

        return call

    def _move_average(self) -> None:
        decay = self.optimizers[0].ema
        with self._torch.no_grad():
            for name, value in self._values.items():
                before = self._average.get(name)
                self._average[name] = value.clone() if before is None else decay * before + (1 - decay) * value

    def epoch(self, samples: int, batch: int | None = None, shuffle: bool = True, **options: Any) -> None:
        """Steps of an epoch in the order of the data set."""
        assert not shuffle
        x, y = self.task.batch(100, samples)
        size = batch or self._settings["batch"]
        for start in range(0, samples, size):
            first = len(self.found)
            self._train(x[start : start + size], y[start : start + size])
            self.found[first:] = self.found[first : first + 1]

    def evaluate(self, samples: int | None = None, ema: bool = False, measure: bool = True) -> None:
        x, y = self.task.batch(50, self.samples if samples is None else samples)
        kept, self._values = self._values, self._average if ema else self._values
        with self._torch.no_grad():
            loss, right, count = self._mean_loss(x, y)
        self._values = kept
        self.note("evaluation", loss.item())
        self.note("measure", right / count if measure else None)
        self.note("targets", count)

    def predict(self, ema: bool = False, room: bool = False) -> None:
        values = self._average if ema else self._values
        with self._torch.no_grad():
            scores = self.task.twin(self._torch, values, self.task.batch(50, self.samples)[0]).numpy()
        names = ("prediction into an array", "prediction by a copy", "prediction") if room else ("prediction",)
        for name in names:
            self.note(name, scores)

    # ------------------------------------------------------------------------------------------ state

    def state(self, ema: bool = False) -> None:
        for name, value in (self._average if ema else self._values).items():
            self.note(f"state {name}", value.detach().numpy().copy())
        self.note("steps", self._steps)
        self.note("updates", self._updates)

    def load_state(self, factor: float, only: str = "*") -> None:
        self.edit(only, factor)

    def edit(self, pattern: str, factor: float) -> None:
        with self._torch.no_grad():
            for name, value in self._values.items():
                if fnmatchcase(name, pattern):
                    value *= factor

    def save(self, keep: int = 3, keep_best: int = 0, **facts: Any) -> None:
        self._facts = facts

    def reopen(self, layout: str = "") -> None:
        """Continue with the same state."""
        model = self.task.model()
        self.note("facts", sorted(self._facts.items()))
        for old, new in zip(self.models[0].parameters(), model.parameters()):
            old.requires_grad, old.decay = new.requires_grad, new.decay
            old.hooks.clear()

"""A trained model out of a checkpoint, whatever layout wrote it, or out of a file that holds it in few bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from parallel.checkpoint.checkpoint_files import NAME, Checkpoint, CheckpointError, latest
from parallel.grad_compression import NONE
from parallel.data.datasets import Task
from parallel.runtime.validation import named
from parallel.nn.operator import Operator, name_all
from parallel.ptq.quantizable_layers import expect_finite
from parallel.ptq.packed_weights import Few, Rounded, packed, rounding, weights_of
from parallel.runtime.step_report import Evaluation
from parallel.settings import Settings, complete
from parallel.runtime.collective_errors import together
from parallel.trainer.trainer import Score, loss_of, measure_of, prepare, settings_in
from quant import QuantizedArray, QuantSpec
from quant.io import safetensors_file as files

FORMAT = "chorus quantised model 1"


@dataclass
class Trained:
    """A model with values, and what it has learned from.

    Attributes
    ----------
    settings : Settings
        Of its training.
    task : Task
    model : Operator
        Its parameters are float32 arrays of their own.
    """

    settings: Settings
    task: Task
    model: Operator

    @property
    def loss(self) -> Any:
        """What it was trained to make small."""
        return loss_of(self.task)

    @property
    def measure(self) -> Any:
        """How many targets are met, where they can be met."""
        return measure_of(self.task)

    def score(self, found: Evaluation) -> Score:
        """An evaluation in the words of a training."""
        return Score.of(found, self.task)


def from_checkpoint(comm: Any, path: Path) -> Trained:
    """The model of a checkpoint, or of the newest in a folder of them, on every rank. Collective.

    Raises
    ------
    CheckpointError
        On all ranks, if there is none, or it is damaged.
    ValueError
        On all ranks, if its data are not to be had, or a value is NaN or infinite.
    """
    newest = path if NAME.fullmatch(path.name) else latest(comm, path)
    if newest is None:
        raise CheckpointError(f"{path} has no checkpoints")
    found = Checkpoint(comm, newest)
    said = _plain(settings_in(found))
    task, model, _ = together(comm, lambda: prepare(said, 1), f"the model of {newest} cannot be made")
    parameters = {f"model/{parameter.name}": parameter for parameter in name_all(model)}
    there = {name: entry.shape for name, entry in found.entries.items() if name.startswith("model/")}
    here = {name: parameter.shape for name, parameter in parameters.items()}
    if here != there:
        name = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))[0]
        told = f"{name} has shape {there.get(name)} in it, and {here.get(name)} in {said.model} for {task.name}"
        raise CheckpointError(f"{newest} is of another model: {told}")

    def read() -> None:
        for name, parameter in parameters.items():
            parameter.data = found.tensor(name).astype(np.float32)
        expect_finite(model)

    together(comm, read, f"{newest} cannot be used")
    return Trained(said, task, model)


def _plain(before: dict[str, Any]) -> Settings:
    """Settings that make the same model and the same data on one rank, without all that only training needs."""
    return complete({"layout": "dp", "precision": "fp32", "compress": NONE, "recompute": False, "pool": False}, before)


def task_for(comm: Any, trained: Trained, data: str) -> Task:
    """Other data for the same model. Collective.

    Raises
    ------
    ValueError
        On all ranks, if there are no such data, or they do not fit the model.
    """
    if data == trained.settings.data:
        return trained.task
    task, _, _ = together(comm, lambda: prepare(replace(trained.settings, data=data), 1), "calibrate")
    if (task.inputs, task.kind) != (trained.task.inputs, trained.task.kind):
        wanted = f"{trained.task.kind} from samples of shape {trained.task.inputs}"
        raise ValueError(f"calibrate: the model makes {wanted}, and {data} has {task.kind} from {task.inputs}")
    return task


# ---------------------------------------------------------------------------------------------- in few bits


def save(path: Path, trained: Trained, made: Operator) -> None:
    """Write a model in few bits: codes, the parameters that stayed as they are, and what it takes to build it anew.

    Raises
    ------
    ImportError
        Without the package safetensors.
    """
    arrays: dict[str, Any] = {parameter.name: parameter.data for parameter in made.parameters()}
    for name, weight in weights_of(made).items():
        arrays[name] = weight.few.codes
        if weight.few.divisor is not None:
            arrays[f"{name}/divisor"] = weight.few.divisor
    inputs = {}
    for _, operator in made.walk():
        if isinstance(operator, Rounded):
            inputs[operator.name] = operator.spec.to_dict()
            given = {name: values for name, values in operator.given.items() if values is not None}
            arrays |= {f"{operator.name}/inputs.{name}": values for name, values in given.items()}
    files.save(path, arrays, {"format": FORMAT, "settings": asdict(trained.settings), "inputs": inputs})


def load(path: Path) -> Trained:
    """What `save` has written.

    Raises
    ------
    ValueError
        If it is no such file, or its arrays do not fit its settings.
    OSError
        If it cannot be read.
    ImportError
        Without the package safetensors.
    """
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    about = files.about(path)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("it holds no model in few bits")
    arrays = files.load(path)
    said = complete(named(about.get("settings"), "settings"))
    task, model, _ = prepare(said, 1)
    few = {}
    for parameter in name_all(model):
        if parameter.name not in arrays:
            raise ValueError(f"it has no {parameter.name}")
        values = arrays[parameter.name]
        if isinstance(values, QuantizedArray):
            few[parameter.name] = Few(values, arrays.get(f"{parameter.name}/divisor"))  # type: ignore[arg-type]
        else:
            parameter.data = values
    made = packed(model, few)
    for name, spec in named(about.get("inputs"), "inputs").items():
        kept = {kind: arrays.get(f"{name}/inputs.{kind}") for kind in ("scales", "zeros")}
        made = rounding(made, QuantSpec.from_dict(spec), {name: kept})
    return Trained(said, task, made)

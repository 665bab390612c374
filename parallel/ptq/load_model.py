"""Trained models from checkpoints of any layout. Writing and reading files of quantised models."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError, latest
from parallel.checkpoint.step_folders import NAME
from parallel.checkpoint.tensor_slices import BUFFERS, within_family
from parallel.data.datasets import LearningTask
from parallel.engine.grad_compression import NONE
from parallel.engine.operator_records import buffers_of, load_buffers
from parallel.engine.settings import DEFAULTS, LAYOUT_FIELDS, TRANSFORM_FIELDS, Settings
from parallel.nn.compose import Sequential
from parallel.nn.operator import Operator, name_all
from parallel.nn.rewrite import operators_in
from parallel.nn.transforms.quantizable_layers import expect_finite, layers_of
from parallel.ptq.packed_weights import FewBitWeight, RoundedInput, packed, rounding, weights_of
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.validation import expect_integer, expect_mapping
from parallel.trainer.model_transforms import prune
from parallel.trainer.recipes import complete
from parallel.trainer.task_setup import build_model, loss_of, measure_of, prepare, steps_of
from parallel.trainer.trainer import settings_in
from quant import QuantizedArray, QuantSpec
from quant.io import safetensors_file

FORMAT = "chorus quantised model 1"


@dataclass
class TrainedModel:
    """Trained model with its task and the settings of its training."""

    settings: Settings
    task: LearningTask
    model: Operator

    @property
    def loss(self) -> Any:
        return loss_of(self.task, self.settings)

    @property
    def measure(self) -> Any:
        """Function that counts correct predictions, or None for regression."""
        return measure_of(self.task, self.settings)


def from_checkpoint(comm: Any, path: Path) -> TrainedModel:
    """Load the model of a checkpoint, or of the newest one in a folder, on every rank. Collective.

    CheckpointError on all ranks if there is none or it is damaged. ValueError if a value is not finite.
    """
    found = _opened(comm, path)
    before = settings_in(found)
    settings = _single_rank_settings(before)
    task, model, _ = collective_call(comm, lambda: prepare(settings, 1), f"the model of {found.path} cannot be made")
    _load_weights(comm, found, model, steps_of(complete({}, before), task), f"{settings.model} for {task.name}")
    return TrainedModel(settings, task, model)


def model_alone(comm: Any, path: Path) -> tuple[Settings, Operator]:
    """Settings and model of a checkpoint of `chorus train`, as `from_checkpoint`, without the data. Collective."""
    found = _opened(comm, path)
    if "sampler" not in found.facts:
        raise CheckpointError(f"{found.path} is not of chorus train: the program that wrote it has its model")
    if "task" not in found.facts:  # of an earlier release
        trained = from_checkpoint(comm, path)
        return trained.settings, trained.model
    settings = _single_rank_settings(settings_in(found))

    def make() -> tuple[Sequential, int]:
        about = expect_mapping(found.facts["task"], "task")
        steps = expect_integer(about, "steps")
        return build_model(settings, about["inputs"], expect_integer(about, "outputs"), steps), steps

    model, steps = collective_call(comm, make, f"the model of {found.path} cannot be made")
    _load_weights(comm, found, model, steps, settings.model)
    return settings, model


def _opened(comm: Any, path: Path) -> Checkpoint:
    """A checkpoint, or the newest in a folder. Collective."""
    newest = path if NAME.fullmatch(path.name) else latest(comm, path)
    if newest is None:
        found = "none in it" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: expected a folder with checkpoints of chorus train, found {found}")
    return Checkpoint(comm, newest)


def _load_weights(comm: Any, found: Checkpoint, model: Sequential, steps: int, expected_model: str) -> None:
    """Set the values of a model, pruned as in its training of so many steps, to those of a checkpoint. Collective."""
    parameters = {f"model/{parameter.name}": parameter for parameter in name_all(model)}
    stored = {name: entry.shape for name, entry in found.entries.items() if name.startswith("model/")}
    expected = {name: parameter.shape for name, parameter in parameters.items()}
    if wrong := sorted(name for name, _ in stored.items() ^ expected.items()):
        shapes = f"shape {stored.get(wrong[0])} in it, and {expected.get(wrong[0])} in {expected_model}"
        raise CheckpointError(f"{found.path} is of another model: {wrong[0]} has {shapes}")

    def read() -> None:
        load_buffers(model, {within_family(name): found.tensor(name) for name in found.entries if _is_buffer(name)})
        for name, parameter in parameters.items():
            parameter.data = found.tensor(name).astype(np.float32)
        prune(model, complete({}, settings_in(found)), steps, found.step)  # checkpoints keep pruned weights' values
        expect_finite(model)

    collective_call(comm, read, f"{found.path} cannot be used")


def _single_rank_settings(before: dict[str, Any]) -> Settings:
    """A checkpoint's settings, changed to one rank in fp32: no transforms, compression, recomputation or pool."""
    plain = {name: getattr(DEFAULTS, name) for name in TRANSFORM_FIELDS}
    changes = {"layout": "dp", "precision": "fp32", "compress": NONE, "recompute": False, "pool": False}
    return complete(plain | changes, {name: value for name, value in before.items() if name not in LAYOUT_FIELDS})


def task_for(comm: Any, trained: TrainedModel, data: str) -> LearningTask:
    """Task with data set `data` for a trained model. Collective. ValueError on all ranks if the data do not fit."""
    if data == trained.settings.data:
        return trained.task
    task, _, _ = collective_call(comm, lambda: prepare(replace(trained.settings, data=data), 1), "calibrate")
    if (task.inputs, task.kind) != (trained.task.inputs, trained.task.kind):
        wanted = f"{trained.task.kind} from samples of shape {trained.task.inputs}"
        raise ValueError(f"calibrate: the model makes {wanted}, and {data} has {task.kind} from {task.inputs}")
    return task


def _is_buffer(name: str) -> bool:
    return name.startswith(f"{BUFFERS}/")


# ---------------------------------------------------------------------------------------------- files


def save(path: Path, trained: TrainedModel, made: Operator) -> None:
    """Write quantised model `made` to a safetensors file: codes, other parameters, and the settings of `trained`.

    The file also has buffers.
    """
    arrays: dict[str, Any] = {parameter.name: parameter.data for parameter in made.parameters()}
    for name, weight in weights_of(made).items():
        arrays[name] = weight.quantized.codes
        if weight.quantized.divisor is not None:
            arrays[f"{name}/divisor"] = weight.quantized.divisor
    inputs = {}
    for _, operator in made.walk():
        if isinstance(operator, RoundedInput):
            inputs[operator.name] = operator.spec.to_dict()
            given = {name: values for name, values in operator.given.items() if values is not None}
            arrays |= {f"{operator.name}/inputs.{name}": values for name, values in given.items()}
    about = {"format": FORMAT, "settings": asdict(trained.settings), "inputs": inputs}
    arrays |= {f"{BUFFERS}/{name}": one.values for name, one in buffers_of(operators_in(made)).items()}
    safetensors_file.save(path, arrays, about)


def load(path: str | Path) -> TrainedModel:
    """Read a model written by `save`. FileNotFoundError if there is none.

    ValueError if it is another file, lacks an array, or has one of another shape, or quantised where it must not be,
    or lacks buffers.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    about = safetensors_file.about(path)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("it holds no model in few bits")
    arrays = safetensors_file.load(path)
    # the model is rebuilt from its settings: the file has values only
    settings = complete({}, expect_mapping(about.get("settings"), "settings"))
    task, model, _ = prepare(settings, 1)
    parameters = name_all(model)
    held = {name: _plain(arrays, name, values.shape) for name, values in arrays.items() if _is_buffer(name)}
    load_buffers(model, {within_family(name): values for name, values in held.items()})
    matrices = {layer.name: layer.shape for layer in layers_of(model)}
    weights = {}
    for parameter in parameters:
        name = parameter.name
        if name in matrices and isinstance(values := arrays.get(name), QuantizedArray):
            shape, divisor = matrices[name], f"{name}/divisor"
            _expect_shape(name, values, shape)
            weights[name] = FewBitWeight(values, _plain(arrays, divisor, shape[1:]) if divisor in arrays else None)
        else:
            parameter.data = _plain(arrays, name, parameter.shape)
    quantized = packed(model, weights)
    for name, fields in expect_mapping(about.get("inputs"), "inputs").items():
        spec = QuantSpec.from_dict(fields)
        kinds = ("scales",) if spec.symmetric else ("scales", "zeros")
        given = {kind: _plain(arrays, f"{name}/inputs.{kind}", (1, 1)) for kind in kinds}
        quantized = rounding(quantized, spec, {name: given})
    return TrainedModel(settings, task, quantized)


def _plain(arrays: Mapping[str, QuantizedArray | np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of this name. ValueError if it is quantised or has another shape."""
    if name not in arrays:
        raise ValueError(f"it has no {name}")
    values = arrays[name]
    if isinstance(values, QuantizedArray):
        raise ValueError(f"{name}: expected an array that is not quantised, found {values}")
    _expect_shape(name, values, shape)
    return values


def _expect_shape(name: str, values: QuantizedArray | np.ndarray, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, found {values.shape}")

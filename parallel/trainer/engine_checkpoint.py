"""State of any training engine: checkpoints, whole tensors, and an exchange of weights and their moving average."""

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.asynchronous.decentralized.replica_engine import ReplicaEngine
from parallel.checkpoint import checkpoint_files
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError
from parallel.checkpoint.step_folders import expect_shallow
from parallel.checkpoint.tensor_slices import TensorSlice, whole_tensors, within_family
from parallel.engine.fingerprint import array_text
from parallel.engine.operator_records import buffers_of
from parallel.engine.settings import Settings
from parallel.nn.operator import Operator
from parallel.nn.rewrite import operators_in
from parallel.optim.optimizer import EMA, Optimizer
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.consistency_check import check_equal
from parallel.runtime.validation import expect_integer, expect_mapping, is_real, real_number
from parallel.trainer.model_transforms import prune
from parallel.trainer.strategies import TrainableEngine
from quant.kernels import array_namespace

WEIGHTS, AVERAGE = "model/", f"optimizer/{EMA}/"
"""Beginnings of the names of slices: weights, and their moving average."""


def save_engine(
    engine: TrainableEngine,
    directory: Path,
    facts: Mapping[str, Any],
    keep: checkpoint_files.Kept,
    owner: checkpoint_files.Owner,
) -> Path:
    """Write a checkpoint of an engine with `facts` (see `checkpoint_files.save`). Returns its folder. Collective."""
    step, facts = engine.steps, {"engine": engine.state()} | dict(facts)

    def write(comm: MPI.Intracomm, slices: Iterable[TensorSlice]) -> None:
        checkpoint_files.save(comm, directory, step, slices, facts, keep=keep, owner=owner)

    engine.save(write)
    return directory / checkpoint_files.name_of(step)


def score_facts(score: float | None) -> dict[str, float]:
    """Facts of a checkpoint's score. ValueError for a number that is not finite."""
    if score is None:
        return {}
    value = real_number(score)
    if not math.isfinite(value):
        raise ValueError(f"score: expected a finite number, found {value}")
    return {"score": value}


def expect_json(facts: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first of `facts` that JSON does not have, such as a number of NumPy."""
    for name, value in facts.items():
        try:
            expect_shallow([value])
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: expected a value for JSON, found {reprlib.repr(value)} ({error})") from None


def fit_engine(found: Checkpoint, engine: TrainableEngine, optimizer: Optimizer) -> None:
    """Raise CheckpointError on all ranks if a checkpoint's tensors do not match the engine's. Collective."""
    there = {name.split("/")[1] for name in found.entries if name.startswith("optimizer/")}
    here = set(optimizer.states())
    if there != here and engine.flat.places:
        before = found.facts.get("optimizer")
        name = before.get("name", "another one") if isinstance(before, dict) else "another one"
        kept = [", ".join(sorted(some)) or "none" for some in (there, here)]
        raise CheckpointError(
            f"{found.path} is of another optimiser: it was made by {name}, which keeps vectors {kept[0]}; this "
            f"training has {optimizer.describe()['name']}, which keeps {kept[1]}"
        )
    found.fit(engine.tensor_slices())


def other_optimizer(found: Checkpoint, optimizer: Optimizer) -> tuple[str, ...]:
    """Remark on a checkpoint of an optimizer of another name with the same state vectors, as AdamW and LAMB have."""
    before, name = found.facts.get("optimizer"), optimizer.describe()["name"]
    if not isinstance(before, dict) or before.get("name", name) == name or not optimizer.states():
        return ()
    return (f"{found.path}: {', '.join(optimizer.states())} are those of {before['name']}, and {name} continues",)


def restore_engine(found: Checkpoint, engine: TrainableEngine, sampler: Callable[[], None] = lambda: None) -> None:
    """Load a checkpoint that fits into an engine. `sampler` is called before the engine's refresh. Collective.

    CheckpointError on all ranks, with nothing changed, if its engine state is invalid.
    """
    try:
        state = expect_mapping(found.facts.get("engine"), "state")
        if (steps := expect_integer(state, "steps")) != found.step:
            raise ValueError(f"steps: expected {found.step}, as the checkpoint's own, found {steps}")
        engine.load(found.facts["engine"])
    except ValueError as error:
        raise CheckpointError(f"{found.path} cannot be used: its engine's {error}") from error
    found.restore(engine.tensor_slices())
    sampler()
    engine.refresh()


def state_dict(engine: TrainableEngine, family: str = WEIGHTS) -> dict[str, np.ndarray]:
    """Whole tensors of the weights or their average, and buffers, by name, equal on all ranks. Collective."""

    def gather(comm: MPI.Intracomm, slices: Iterable[TensorSlice]) -> dict[str, np.ndarray]:
        return whole_tensors(comm, [piece for piece in slices if piece.name.startswith(family)])

    found: Any = engine.read(gather)
    weights = {name.removeprefix(family): found[name] for name in (family + one for one in _shapes(engine))}
    return weights | {name: buffer.values.copy() for name, buffer in engine.buffers.items()}


def load_state_dict(engine: TrainableEngine, comm: MPI.Intracomm, state: Mapping[str, Any], strict: bool) -> None:
    """Set weights and buffers. ValueError, with nothing changed, if they do not fit, or differ between ranks.

    Collective.
    """
    engine.quiesce()  # asynchronous ranks may be in different steps
    shapes = _shapes(engine) | {name: buffer.values.shape for name, buffer in engine.buffers.items()}
    given = collective_call(comm, lambda: _fitting(shapes, state, strict), "state")
    check_equal(comm, [(f"state of {name}", array_text(values)) for name, values in sorted(given.items())])
    for piece in engine.weight_slices():
        name = within_family(piece.name)
        if piece.name.startswith(WEIGHTS) and name in given and len(piece.array):
            piece.array[...] = array_namespace(piece.array).asarray(piece.elements_of(given[name]))
    for name in engine.buffers.keys() & given.keys():
        engine.buffers[name].load(given[name])
    engine.refresh()


def model_with(model: Operator, state: Mapping[str, np.ndarray], settings: Settings, step: int) -> Operator:
    """Copy of a model with the weights and buffers of a `state_dict`, pruned as after `step` steps."""
    made = deepcopy(model)
    for parameter in made.parameters():
        parameter.data = state[parameter.name]
    for name, buffer in buffers_of(operators_in(made)).items():
        buffer.load(state[name])
    prune(made, settings, settings.steps or 0, step)  # type: ignore[arg-type]
    return made


def _shapes(engine: TrainableEngine) -> dict[str, tuple[int, ...]]:
    """Shapes of the logical parameters of the model by name, in its order."""
    return {one.name: one.shape for one in engine.parameters}


def _fitting(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Any], strict: bool) -> dict[str, np.ndarray]:
    """Arrays in `state` with the names of `shapes`. ValueError for other shapes, and if `strict` for other names."""
    if not isinstance(state, Mapping):
        raise ValueError(f"expected a mapping from names to arrays, found a {type(state).__name__}")
    # all arrays are checked before any is written: a refused state changes nothing
    found = {name: np.asarray(values) for name, values in state.items() if name in shapes}
    for name, values in found.items():
        if not is_real(values):
            raise ValueError(f"{name}: expected real numbers, found {values.dtype}")
        if values.shape != shapes[name]:
            raise ValueError(f"{name}: expected an array of shape {shapes[name]}, found {values.shape}")
    missing, unknown = sorted(shapes.keys() - found.keys()), sorted(state.keys() - shapes.keys())
    if strict and (missing or unknown):
        raise ValueError(f"expected all parameters and nothing else, missing are {missing}, unknown are {unknown}")
    return found


@contextmanager
def exchanged_average(engine: TrainableEngine) -> Iterator[None]:
    """Context in which the moving average replaces the weights. Nothing changes before the first update."""
    engine.quiesce()
    if isinstance(engine, ReplicaEngine):
        with engine.moving_average():
            yield
    elif not engine.updates:
        yield
    else:
        _exchange(engine)
        try:
            yield
        finally:
            engine.quiesce()
            _exchange(engine)


def _exchange(engine: TrainableEngine) -> None:
    """Exchange weights and average in all slices of this rank. Collective."""
    pairs: dict[tuple[str, int], Any] = {}
    for piece in engine.tensor_slices():
        family = next((one for one in (WEIGHTS, AVERAGE) if piece.name.startswith(one)), None)
        if family is not None:
            key = piece.name.removeprefix(family), piece.start
            if (other := pairs.pop(key, None)) is None:
                pairs[key] = piece.array
            else:
                spare = other.copy()
                other[...], piece.array[...] = piece.array, spare
    engine.refresh()

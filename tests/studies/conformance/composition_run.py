"""Run of a composition on any ranks and on one, and the first difference between both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conformance.composition import Composition, simpler
from conformance.thread_communicator import run_threads
from parallel.checkpoint.tensor_slices import TensorSlice
from parallel.engine.data_parallel.error_feedback import LOST
from parallel.engine.grad_compression import NONE
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import SGD, AdamW
from parallel.trainer.engine import Engine

TOLERANCE = {"fp64": 1e-6, "fp32": 1e-4}
"""Largest difference of a value that is not reproducible, relative to the largest element of its tensor."""

EVERYTHING = "topk:1"
"""Compression that sends all elements: of one rank, when gradients are compressed."""


class Observation(NamedTuple):
    """Named value of a training: a number, or a whole tensor."""

    name: str
    value: Any


"""Beginning of the names of slices of what remains to be sent, the mean of the ranks."""

Launch = Callable[[int, Callable[[Any], Any]], Any]
"""Function of a number of ranks and ``main(communicator)``, that returns rank 0's result (None on other ranks)."""


def on_threads(ranks: int, main: Callable[[Any], Any]) -> Any:
    """`Launch` with threads as ranks."""
    return run_threads(ranks, main)[0]


def difference(composition: Composition, launch: Launch = on_threads) -> str:
    """First difference between a training on the composition's meshes and on one rank, as text; empty if there is none.

    Losses, gradients, norms, an evaluation, weights and optimizer state are compared: bit for bit if reproducible, else
    to `TOLERANCE`. Compressed gradients are compared as sums over all steps (`Sent`). An error that a rank raises is a
    difference too.
    """
    alone, one_rank = (("dp=1", "dp"), ("dp=1", "dp")), composition
    if composition.compress != NONE:
        one_rank = replace(composition, compress=EVERYTHING)
    meshes = (composition.mesh, composition.layout), (composition.next_mesh, composition.next_layout)
    try:
        with shared_folder() as folder:
            found = launch(composition.ranks, lambda comm: observed(comm, composition, meshes, folder / "mesh"))
            if found is None:
                return ""
            expected = on_threads(1, lambda comm: observed(comm, one_rank, alone, folder / "alone"))
    except Exception as error:  # of any kind: the composition has failed
        return f"{type(error).__name__}: {error}"
    return compare(found, expected, 0 if composition.reproducible else TOLERANCE[composition.precision])


@contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def observed(comm: Any, composition: Composition, meshes: Any, folder: Path) -> list[Observation]:
    """All observations of a training; with a second mesh, it continues there from a checkpoint. Collective."""
    (mesh, layout), (next_mesh, next_layout) = meshes
    found: list[Observation] = []
    trained = Sent() if composition.compress != NONE else train
    with engine_of(comm, composition, mesh, layout) as engine:
        found += trained(engine, composition, range(composition.steps))
        if composition.next_mesh:
            engine.save(folder)
    if composition.next_mesh:
        with engine_of(comm, composition, next_mesh, next_layout) as engine:
            engine.load(folder)
            found += trained(engine, composition, range(composition.steps, 2 * composition.steps))
    return found


def engine_of(comm: Any, composition: Composition, mesh: str, layout: str) -> Engine:
    """Engine of a composition. Collective."""
    changes = composition.compress == NONE
    sgd = composition.optimizer == "sgd"
    optimizer: Optimizer = SGD(rate=0.1 * changes, momentum=0.9) if sgd else AdamW(rate=0.01 * changes)
    return Engine(composition.model(), composition.loss(), comm, optimizer, composition.settings(mesh, layout))


def train(engine: Engine, composition: Composition, steps: range) -> list[Observation]:
    """Observations of some steps, of an evaluation, and of the state after them."""
    found: list[Observation] = []
    inner: Any = engine.inner
    for step in steps:
        x, y = data(composition, step)
        report = engine.step(x, y)
        found += [Observation(f"step {step}: loss", report.loss)]
        found += tensors(inner, inner.gradient_slices(), f"step {step}: gradient")
        found += [Observation(f"step {step}: norm", report.norm)]
        found += [Observation(f"step {step}: {name}", value) for name, value in report.terms.items()]
        found += [Observation(f"step {step}: {name}", np.array(count)) for name, count in report.counts.items()]
    found.append(Observation("evaluation", engine.evaluate(*data(composition, steps.stop)).loss))
    return found + tensors(inner, inner.tensor_slices(), "state")


class Sent:
    """Steps with compressed gradients, of equal weights: what they have sent in the mean, with what remains to be sent.

    Compression with error feedback loses nothing: together these are the sums of the exact mean gradients, whatever was
    sent in which step, on any mesh.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = {}

    def __call__(self, engine: Engine, composition: Composition, steps: range) -> list[Observation]:
        """Observations of some steps, and sums over these and all steps before."""
        found: list[Observation] = []
        inner: Any = engine.inner
        for step in steps:
            report = engine.step(*data(composition, step))
            found += [Observation(f"step {step}: loss", report.loss)]
            for name, gradient in tensors(inner, inner.gradient_slices(), "gradient"):
                self._sums[name] = self._sums.get(name, 0) + gradient / max(report.count, 1)
        slices = list(inner.tensor_slices())
        found += tensors(inner, (one for one in slices if one.name.startswith("model/")), "state")
        kept: dict[str, Any] = dict.fromkeys(self._sums, 0.0)
        for name, term in tensors(inner, (one for one in slices if one.name.startswith(LOST)), "gradient"):
            parameter = name.split("/", 3)[3]
            kept[f"gradient model/{parameter}"] += term
        return found + [Observation(name, sent + kept[name]) for name, sent in self._sums.items()]


def data(composition: Composition, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step; `ignored` targets are mostly in the first half of the sequences."""
    random = np.random.default_rng([composition.seed, step])
    count, length = composition.samples * composition.microbatches, composition.length
    if composition.family == "mlp":
        return random.normal(size=(count, length)), random.normal(size=(count, composition.vocabulary))
    x, y = random.integers(0, composition.vocabulary, (2, count, length))
    if composition.ignored:
        y[:, : length // 2][random.random((count, length // 2)) < 0.8] = -1
    return x, y


def tensors(engine: Any, slices: Iterable[TensorSlice], what: str) -> list[Observation]:
    """Whole tensors of slices of all ranks, on rank 0. Collective: one exchange, as these are small."""
    held = [one._replace(array=one.array.copy()) for one in slices if one.mine and len(one.array)]
    every = engine.save(lambda comm, _: comm.gather(held))
    whole: dict[str, np.ndarray] = {}
    for one in (one for some in every or () for one in some):
        tensor = whole.setdefault(one.name, np.full(one.shape, np.nan))
        part = tensor if one.cut is None else one.cut.take(tensor)
        start = one.start - (0 if one.cut is None else one.cut.offset)
        part.reshape(-1)[start : start + len(one.array)] = one.array
        if one.cut is not None:
            one.cut.put(part, tensor)
    return [Observation(f"{what} {name}", tensor) for name, tensor in sorted(whole.items())]


def compare(found: list[Observation], expected: list[Observation], tolerance: float) -> str:
    """First observation that differs, as text; empty if none does. Without tolerance bits are compared."""
    if [one.name for one in found] != [one.name for one in expected]:
        return f"expected the values {[one.name for one in expected]}, found {[one.name for one in found]}"
    for (name, here), (_, there) in zip(found, expected):
        a, b = (np.asarray(np.nan if one is None else one) for one in (here, there))
        if a.shape != b.shape:
            return f"{name}: expected shape {b.shape}, found {a.shape}"
        if not tolerance and a.tobytes() == b.tobytes():
            continue
        error, scale = np.abs(a - b).max(initial=0), np.abs(b).max(initial=0)
        if not tolerance or not (error <= tolerance * max(scale, 1e-3) or np.array_equal(a, b, equal_nan=True)):
            return f"{name}: differs from one rank by {error:.2g}, where the largest is {scale:.2g}"
    return ""


def shrink(composition: Composition, fails: Callable[[Composition], bool], most: int = 200) -> Composition:
    """The simplest composition found that still fails, after at most `most` trials of simpler ones."""
    trials, again = 0, True
    while again:
        again = False
        for one in simpler(composition):
            trials += 1
            if trials > most:
                return composition
            if fails(one):
                composition, again = one, True
                break
    return composition

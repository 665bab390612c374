"""Run of a composition on any ranks and on one, and the first difference between both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallel.checkpoint.tensor_slices import TensorSlice
from parallel.conformance.composition import Composition, simpler
from parallel.conformance.thread_communicator import run_threads
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import SGD, AdamW
from parallel.trainer.engine import Engine

TOLERANCE = 1e-6
"""Largest difference of a value that is not reproducible, relative to the largest element of its tensor."""


class Observation(NamedTuple):
    """Named value of a training: a number, or a whole tensor."""

    name: str
    value: Any


Launch = Callable[[int, Callable[[Any], Any]], Any]
"""Function of a number of ranks and ``main(communicator)``, that returns rank 0's result (None on other ranks)."""


def on_threads(ranks: int, main: Callable[[Any], Any]) -> Any:
    """`Launch` with threads as ranks."""
    return run_threads(ranks, main)[0]


def difference(composition: Composition, launch: Launch = on_threads) -> str:
    """First difference between a training on the composition's meshes and on one rank, as text; empty if there is none.

    Losses, gradients, norms, an evaluation, weights and optimizer state are compared: bit for bit if reproducible, else
    to `TOLERANCE`. An error that a rank raises is a difference too.
    """
    alone = (("dp=1", "dp"), ("dp=1", "dp"))
    meshes = (composition.mesh, composition.layout), (composition.next_mesh, composition.next_layout)
    try:
        with shared_folder() as folder:
            found = launch(composition.ranks, lambda comm: observed(comm, composition, meshes, folder / "mesh"))
            if found is None:
                return ""
            expected = on_threads(1, lambda comm: observed(comm, composition, alone, folder / "alone"))
    except Exception as error:  # of any kind: the composition has failed
        return f"{type(error).__name__}: {error}"
    return compare(found, expected, exact=composition.reproducible)


@contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def observed(comm: Any, composition: Composition, meshes: Any, folder: Path) -> list[Observation]:
    """All observations of a training; with a second mesh, it continues there from a checkpoint. Collective."""
    (mesh, layout), (next_mesh, next_layout) = meshes
    found: list[Observation] = []
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
    optimizer: Optimizer = SGD(rate=0.1, momentum=0.9) if composition.optimizer == "sgd" else AdamW(rate=0.01)
    return Engine(composition.model(), composition.loss(), comm, optimizer, composition.settings(mesh, layout))


def trained(engine: Engine, composition: Composition, steps: range) -> list[Observation]:
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
    biases = inner.state().get("biases", {})
    found += [Observation(f"bias {name}", np.array(values)) for name, values in biases.items()]
    return found + tensors(inner, inner.tensor_slices(), "state")


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


def compare(found: list[Observation], expected: list[Observation], exact: bool) -> str:
    """First observation that differs, as text; empty if none does."""
    if [one.name for one in found] != [one.name for one in expected]:
        return f"expected the values {[one.name for one in expected]}, found {[one.name for one in found]}"
    for (name, here), (_, there) in zip(found, expected):
        a, b = (np.asarray(np.nan if one is None else one) for one in (here, there))
        if a.shape != b.shape:
            return f"{name}: expected shape {b.shape}, found {a.shape}"
        if exact and a.tobytes() == b.tobytes():
            continue
        error, scale = np.abs(a - b).max(initial=0), np.abs(b).max(initial=0)
        if exact or not (error <= TOLERANCE * max(scale, 1e-3) or np.array_equal(a, b, equal_nan=True)):
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

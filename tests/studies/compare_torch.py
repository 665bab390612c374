"""Train one model with Chorus and with PyTorch (DistributedDataParallel over gloo); compare gradients and speed.

mpiexec -n 2 python tests/studies/compare_torch.py --model gpt:small
mpiexec -n 2 python tests/studies/compare_torch.py --model gpt:small --tensor-parallel  # against parallelize_module
mpiexec -n 2 python tests/studies/compare_torch.py --model gpt:small --experts 8,k=2  # a layer with all_to_all_single

Same first weights, batches and threads, float32 and AdamW. First the gradients of step 1 are compared; then both train
in turns of a few steps, never at the same time. Needs PyTorch (the extra "torch").
"""

import argparse
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
from expert_race import mixture_of, race
from mpi4py import MPI
from recipes import first_model

from collectives import Communicator
from collectives.benchmark.reports import quartiles
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.cli.bench_layouts import COUNT, add_options, begin, choose_data, run_race
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.optim.optimizers import SGD, AdamW

RTOL, ATOL = 1e-5, 4e-5  # largest difference of a gradient element: ATOL + RTOL of its size


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add_options(parser, "gpt:small", turn=10)
    parser.add_argument("--steps", type=COUNT, default=200, metavar="N", help="of each side (default 200)")
    cut = "cut the operators over the ranks, which then have the same batches, in place of replicas"
    kinds = parser.add_mutually_exclusive_group().add_argument
    kinds("--tensor-parallel", action="store_true", help=cut)
    kinds("--experts", metavar="HOW", help="only a mixture of the model's width, its experts divided over the ranks")
    options = parser.parse_args(argv)
    if options.experts is not None:
        try:
            mixture_of(options)
        except ValueError as error:
            parser.error(str(error))
    choose_data(parser, options)
    if find_spec("torch") is None:
        parser.error("PyTorch is not installed: pip install 'chorus-mpi[torch]'")
    return options


class GradientTap(SGD):
    """Optimizer that stores (span, scaled gradient) in `spans` and leaves the weights unchanged."""

    def update(self, pieces: Any, step: int, scale: float, gather: Any = None, clock: Any = None) -> None:
        self.spans = [(piece.span, piece.gradient * scale) for piece in pieces]


def chorus_side(
    task: LearningTask, options: argparse.Namespace, comm: Communicator, optimizer: Any
) -> DataParallelEngine:
    model = build(options.model, task.inputs, task.outputs)
    settings = Settings(mesh=f"tp={comm.Get_size()}" if options.tensor_parallel else None)
    return DataParallelEngine(model, SoftmaxCrossEntropy(), comm, optimizer, settings)


def chorus_gradients(
    task: LearningTask, options: argparse.Namespace, comm: Communicator, batch: Batch
) -> dict[str, np.ndarray]:
    """Gradient of the mean loss over all ranks' batches, computed by Chorus, by parameter name. Collective."""
    tap = GradientTap(rate=0.0)
    whole: dict[str, np.ndarray] = {}
    with chorus_side(task, options, comm, tap) as engine:
        engine.step([batch])
        flat = engine.flat
        vector = np.zeros(flat.length, np.float32)
        for span, gradient in tap.spans:
            vector[span.start : span.stop] = gradient
        held = [(p.name, p.cut, flat.view(vector, p, place.span.start)) for place in flat.places for p in place[:1]]
    for name, cut, values in chain.from_iterable(comm.allgather(held)):
        if cut is None:
            whole[name] = values
        else:
            cut.put(values, whole.setdefault(name, np.zeros(cut.shape, np.float32)))
    return whole


def norm(gradients: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(values, dtype=np.float64).sum() for values in gradients.values())))


def gradients_compared(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[bool, str]:
    """Compare gradients by parameter name: (True if all agree within tolerance, text with the largest difference)."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"parameters of one side only: {sorted(ours.keys() ^ theirs.keys())}")
    apart, tensor = max((float(np.abs(ours[name] - theirs[name]).max(initial=0.0)), name) for name in ours)
    within = all(np.allclose(ours[name], theirs[name], rtol=RTOL, atol=ATOL) for name in ours)
    return within, (
        f"largest difference {apart:.2g} (in {tensor}), norms {norm(ours):.7g} and {norm(theirs):.7g}: "
        f"{'equal' if within else 'NOT EQUAL'} within {ATOL:g} + {RTOL:g} of the size"
    )


def main(argv: list[str] | None = None) -> int:
    """Compare gradients and training speed with PyTorch; exit status 0 if the gradients agree."""
    options = parse(argv)
    if options.experts is not None:
        return race(options)
    from torch_ddp import TorchTraining  # only now: `parse` refuses to go on without PyTorch
    from torch_tensor_parallel import TorchTensorParallel

    comm, task, source = begin(options, together=options.tensor_parallel)
    unit = "tokens" if task.is_text else "samples"
    first = next(source)
    adamw = AdamW(rate=3e-4, beta2=0.95, decay=0.1)
    ours, model = (
        chorus_side(task, options, comm, adamw),
        first_model(options.model, task.inputs, task.outputs),
    )
    torch_side = TorchTensorParallel if options.tensor_parallel else TorchTraining
    theirs = torch_side(model, adamw, MPI.COMM_WORLD, options.threads)
    equal, text = gradients_compared(chorus_gradients(task, options, comm, first), theirs.gradients(first.x, first.y))
    size, work = comm.Get_size(), int(first.y.size) * (1 if options.tensor_parallel else comm.Get_size())
    parameters = sum(parameter.size for parameter in model.parameters())
    say(f"{options.model}, {parameters} parameters, {size} ranks, {options.threads} threads each, {work} {unit} a step")
    say(f"gradients of step 1: {text}")
    sides: dict[str, Callable[[Batch], float]] = {
        "Chorus": lambda batch: ours.step([batch]).loss,
        "PyTorch": lambda batch: theirs.step(batch.x, batch.y),
    }
    lengths = [min(options.turn, options.steps - start) for start in range(0, options.steps, options.turn)]
    turns = run_race(sides, chain([first], source), lengths)
    theirs.close()
    ours.close()
    timed = {name: its[1:] or its for name, its in turns.items()}  # in the first turn both warm up
    rates = {name: np.array([work / turn.seconds for turn in its]) for name, its in timed.items()}
    rows = [(name, values, f" {unit}/s", 0) for name, values in rates.items()]
    for name, values, label, digits in [*rows, ("ratio", rates["Chorus"] / rates["PyTorch"], "", 3)]:
        of = quartiles(values)
        say(f"{name:8} {of['median']:.{digits}f}{label}  (quartiles {of['q1']:.{digits}f} to {of['q3']:.{digits}f})")
    mine, others = (np.array([value for turn in its for value in turn.values]) for its in turns.values())
    apart = np.abs(mine - others).max()
    say(f"loss after {len(mine)} steps: {mine[-1]:.5f} and {others[-1]:.5f}; largest difference on the way {apart:.2g}")
    return 0 if equal else 1


if __name__ == "__main__":
    launcher.run(main)

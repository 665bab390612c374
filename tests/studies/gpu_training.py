"""Measure the training of GPT models on one GPU: tokens/s, the share of the GPU's peak, and PyTorch's tokens/s.

    python tests/studies/gpu_training.py [--models gpt:small,gpt:large] [--precision bf16] [--batch 64] [--length 256]

Both start with the same weights, train on the same random tokens with AdamW, and are measured in turns, so that they
find the same GPU. PyTorch runs in eager mode with fused AdamW and automatic mixed precision; without PyTorch for CUDA
only Chorus is measured. Lines that begin with "below the goal" name what is slower than it should be.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from recipes import first_model

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import ProgramParser, at_least, say
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.nn.operator import ArraySpec
from parallel.optim.optimizers import AdamW
from parallel.optim.precision import PRECISIONS
from parallel.planning.analytic import presets
from parallel.runtime.resources import peak_flops

VOCABULARY = 256
WARM_UP, TURNS = 3, 3
"""Steps before the first turn, in which kernels are built; and turns of each side."""

GOAL_OF_TORCH = {"gpt:large": 0.8}
"""Least share of PyTorch's tokens/s by model."""

TOLERANCE = 0.02
"""Largest relative difference of the losses of the first steps."""

Step = Callable[[], float]


class Peak(NamedTuple):
    """FLOP/s of a device's matrix products, and where the figure is from."""

    flops: float
    source: str


class TrainingSpeed(NamedTuple):
    """Measurement of one side: losses of the first steps, and tokens per second of each turn."""

    losses: list[float]
    rates: list[float]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def torch_with_cuda() -> str:
    """Reason why PyTorch cannot be measured on a GPU; "" if it can."""
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        return f"PyTorch is not installed ({error})"
    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds no GPU"


def peak_of(device: str, precision: str, comm: Any) -> Peak:
    """Peak of a device by its name: of its data sheet, or else measured by matrix products. Collective."""
    known = presets.load().devices
    name = max((key for key in known if key in device.lower().split()), key=len, default="")
    if name and precision in known[name].peak:
        return Peak(known[name].peak[precision], f"data sheet of {name}")
    return Peak(peak_flops(comm, "cuda", dtype=PRECISIONS[precision].storage), "measured by products of matrices")


def chorus_side(model: str, length: int, precision: str, comm: Communicator, batch: Batch) -> tuple[Step, Any]:
    """Function that trains one step with Chorus and returns the loss, and its engine."""
    engine = DataParallelEngine(
        build(model, (length,), VOCABULARY), SoftmaxCrossEntropy(), comm, AdamW(rate=3e-4), settings_of(precision)
    )
    return lambda: engine.step([batch]).loss, engine


def settings_of(precision: str) -> Settings:
    return Settings(precision=precision, device="cuda")


def torch_side(model: str, length: int, precision: str, batch: Batch) -> Step:
    """Function that trains one step with PyTorch and returns the loss."""
    from torch_on_device import TorchOnDevice  # only where PyTorch is installed

    training = TorchOnDevice(first_model(model, (length,), VOCABULARY), AdamW(rate=3e-4), precision)
    return partial(training.step, batch.x, batch.y)


def compared(sides: dict[str, Step], tokens: int, seconds: float) -> dict[str, TrainingSpeed]:
    """Train each side in turns of so many seconds in all; `tokens` are those of a step."""
    found = {name: TrainingSpeed([step() for _ in range(WARM_UP)], []) for name, step in sides.items()}
    for _ in range(TURNS):
        for name, step in sides.items():
            began, steps, elapsed = time.perf_counter(), 0, 0.0
            while not steps or elapsed < seconds / TURNS:
                step()
                steps, elapsed = steps + 1, time.perf_counter() - began
            found[name].rates.append(steps * tokens / elapsed)
    return found


def measure(model: str, args: Any, comm: Communicator, peak: Peak, with_torch: bool) -> dict[str, Any]:
    """Measure one model; {"model": ..., "sides": ..., "errors": [...], "goals": [...]}."""
    random = np.random.default_rng(0)
    x, y = (random.integers(0, VOCABULARY, (args.batch, args.length)) for _ in range(2))
    batch = Batch(0, x, y, np.arange(args.batch))
    spec = ArraySpec((args.batch, args.length), x.dtype)
    flops = build(model, (args.length,), VOCABULARY).outline(spec).training_flops / x.size  # of a token
    step, engine = chorus_side(model, args.length, args.precision, comm, batch)
    sides = {"Chorus": step}
    if with_torch:
        sides["PyTorch"] = torch_side(model, args.length, args.precision, batch)
    found = compared(sides, x.size, args.seconds)
    engine.close()
    made: dict[str, Any] = {"model": model, "precision": args.precision, "errors": [], "goals": [], "sides": {}}
    for name, speed in found.items():
        made["sides"][name] = {
            "tokens per second": speed.rate,
            "MFU": speed.rate * flops / peak.flops,
            "slowest and fastest turn": (min(speed.rates), max(speed.rates)),
            "losses": speed.losses,
        }
    if with_torch:
        judge(made, found["Chorus"], found["PyTorch"])
    return made


def judge(made: dict[str, Any], ours: TrainingSpeed, theirs: TrainingSpeed) -> None:
    """Add the ratio of the rates, wrong losses and missed goals to a model's results."""
    made["ratio"], what = ours.rate / theirs.rate, f"{made['model']}, {made['precision']}"
    if not np.allclose(ours.losses, theirs.losses, rtol=TOLERANCE, atol=0):
        made["errors"].append(f"{what}: losses {ours.losses}, of PyTorch {theirs.losses}")
    goal = GOAL_OF_TORCH.get(made["model"], 0.0)
    if made["ratio"] < goal:
        made["goals"].append(f"{what}: {made['ratio']:.2f} of PyTorch's tokens/s, expected {goal}")


def lines(made: dict[str, Any]) -> list[str]:
    """Table rows of a model's results."""
    rows = []
    for name, side in made["sides"].items():
        low, high = side["slowest and fastest turn"]
        rate = f"{side['tokens per second']:12.0f} {low:12.0f} {high:12.0f} {side['MFU']:7.3f}"
        rows.append(f"{made['model']:12} {name:8} {rate} {side['losses'][-1]:9.4f}")
    return rows + ([f"{made['model']:12} Chorus / PyTorch {made['ratio']:.3f}"] if "ratio" in made else [])


def parse(arguments: Sequence[str] | None) -> Any:
    parser = ProgramParser(__doc__)
    parser.add_argument("--models", default="gpt:small,gpt:large", help="names with sizes (gpt:small,gpt:large)")
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"], help="default bf16")
    parser.add_argument("--batch", type=at_least(1, int), default=64, help="sequences of a step (64)")
    parser.add_argument("--length", type=at_least(1, int), default=256, help="tokens of a sequence (256)")
    parser.add_argument("--seconds", type=at_least(0, float), default=6, help="for each model and side (6)")
    parser.add_argument("--limit", type=float, default=600, help="seconds until the last model (600)")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models and print the table; return 1 if the losses differ from PyTorch's, else 0."""
    args, began, cupy = parse(arguments), time.monotonic(), import_module("cupy")
    comm = Communicator(MPI.COMM_SELF.Dup(), gpu="staged")
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    peak, refusal = peak_of(device, args.precision, comm), torch_with_cuda()
    say(f"# {device}, {args.precision}, {args.batch} x {args.length} tokens a step; {refusal or 'beside PyTorch'}")
    say(f"# MFU: share of {peak.flops / 1e12:.4g} TFLOP/s ({peak.source})")
    say(f"{'model':12} {'side':8} {'tokens/s':>12} {'slowest':>12} {'fastest':>12} {'MFU':>7} {'loss':>9}")
    results: list[dict[str, Any]] = []
    for model in args.models.split(","):
        if time.monotonic() - began > args.limit:
            say(f"below the goal: {model} was left out: no time")
            continue
        results.append(measure(model, args, comm, peak, not refusal))
        cupy.get_default_memory_pool().free_all_blocks()
        for line in lines(results[-1]):
            say(line)
    for made in results:
        for text in made["goals"]:
            say(f"below the goal: {text}")
        for text in made["errors"]:
            say(f"Error: {text}")
    if args.json:
        found = {"device": device, "peak": peak._asdict(), "PyTorch": refusal or "measured", "models": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    comm.close()
    return 1 if any(made["errors"] for made in results) else 0


if __name__ == "__main__":
    launcher.run(main)

"""Check that the memory forecast of random trainings is their ledger, to the byte, on every rank.

    mpiexec -n 3 python tests/studies/verify_forecasts.py --forecasts 200 --seed 0

A seed draws layout (every strategy in turn), model, data, mesh, precision, optimizer, sizes of micro-batches and
buckets, and, where they go with these, transforms, kinds of blocks and compressed gradients. After two steps the
forecast, made before the first one, is compared with the bytes that the engine expected and allocated. Exit status 1 if
one differs.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import LauncherParser, at_least, say
from parallel.asynchronous.decentralized.styles import STYLES
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.settings import DEFAULTS, LAYOUT_NAMES, OPTIONS, Settings
from parallel.optim.precision import PRECISIONS
from parallel.trainer.recipes import complete
from parallel.trainer.task_setup import prepare
from parallel.trainer.trainer import Training


def draw_settings(seed: int, ranks: int) -> Settings:
    """Settings of a short training on so many ranks; neighbouring seeds have the strategies in turn."""
    random = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[random.integers(len(values))]

    layout = LAYOUT_NAMES[seed % len(LAYOUT_NAMES)]
    if layout == "ps" and ranks < 2:
        layout = "zero3"
    text = random.random() < 0.4 and not (layout == "pp" and ranks > 4)
    chosen: dict[str, Any] = {"layout": layout, "data": "copy" if text else "teacher_classes", "steps": 2, "warm_up": 0}
    chosen |= {"model": "gpt:tiny" if text else one("mlp:tiny", "mlp:small")} | ({"length": 16} if text else {})
    chosen |= {"batch": one(8, 13, 24), "optimizer": one("sgd", "adam", "adamw"), "clip": one(0.0, 0.5)}
    chosen |= {"precision": one(*PRECISIONS), "recompute": one(False, True), "dropout": one(0.0, 0.1)}
    chosen |= {"bucket_bytes": one(1 << 12, 1 << 16, 4 << 20), "first_bytes": one(1, 1 << 12)}
    chosen |= {"reproducible": one(False, True), **one({}, {"micro_batch": 3}, {"accumulate": 2})}
    if layout in STYLES:
        chosen |= {"reproducible": False, "precision": one("fp32", "fp64")}
    if layout == "federated":
        chosen |= {"clients": one(8, 13), "client_fraction": one(0.3, 1.0), "local_epochs": 1, "batch": one(96, 200)}
    if layout == "ps":
        chosen |= {"precision": one("fp32", "fp64", "bf16"), "servers": ranks - 1, "consistency": one("bsp", "async")}
        chosen["reproducible"] &= chosen["consistency"] == "bsp"
    if layout in LAYOUTS and text and ranks % 2 == 0 and random.random() < 0.7:
        chosen |= one(*_meshes(ranks))
    if layout == "pp":
        chosen |= _pipeline(one, text, ranks)
        chosen.pop("accumulate", None)
    divided = "cp=" in chosen.get("mesh", "")  # sequences, whose models have no transforms
    for more in ({} if divided else _transforms(one), _blocks(one) if text else {}, _sums(one, chosen, ranks)):
        if _is_accepted(chosen | more, ranks):
            chosen |= more
    return complete(chosen)


def _pipeline(one: Callable[..., Any], text: bool, ranks: int) -> dict[str, Any]:
    """A schedule, stages and micro-batches; two parts of a stage where the model has as many layers."""
    model, layers = ("gpt:tiny", 4) if text else ("mlp:small", 3)
    stages = min(ranks, layers if text else 2)
    if ranks % stages:
        stages = 1
    two_parts = ("pp:zb-v", "pp:interleaved", "pp:dualpipe-v") if 2 * stages <= layers else ()
    parts = 24 * stages // ranks  # samples of a pipeline
    micro = one(parts // 2, max(1, parts // 8))
    layout = one("pp:1f1b", "pp:gpipe", "pp:zb-h1", *two_parts)
    return {"model": model, "layout": layout, "batch": 24, "stages": stages, "micro_batch": micro}


def _is_accepted(chosen: dict[str, Any], ranks: int) -> bool:
    """True if these settings go together: a layout, or a mesh, may not have all options."""
    try:
        prepare(complete(chosen), ranks)
    except ValueError:
        return False
    return True


def _transforms(one: Callable[..., Any]) -> dict[str, Any]:
    """Few-bit products, fake quantisation or pruning, for half of the trainings."""
    moving: dict[str, Any] = one({}, {"fake_quant_inputs": "int8"})
    weights: dict[str, Any] = {"fake_quant": one("int8", "int4_g32", "int3_row")}
    pruned: dict[str, Any] = one(
        {"prune": 0.5}, {"prune": 0.3, "prune_pattern": "rows"}, {"prune": 0.5, "prune_pattern": "2:4"}
    )
    found: dict[str, Any] = one({}, {}, {}, {"products": one("fp8", "mxfp8")}, weights | moving, pruned)
    return found


def _blocks(one: Callable[..., Any]) -> dict[str, Any]:
    """Recomputation by block, mixtures of experts, and blocks for some tokens."""
    found: dict[str, Any] = {"recompute": one("none", "selective", "full", "full,none", "selective,none")}
    found |= one({}, {}, {"model": "gpt-moe:tiny", "experts": "4,k=2"}, {"depths": "0.5"})
    return found


def _sums(one: Callable[..., Any], chosen: dict[str, Any], ranks: int) -> dict[str, Any]:
    """LAMB, replicas of stages that share states, compressed gradients."""
    found: dict[str, Any] = one({}, {}, {"optimizer": "lamb"})
    if chosen["layout"].startswith("pp"):
        axis, stages = one("dp", "zero1", "zero2", "zero3"), chosen["stages"]
        found |= {"stages": None, "mesh": f"{axis}={ranks // stages},pp={stages}"}
    return found | {"compress": one("none", "none", "int8", "int4", "sign", "topk:0.05", "powersgd:2", "qsgd:4")}


def _meshes(ranks: int) -> Iterator[dict[str, Any]]:
    """Settings with operators, sequences or both divided over an even number of ranks."""
    replicas = ranks // 2
    yield {"mesh": f"dp={replicas},tp=2", "sequence_parallel": False}
    yield {"mesh": f"dp={replicas},tp=2", "sequence_parallel": True}
    yield {"mesh": f"dp={replicas},cp=2"}
    if replicas % 2 == 0:
        yield {"mesh": f"dp={replicas // 2},cp=2,tp=2"}


def forecast_difference(settings: Settings, comm: Communicator) -> str:
    """Difference on this rank between the forecast of a training and its ledger after all steps, or "". Collective."""
    with Training(settings, comm) as training:
        for _ in training.run():
            pass
        forecast, ledger = training.forecast, training.engine.ledger
        for name, expected, found in (
            ("forecast and ledger", forecast.predicted, ledger.predicted),
            ("forecast and arrays", forecast.predicted, ledger.allocated),
            ("needed bytes", forecast.needed, ledger.needed),
        ):
            if expected != found:
                return f"{name}: expected {expected}, found {found}"
    return ""


def main() -> int:
    """Verify forecasts; exit status 1 if one is not the ledger."""
    parser = LauncherParser(__doc__, usage="%(prog)s --forecasts N [options]")
    add = parser.add_argument
    add("--forecasts", type=at_least(1, int), required=True, metavar="N", help="number of trainings")
    add("--seed", type=at_least(0, int), default=0, metavar="S", help="the first one (default 0)")
    args = parser.parse_args()
    began, failures = time.perf_counter(), 0
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in range(args.seed, args.seed + args.forecasts):
            settings = draw_settings(seed, comm.Get_size())
            texts = comm.allgather(forecast_difference(settings, comm))
            if any(texts):
                failures += 1
                changed = {name: getattr(settings, name) for name in OPTIONS}
                words = [f"{name}={value}" for name, value in changed.items() if value != getattr(DEFAULTS, name)]
                say(f"seed {seed} fails: {' '.join(words)}")
                for rank, text in enumerate(texts):
                    say(f"  rank {rank}: {text}" if text else f"  rank {rank}: equal")
    count = args.forecasts
    say(f"{count - failures} of {count} forecasts are the ledger ({time.perf_counter() - began:.0f} s)")
    return int(failures > 0)


if __name__ == "__main__":
    launcher.run(main)

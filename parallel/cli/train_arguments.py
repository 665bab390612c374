"""Command-line options of `chorus train` and `chorus plan`."""

import argparse
from pathlib import Path
from typing import Any

from collectives.cli.arguments import picture_file
from parallel.data import datasets
from parallel.engine.grad_compression import AUTO, COMPRESSORS, NONE
from parallel.nn.expert_layers import WORDS
from parallel.nn.models import MODELS
from parallel.nn.recompute import KINDS
from parallel.nn.transforms.apply import STORED
from parallel.nn.transforms.few_bit_product import PRODUCTS
from parallel.nn.transforms.pruning import PATTERNS
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.precision import PRECISIONS
from parallel.sharding.context.divide_model import ALGORITHMS
from parallel.sharding.context.models_by_length import AUTO as AUTO_CONTEXT
from parallel.trainer.strategies import STRATEGIES


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add all options for training settings (fields of `Settings`), and --threads, to a parser."""
    sizes = "; ".join(f"{name}: {', '.join(family.sizes)}" for name, family in MODELS.items())

    add = parser.add_argument_group("model and data").add_argument
    add(
        "--data",
        metavar="NAME",
        help=f"{', '.join(datasets.TASKS)}, a text or .npz file, or a folder of shards (default digits)",
    )
    add("--model", metavar="NAME", help=f"{', '.join(MODELS)}, or with a size as in gpt:tiny ({sizes})")
    add("--experts", metavar="HOW", help=f"of gpt-moe, as in 8,k=2,capacity=1.25 (words: {', '.join(WORDS)})")
    add(
        "--depths",
        metavar="HOW",
        help="of gpt models: part of the tokens for every second block, as in 0.125 or 0.5,every=1",
    )
    add("--length", type=int, metavar="N", help="length of sequences")
    add("--window", type=int, metavar="N", help="neighbouring samples shuffled among themselves (default: all)")
    add("--dropout", type=float, metavar="P", help="dropout probability")
    add("--seed", type=int, metavar="N", help="seed of weights, order of samples, and dropout (default 0)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--optimizer", choices=list(OPTIMIZERS), help="default adamw")
    add("--rate", type=float, metavar="R", help="highest learning rate")
    add("--warm-up", type=int, metavar="N", help="steps until the highest rate; then it falls to a tenth")
    add("--decay", type=float, metavar="D", help="weight decay")
    add("--momentum", type=float, metavar="M", help="momentum of sgd")
    add("--beta2", type=float, metavar="B", help="decay of the second moment, of the other optimizers")
    add("--clip", type=float, metavar="NORM", help="largest norm of the gradient, 0 for no clipping")
    batches = parser.add_mutually_exclusive_group().add_argument
    batches("--batch", type=int, metavar="N", help="samples per step, over all ranks; federated: per client and step")
    batches("--batch-tokens", type=int, metavar="N", help="tokens per step, over all ranks, of a text")
    several = parser.add_mutually_exclusive_group().add_argument
    several("--accumulate", type=int, metavar="K", help="micro-batches of each rank in a step (default 1)")
    several("--micro-batch", type=int, metavar="N", help="samples per micro-batch")
    several("--microbatches", type=int, metavar="M", help="micro-batches of a step in each pipeline (default 8)")
    ends = parser.add_mutually_exclusive_group().add_argument
    ends("--epochs", type=float, metavar="N", help="passes over the data")
    ends("--steps", type=int, metavar="N", help="steps in all, with those before a restart")

    _add_transforms(parser)

    add = parser.add_argument_group("execution").add_argument
    add("--parallel", dest="layout", metavar="LAYOUT", help=f"strategy: {', '.join(STRATEGIES)} (default dp)")
    add("--precision", choices=list(PRECISIONS), help="precision of weights and activations (default fp32)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    either: Any = {"action": argparse.BooleanOptionalAction, "default": None}
    again = f"compute activations again in the backward pass: {', '.join(KINDS)}, or one for each block (default full)"
    add("--recompute", nargs="?", const="full", metavar="KIND", help=again)
    add("--no-recompute", dest="recompute", action="store_const", const="none", help="keep all activations (default)")
    add("--reproducible", **either, help="bitwise the same result on any number of ranks, in any layout")
    add("--pool", **either, help="ranks fetch micro-batches when they are idle (layouts dp... and zero1)")
    add("--bucket-bytes", type=int, metavar="N", help="size of a bucket of gradients (default 4 MiB)")
    add("--compress", metavar="HOW", help=f"compression of gradients: {', '.join(COMPRESSORS)}, {AUTO}, {NONE}")
    add("--check-every", type=int, metavar="N", help="compare parameters over the ranks every N steps")
    threads = "BLAS threads per rank (default: cores that the node's ranks may use / their number; 1 if reproducible)"
    add("--threads", type=int, metavar="N", help=threads)
    _add_strategies(parser)


def _add_transforms(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("few bits and pruning").add_argument
    add("--products", choices=[STORED, *PRODUCTS], help="number format of matrix products' operands (default stored)")
    add("--fake-quant", metavar="SPEC", help="train with weights rounded to a format of chorus quantize, as int4_g32")
    add("--fake-quant-inputs", metavar="SPEC", help="and with layer inputs rounded, in moving ranges, as int8")
    add("--prune", type=float, metavar="S", help="fraction of weights to prune, reached after half of the steps")
    add(
        "--prune-pattern",
        metavar="P",
        help=f"{', '.join(PATTERNS)}, or N:M: N of M neighbours remain (default elements)",
    )


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("mesh").add_argument
    mesh = "mesh of ranks, as in dp=2,cp=2,tp=2, dp=4,ep=2 (ranks that share experts; etp: parts of them) or, for "
    mesh += "pipelines, pp=2,zero1=2,tp=2; the last axis has neighbours"
    add("--mesh", metavar="AXES", help=mesh)
    shards = "parts of each operator that is cut along tp, for the same bits on any number of its ranks (default tp)"
    add("--tensor-shards", type=int, metavar="T", help=shards)
    slices = "parts of each expert, likewise (default those that etp needs)"
    add("--expert-shards", type=int, metavar="S", help=slices)
    parts = "ranks of tp have parts of the sequence between operators that are cut"
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, help=parts)
    parts = "parts of each sequence that is divided along cp, likewise (default cp)"
    add("--sequence-parts", type=int, metavar="P", help=parts)
    add("--context", metavar="NAME", help=f"attention along cp: {', '.join(ALGORITHMS)} (default {AUTO_CONTEXT})")
    add(
        "--dispatch",
        metavar="NAME",
        help="tokens along ep: direct or hierarchical, perhaps with :int8 or :fp8 (direct)",
    )
    ahead = "a micro-batch's forward pass runs while tokens of another one's backward pass travel along ep"
    add("--overlap-expert-comm", action=argparse.BooleanOptionalAction, help=ahead)
    add = parser.add_argument_group("pipelines").add_argument
    add("--stages", type=int, metavar="P", help="ranks of a pipeline (default: all)")
    add("--virtual", type=int, metavar="V", help="model chunks on each stage (pp:interleaved)")
    turns = "ranks of each part of the model, which take turns, as in 2,1,1, or auto (pp:1f1b, pp:pipedream...)"
    add("--stage-ranks", metavar="RANKS", help=turns)
    add("--cuts", metavar="UNITS", help="first unit of each chunk and number of units, as in 0,2,5 (default: measured)")
    add("--memory", type=float, metavar="BYTES", help="memory of a stage, for pp:auto")
    add = parser.add_argument_group("parameter server (ps)").add_argument
    add("--servers", type=int, metavar="S", help="servers, which are the first ranks (default 1)")
    add("--consistency", metavar="RULE", help="bsp, async, or ssp:S for a staleness of at most S clocks (default bsp)")
    add("--replicas", type=int, metavar="K", help="servers with a copy of each parameter (default 1)")
    add("--slow", metavar="RANK:FACTOR", help="slow workers, for experiments: times as long, as in 2:5,3:1.5")
    add("--record", metavar="FILE", help="write the order of the servers' events into FILE.0, FILE.1, ...")
    add("--replay", metavar="FILE", help="repeat the recorded order of events")
    add = parser.add_argument_group("decentralised training").add_argument
    add("--tau", type=int, metavar="N", help="local, group: steps between averages (8, 10); sgp: delay of messages (0)")
    add(
        "--overlap",
        type=float,
        metavar="F",
        help="fraction of its share by which a rank also trains on the next ranks'",
    )
    add("--group", type=int, metavar="S", help="ranks of a group (default: square root of their number)")
    add("--clients", type=int, metavar="K", help="federated: clients, each with samples of its own (default 20)")
    add("--client-fraction", type=float, metavar="C", help="federated: fraction of them in a round (default 0.5)")
    add("--local-epochs", type=int, metavar="E", help="federated: passes of a client over its samples (default 5)")
    labels = "federated: runs of samples with one label of each client (default 2); 0 deals samples at random"
    add("--label-shards", type=int, metavar="N", help=labels)


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options of checkpoints, metrics, plot and trace, and of tests."""
    add = parser.add_argument_group("files").add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints")
    add("--every", type=int, metavar="N", help="steps between checkpoints (default: ten in all)")
    add("--keep", type=int, default=3, metavar="K", help="number of checkpoints to keep (default 3)")
    add("--overwrite", action="store_true", help="replace the checkpoints in --checkpoint, once a new one is complete")
    add("--resume", nargs="?", const=True, metavar="CHECKPOINT", help="continue from this checkpoint, or the newest")
    add("--test-every", type=int, metavar="N", help="steps between tests (default: an epoch, or ten in all)")
    add(
        "--test-samples",
        type=int,
        metavar="N",
        help="most samples of a test (default: all; 256 of a text before the end)",
    )
    add("--json", type=Path, metavar="FILE", help="metrics, a line per step and a summary")
    add("--plot", type=Path, metavar="FILE", help="learning curve as a picture")
    add("--trace", type=Path, metavar="FILE", help="trace of a few steps for ui.perfetto.dev")


MOST_THREADS = 1 << 16


def threads_error(args: argparse.Namespace) -> str | None:
    """Text if --threads is out of range; else None."""
    if args.threads is None or 1 <= args.threads <= MOST_THREADS:
        return None
    return f"--threads: expected {'1 or more' if args.threads < 1 else f'at most {MOST_THREADS}'}, found {args.threads}"


def argument_error(args: argparse.Namespace) -> str | None:
    for name in ("every", "keep", "test_every", "test_samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')}: expected 1 or more, found {value}"
    if problem := threads_error(args):
        return problem
    if args.resume is True and args.checkpoint is None:
        return "--resume: expected --checkpoint DIR with the checkpoints, or the name of one"
    return picture_error("--plot", args.plot)


def picture_error(option: str, path: Path | None) -> str | None:
    """Text if `picture_file` refuses the path of an option; else None."""
    try:
        if path is not None:
            picture_file(str(path))
    except argparse.ArgumentTypeError as error:
        return f"{option}: {error}"
    return None

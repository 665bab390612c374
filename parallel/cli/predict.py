"""Apply a trained model to inputs in a file, and write its scores, or values, to another.

chorus predict --checkpoint out/digits --data images.npy -o scores.npy
chorus predict -n 4 --checkpoint out/gpt --data tokens.npy -o scores.npy

Any checkpoint of `chorus train` will do, whatever layout wrote it. FILE.npy has an axis of samples first, and then the
shape of the samples of the training. Several ranks share the samples.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import check_writable
from collectives.cli import launcher
from collectives.cli.launcher import say
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.data.sampler import contiguous
from parallel.nn.models import MODELS
from parallel.nn.operator import Operator
from parallel.ptq.load_model import model_alone
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.validation import is_real


def parser() -> launcher.LauncherParser:
    result = launcher.LauncherParser(__doc__, usage="%(prog)s --checkpoint DIR --data FILE.npy --output FILE.npy")
    add = partial(result.add_argument, required=True, type=Path)
    add("--checkpoint", metavar="DIR", help="checkpoint of chorus train, or a folder: its newest")
    add("--data", metavar="FILE.npy", help="inputs")
    add("-o", "--output", metavar="FILE.npy", help="results, float32, with as many samples")
    return result


def read(path: Path) -> np.ndarray:
    """Array of a .npy file, mapped into memory; ValueError for another file."""
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"{path}: not a plain array (.npy): {error}") from error
    if not found.ndim or not len(found) or not is_real(found):
        about = f"{found.dtype} of shape {found.shape}"
        raise ValueError(f"{path}: expected numbers with an axis of samples first, found {about}")
    return found


def scores_of(model: Operator, x: np.ndarray, family: str, batch: int) -> np.ndarray:
    """Results for inputs, in batches; images without channels have one."""
    x = x[:, None] if family == "convnet" and x.ndim == 3 else x
    x = x if MODELS[family].is_text else x.astype(np.float32)
    return np.concatenate([model(x[start : start + batch]) for start in range(0, max(1, len(x)), batch)])


def save(path: Path, parts: list[np.ndarray]) -> None:
    """Write arrays, one after another along the axis of samples, to a file of exactly this name."""
    with path.open("wb") as file:
        np.save(file, np.concatenate(parts))


def predict(comm: Communicator, args: argparse.Namespace) -> None:
    """Load model and inputs, compute this rank's part, and write the results of all on rank 0. Collective."""
    settings, model = model_alone(comm, args.checkpoint)
    x = collective_call(comm, partial(read, args.data), "--data")
    collective_call(comm, partial(check_writable, args.output), "--output", root=0)
    mine, family = contiguous(len(x), comm.Get_rank(), comm.Get_size()), settings.model.partition(":")[0]
    part = x[mine.start : mine.stop]
    compute = partial(scores_of, model, part, family, settings.batch)
    found = comm.gather(collective_call(comm, compute, f"{args.data} does not fit {settings.model}"), 0)
    write = partial(save, args.output, found or [])
    collective_call(comm, write, f"{args.output} was not written", OSError, root=0)
    say(f"{settings.model}: {len(x)} samples, {args.output} written")


def main(argv: list[str] | None = None) -> int:
    """Predict; exit status 2 if a file cannot be used."""
    made = parser()
    args = made.parse_args(argv)
    try:
        predict(Communicator(MPI.COMM_WORLD), args)
    except (CheckpointError, ValueError, OSError) as error:
        made.error(str(error))
    return 0

"""Train a model on all ranks: digits, the text of Python's documentation, made-up tasks, or your own file.

mpirun -n 4 python scripts/train.py --data digits --model mlp
mpirun -n 2 python scripts/train.py --data pydoc --model gpt --checkpoint out/gpt --plot out/gpt.png
mpirun -n 4 python scripts/train.py --checkpoint out/gpt --resume --parallel zero3

What is not said comes from the checkpoint that is resumed, or else from a recipe for the data and the model. Ctrl-C
writes a checkpoint, where --checkpoint says where to.
"""

from __future__ import annotations

import signal

from benchlib import siblings

if __name__ == "__main__":  # before the slow imports, among them MPI's start
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is to end this quietly
    siblings.need_each_other()

import argparse
import fcntl
import os
import resource
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from benchlib import launch, traces
from benchlib.last_word import LastWord
from benchlib.launch import say
from benchlib.metrics import Metrics
from benchlib.room import PICTURES, room_for_file, room_for_files
from benchlib.training import (
    REFRESH,
    Unwritten,
    loss_in_words,
    score_in_words,
    short,
    speed_in_words,
    status,
    title_of,
    tokens,
    unit,
    write_trace,
)
from collectives import Communicator
from collectives.errors import OutOfMemory
from collectives.selection.timing_file import machine as machine_in_words
from parallel import settings
from parallel.data import datasets
from parallel.runtime import resources as machine
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError, all_in, latest, name_of, step_of
from parallel.grad_compression import AUTO, COMPRESSORS, NONE
from parallel.runtime.consistency_check import Diverged, StepFailed
from parallel.runtime.signals import Interrupt
from parallel.runtime.throughput import Meter
from parallel.nn.models import MODELS
from parallel.nn.workspace import keep_freed_memory
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.precision import PRECISIONS
from parallel.runtime.collective_errors import together
from parallel.trainer.trainer import Training, changed, settings_in
from parallel.ways import WAYS

LOOKS = 10
"""How often in a training it is tested and saved, if nobody says how often."""

TEST_SAMPLES = 256
"""Windows of text that are tested on the way; at the end it is all of them."""

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Of the size of a process, as the system tells it."""

PATIENCE = 3.0
"""Seconds in which a training that has just been killed may still be there."""

TRACED = range(2, 7)
"""Steps of this run that are in its trace."""


def parser() -> launch.Parser:
    """The command line."""
    look: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    made = launch.Parser(usage="%(prog)s [options]", **look)
    sizes = "; ".join(f"{name}: {', '.join(family.sizes)}" for name, family in MODELS.items())

    add = made.add_argument_group("what is learned").add_argument
    add("--data", metavar="NAME", help=f"{', '.join(datasets.TASKS)}, a text file, or an .npz file (default digits)")
    add("--model", metavar="NAME", help=f"{', '.join(MODELS)}, or with a size as in gpt:tiny ({sizes})")
    add("--length", type=int, metavar="N", help="of sequences")
    add("--dropout", type=float, metavar="P", help="share of values that are dropped in training")
    add("--seed", type=int, metavar="N", help="of first values, order of samples, and dropout (default 0)")

    add = made.add_argument_group("how it is learned").add_argument
    add("--optimizer", choices=list(OPTIMIZERS), help="default adamw")
    add("--rate", type=float, metavar="R", help="highest learning rate")
    add("--warm-up", type=int, metavar="N", help="steps until it is reached; then it falls to a tenth")
    add("--decay", type=float, metavar="D", help="weight decay")
    add("--momentum", type=float, metavar="M", help="of sgd")
    add("--beta2", type=float, metavar="B", help="decay of the second moment, of all others")
    add("--clip", type=float, metavar="NORM", help="limit of the gradient's norm, 0 for none")
    add("--batch", type=int, metavar="N", help="samples of a step, over all ranks")
    several = made.add_mutually_exclusive_group().add_argument
    several("--accumulate", type=int, metavar="K", help="micro-batches of each rank in a step (default 1)")
    several("--micro-batch", type=int, metavar="N", help="samples that go through the model at once")
    several("--microbatches", type=int, metavar="M", help="micro-batches of a step in each pipeline (default 8)")
    ends = made.add_mutually_exclusive_group().add_argument
    ends("--epochs", type=float, metavar="N", help="passes over the data")
    ends("--steps", type=int, metavar="N", help="steps in all, those before a restart among them")

    add = made.add_argument_group("where and how it runs").add_argument
    add("--parallel", dest="layout", metavar="LAYOUT", help=f"what each rank does: {', '.join(WAYS)} (default dp)")
    add("--stages", type=int, metavar="P", help="ranks of a pipeline (default: all)")
    add("--virtual", type=int, metavar="V", help="parts of the model on each stage, of pp:interleaved")
    add("--mesh", metavar="AXES", help="stages and their replicas, as in dp=2,pp=2 or zero1=2,pp=4; neighbours last")
    add("--cuts", metavar="UNITS", help="where parts begin and the model ends, as in 0,2,5 (default: as measured)")
    add("--memory", type=float, metavar="BYTES", help="that a stage may take, for pp:auto")
    add("--servers", type=int, metavar="S", help="of ps: how many ranks are servers, the first ones (default 1)")
    add("--consistency", metavar="RULE", help="of ps: bsp, async, or ssp:S for at most S clocks apart (default bsp)")
    add("--replicas", type=int, metavar="K", help="of ps: servers that have a copy of each parameter (default 1)")
    add("--slow", metavar="RANK:FACTOR", help="of ps: workers that take so many times as long, as in 2:5,3:1.5")
    add("--record", metavar="FILE", help="of ps: keep the order in which servers did what, in FILE.0 and so on")
    add("--replay", metavar="FILE", help="of ps: do it again in that order")
    taus = "of local and group: steps from mean to mean (8, 10); of sgp: how late messages may be (0)"
    add("--tau", type=int, metavar="N", help=taus)
    add("--group", type=int, metavar="S", help="of group: ranks that meet in a step (default: the root of all)")
    add("--precision", choices=list(PRECISIONS), help="of weights and activations (default fp32)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    either: Any = {"action": argparse.BooleanOptionalAction, "default": None}
    add("--recompute", **either, help="forget activations, and compute them again")
    add("--reproducible", **either, help="the same digits on any number of ranks, in any layout")
    add("--pool", **either, help="ranks draw micro-batches as they get ready, in the layouts dp... and zero1")
    add("--bucket-bytes", type=int, metavar="N", help="of a bucket of gradients (default 4 MiB)")
    add("--compress", metavar="HOW", help=f"gradients between ranks: {', '.join(COMPRESSORS)}, {AUTO}, {NONE}")
    add("--check-every", type=int, metavar="N", help="compare parameters over the ranks every N steps")
    add("--threads", type=int, metavar="N", help="of BLAS, for each rank (default: cores of the node over its ranks)")

    add = made.add_argument_group("what is kept").add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="where checkpoints go")
    add("--every", type=int, metavar="N", help="steps from checkpoint to checkpoint (default: ten in all)")
    add("--keep", type=int, default=3, metavar="K", help="how many of them are kept (default 3)")
    add("--resume", nargs="?", const=True, metavar="CHECKPOINT", help="go on from the newest, or from this one")
    add("--test-every", type=int, metavar="N", help="steps from test to test (default: an epoch, or ten in all)")
    add("--json", type=Path, metavar="FILE", help="metrics, a line for each step; the last one sums up")
    add("--plot", type=Path, metavar="FILE", help="the curve as a picture")
    add("--trace", type=Path, metavar="FILE", help="a few steps for ui.perfetto.dev")
    return made


def refuse(args: argparse.Namespace) -> str | None:
    """What is wrong with arguments that are no settings."""
    for name, least in (("every", 1), ("keep", 1), ("test_every", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            return f"--{name.replace('_', '-')}: expected {least} or more, found {value}"
    if args.resume is True and args.checkpoint is None:
        return "--resume: say where the checkpoints are, with --checkpoint DIR, or name one"
    if args.plot is not None:
        if args.plot.suffix not in PICTURES:
            return f"--plot: expected a name that ends in one of {', '.join(PICTURES)}, found {args.plot}"
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return "--plot needs matplotlib: pip install 'chorus-mpi[plot]'"
    return None


def resumed(comm: Communicator, args: argparse.Namespace) -> Checkpoint | None:
    """The checkpoint to go on from. Nothing that is in --checkpoint may be overwritten by another training."""
    there = together(comm, lambda: all_in(args.checkpoint) if args.checkpoint else [], "--checkpoint", root=0)
    if args.resume is None:
        if there:
            raise CheckpointError(f"{args.checkpoint} has checkpoints already: --resume goes on from the newest")
        return None
    path = latest(comm, args.checkpoint) if args.resume is True else Path(args.resume)
    if path is None:
        raise CheckpointError(f"{args.checkpoint} has no checkpoints to resume")
    found = Checkpoint(comm, path)
    if there and step_of(there[-1]) > found.step:
        raise CheckpointError(f"{there[-1]} is newer than {path}: a training from there needs another --checkpoint")
    return found


def begin(comm: Communicator, args: argparse.Namespace) -> Training:
    """Everything up to the first step; whatever is wrong is found here, on all ranks, before a file is touched."""
    found = resumed(comm, args)
    said = {name: getattr(args, name) for name in settings.NAMES}
    chosen = settings.complete(said, settings_in(found) if found else None)
    keep_freed_memory()
    threads = args.threads or (1 if chosen.reproducible else machine.cores_per_rank(comm))
    together(comm, lambda: machine.limit_threads(threads), "--threads")
    training = Training(chosen, comm, device=args.device, trace=args.trace is not None, mortal=siblings.mortal())
    if found is not None:
        training.resume(found)
    for option, look in KEPT.items():
        if path := getattr(args, option):
            together(comm, partial(look, path), f"--{option}", root=0)
    if found is not None:
        say(f"resumed {found.path}: {found.step} steps were made, on {found.facts.get('ranks')} ranks")
        for name, (there, here) in changed(found, chosen).items():
            say(f"  {name} was {there}, and is {here} now")
    parameters = sum(place.size for place in training.engine.flat.places)
    batch = f"batch {chosen.batch} in micro-batches of {training.sampler.micro_batch}"
    say(f"{training.task.name}: {len(training.task.train)} samples, {len(training.task.test)} for the test")
    say(f"{chosen.model}: {short(parameters)} parameters, {chosen.precision}, {chosen.optimizer}, {batch}")
    settled = training.settled
    parts = f", parts begin at units {settled.cuts.rpartition(',')[0]}" if settled.cuts else ""
    say(f"{settled.layout} on {ranks_in_words(comm.Get_size(), threads)}{parts}, {training.steps} steps")
    for remark in training.engine.remarks:
        say(remark)
    return training


def room_for_checkpoints(folder: Path) -> None:
    """See whether a folder can be written into, and hold it alone until this process ends; raise OSError if not."""
    room_for_files(folder)
    descriptor, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OSError(f"another training writes into {folder}") from None
            time.sleep(0.1)


KEPT = {"checkpoint": room_for_checkpoints, "json": room_for_file, "plot": room_for_file, "trace": room_for_file}
"""Options that say where something is kept, and how to find out in time whether it can be."""


def ranks_in_words(ranks: int, threads: int) -> str:
    """1 rank of 2 threads, 4 ranks of 1 thread, ..."""
    return f"{ranks} rank{'s' * (ranks != 1)} of {threads} thread{'s' * (threads != 1)}"


def intervals(args: argparse.Namespace, training: Training) -> tuple[int, int]:
    """Steps from test to test, and from checkpoint to checkpoint."""
    tenth = max(1, training.steps // LOOKS)
    epoch = training.sampler.steps_per_epoch
    return args.test_every or (epoch if training.settings.steps is None else tenth), args.every or tenth


def train(comm: Communicator, args: argparse.Namespace, training: Training) -> int:
    """The loop, and what is shown and kept of it: the exit status."""
    began = time.perf_counter()
    root = training.speaks
    if training.mortal:  # nobody waits for who may be dead
        siblings.part()
        launch.speak_when(lambda: training.speaks)
        comm = Communicator(MPI.COMM_SELF)
    meter = Meter(training.flops_per_sample, machine.peak(comm, args.device))
    metrics = together(comm, lambda: Metrics(args.json if root else None, training.done), "--json", Unwritten)
    each, every = intervals(args, training)
    saved, events, shown = training.done, [], ""
    bar, word = launch.progress(training.steps, training.task.name, "step"), LastWord(root and not training.mortal)
    with bar, word, Interrupt() as interrupt:
        word.would_be(last_word(args, saved))
        bar.update(training.done)
        for made, record in enumerate(training.run(lambda: interrupt.seen)):
            meter.add(record)
            done, line = training.done, record.line()
            if done % each == 0 and done < training.steps and not record.report.stop:
                score = training.score(TEST_SAMPLES * (training.task.kind == "bytes") or None)
                line |= score.line()
                shown = f", {score_in_words(score)}"
            intact = metrics.problem is None
            metrics.add(line)
            if intact and metrics.problem:
                say(f"{args.json} ends at step {done - 1}: {metrics.problem}")
            if made in TRACED:
                events += training.engine.events
            training.engine.events.clear()
            if args.checkpoint and done % every == 0:
                saved = _step_saved(training, args)
                word.would_be(last_word(args, saved))
            if meter.window_seconds > REFRESH:
                words = loss_in_words(training, record.report.loss), speed_in_words(training, meter.recent())
                bar.set_postfix_str(f"{words[0]}{shown}, {words[1]}", refresh=False)
            bar.update()
        if args.checkpoint and training.done > saved:
            saved = _step_saved(training, args)
        if code := status(comm, interrupt):
            where = f"; --resume goes on from {args.checkpoint}" if args.checkpoint else "; no --checkpoint keeps it"
            say(f"ended by {signal.Signals(code - 128).name} after step {training.done}{where}")
            return code

    score, speed = training.score(), meter.overall(comm)
    final = {"final": True, "step": training.done, "loss": metrics.lines[-1]["loss"] if metrics.lines else None}
    final |= {**score.line(), f"{unit(training)}_per_s": speed.samples_per_s * tokens(training), "mfu": speed.mfu}
    final["updates"] = training.engine.updates
    final |= {"communication_share": speed.communication_share, **memory(comm, training)}
    ranks = MPI.COMM_WORLD.Get_size()
    final |= {"seconds": time.perf_counter() - began, "ranks": ranks, "settings": asdict(training.settings)}
    metrics.add(final)
    metrics.close()
    if args.json and training.speaks and not root:  # who spoke first is dead
        together(comm, partial(metrics.copy, args.json), "--json", Unwritten)
    spent = f"{training.done} steps and {final['seconds']:.1f} s"
    say(f"{score_in_words(score)} after {spent}; {speed_in_words(training, speed)}")
    if args.checkpoint:
        say(f"checkpoints are in {args.checkpoint}")
    if training.mortal and not training.speaks:
        return 0
    if args.plot:
        together(comm, lambda: draw(args.plot, metrics, training), f"{args.plot} was not drawn", Unwritten, root=0)
        say(f"{args.plot} drawn")
    if args.trace:
        write_trace(args.trace, comm, events, traces.offset(comm), settings=str(asdict(training.settings)))
    together(comm, metrics.complete, f"{args.json} is not complete", Unwritten, root=0)
    return 0


def last_word(args: argparse.Namespace, saved: int) -> str:
    """What to say if all ranks are killed, as most launchers do when one of them dies."""
    if args.checkpoint and saved:
        kept = f"its last checkpoint is {args.checkpoint / name_of(saved)}; --resume goes on from there"
    else:
        kept = "no checkpoint keeps it"
    return f"train.py: the training was killed, or one of its ranks was: {kept}"


def draw(path: Path, metrics: Metrics, training: Training) -> None:
    """The curve as a picture."""
    from benchlib.plots import plot_learning

    plot_learning(path, metrics.lines, title_of(training), machine_in_words())


def _step_saved(training: Training, args: argparse.Namespace) -> int:
    training.save(args.checkpoint, keep=args.keep)
    return training.done


def memory(comm: Communicator, training: Training) -> dict[str, int]:
    """Bytes of the rank that needs most: what the ledger knows of, and of the whole process. Collective."""
    ledger = training.engine.ledger
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    known = sum(ledger.allocated.values()) + ledger.work
    return {"peak_bytes": int(comm.allreduce(known, MPI.MAX)), "resident_bytes": int(comm.allreduce(resident, MPI.MAX))}


def main(argv: list[str] | None = None) -> int:
    """Train; 1 if it came to no good end, 128 and the signal's number if somebody ended it."""
    made = parser()
    args = made.parse_args(argv)
    if problem := refuse(args):
        made.error(problem)
    comm = Communicator(MPI.COMM_WORLD)
    try:
        training = begin(comm, args)
    except (CheckpointError, OutOfMemory, ValueError) as error:
        made.error(str(error))
    with training:
        try:
            code = train(comm, args, training)
        except (CheckpointError, StepFailed, Diverged, Unwritten) as error:
            told = f"{made.prog}: error: {error}"
            if training.mortal and not training.speaks and isinstance(error, StepFailed) and not error.elsewhere:
                print(told, file=sys.stderr)  # nobody else knows
            say(told)
            code = 1
    if training.mortal:
        launch.leave(code)
    return code


if __name__ == "__main__":
    launch.run(main)

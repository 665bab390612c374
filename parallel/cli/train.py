"""Train a model on all ranks: digits, the text of Python's documentation, made-up tasks, or your own file.

chorus train -n 4 --data digits --model mlp
chorus train -n 2 --data pydoc --model gpt --checkpoint out/gpt --plot out/gpt.png
chorus train -n 4 --checkpoint out/gpt --resume --layout zero3

Options that are not given come from the resumed checkpoint, else from defaults for the data and the model. Ctrl-C ends
a training with a checkpoint, if --checkpoint names a folder.
"""

import argparse
import contextlib
import fcntl
import os
import sys
import time
from functools import partial
from pathlib import Path

from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import check_folder, check_writable
from collectives.cli import launcher
from collectives.cli.launcher import say
from collectives.errors import OutOfMemory, PeerFailed
from collectives.units import short
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError, all_in, latest
from parallel.checkpoint.step_folders import origin_of, step_of
from parallel.cli import watchdog
from parallel.cli.batch_job import BatchJob, cpus_of, find_job
from parallel.cli.reports.metrics import check_tensorboard
from parallel.cli.reports.training_output import OutputError
from parallel.cli.restarts import add_survive, survive_error
from parallel.cli.start_up import compilation_notice
from parallel.cli.survivors import Survivors
from parallel.cli.train_arguments import add_files, add_settings, argument_error
from parallel.cli.train_run import train
from parallel.engine import settings
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.consistency_check import ParameterMismatch, RankLeft, StepFailed
from parallel.runtime.vector_memory import keep_freed_memory, namespace
from parallel.trainer.recipes import complete
from parallel.trainer.state_keeper import StateKeeper
from parallel.trainer.trainer import Training, TrainingPlan, changed, settings_in

USUAL = ("data", "model", "layout", "mesh", "batch", "epochs", "steps", "rate", "checkpoint", "resume")
"""Options in --help. --help-all has the others."""

KEPT = (*settings.MESHES, "ps")
"""Layouts whose states can be kept in memory."""

LOCK_SECONDS = 3.0  # longest wait for the lock of a training that is just ending


def job_of(comm: Communicator) -> BatchJob | None:
    """Job of the ranks, as rank 0 finds it. Collective."""
    found: BatchJob | None = comm.bcast(find_job(os.environ) if comm.Get_rank() == 0 else None)
    return found


def resumed(comm: Communicator, args: argparse.Namespace, is_restart: bool) -> Checkpoint | None:
    """Verified checkpoint to resume, or None. CheckpointError if damaged. Collective.

    Without --overwrite also if --checkpoint has others that are newer, or of another run. A training that is started
    again goes on from the newest one, if there is any.
    """
    present = collective_call(comm, lambda: all_in(args.checkpoint) if args.checkpoint else [], "--checkpoint", root=0)
    # a restart repeats the first command, whose --resume may be older than its own checkpoints, or missing
    if is_restart and not args.overwrite and (present or args.resume is True):
        args.resume = True if present else None
    if args.resume is None:
        if present and not args.overwrite:
            advice = "--resume goes on from the newest, --overwrite replaces them"
            raise CheckpointError(f"{args.checkpoint} has checkpoints already: {advice}")
        return None
    path = latest(comm, args.checkpoint) if args.resume is True else Path(args.resume)
    if path is None:
        raise CheckpointError(f"{args.checkpoint} has no checkpoints to resume")
    try:
        found = Checkpoint(comm, path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{intact_text(comm, present, path)}") from error
    if present and not args.overwrite:
        expect_newest(comm, found, present[-1])
    return found


def expect_newest(comm: Communicator, found: Checkpoint, newest: Path) -> None:
    """Raise CheckpointError if a training from `found` would replace the `newest` in --checkpoint. Collective."""
    advice = "a training from there needs another --checkpoint, or --overwrite"
    origin = collective_call(comm, lambda: origin_of(newest), "--checkpoint", root=0)
    if origin is not None and origin.run != found.run:
        raise CheckpointError(f"{newest} is of another run than {found.path}: {advice}")
    if step_of(newest) > found.step:
        raise CheckpointError(f"{newest} is newer than {found.path}: {advice}")


def intact_text(comm: Communicator, present: list[Path], damaged: Path) -> str:
    """Hint for an error message: newest intact checkpoint in `present` besides `damaged`. Empty if none. Collective."""
    for path in reversed(present):
        if path != damaged:
            with contextlib.suppress(CheckpointError):
                Checkpoint(comm, path)
                return f"; the newest sound one is {path}: with what is newer moved away, --resume goes on from it"
    return ""


def is_restarted(job: BatchJob | None) -> bool:
    """True in a job that its scheduler has started again."""
    return job is not None and job.restarts > 0


def keeper_of(comm: Communicator, args: argparse.Namespace, folder: Path | None) -> StateKeeper | None:
    """Keeper of the state with --survive, in `folder` unless a launcher has named one, else None. Collective."""
    if args.survive is None:
        return None
    place, attempt = args.survive_in or (str(folder), "0")
    return StateKeeper(comm, Path(place), int(attempt), args.survive, args.survive_every)


def begin(
    comm: Communicator, args: argparse.Namespace, job: BatchJob | None, keeper: StateKeeper | None = None
) -> Training:
    """Set up a new or resumed training, lock or check its output files, print a description. Collective, errors too."""
    if job is not None:
        say(job.title(comm.Get_size(), resources.node_count(comm)))
    kept = keeper.newest() if keeper else None
    found = kept or resumed(comm, args, is_restarted(job) or (keeper is not None and keeper.attempt > 0))
    given = {name: getattr(args, name, None) for name in settings.OPTIONS}
    given |= {"trace": args.trace is not None, "fault_tolerant": watchdog.fault_tolerant() and keeper is None}
    chosen = complete(given, settings_in(found) if found else None)
    if keeper is not None and (layout := chosen.layout.partition(":")[0]) not in KEPT:
        raise ValueError(f"--survive: expected --layout {', '.join(KEPT)}, found {layout}")
    limit_threads(comm, args, chosen)
    # a kept state fits no other division of the tensors: what was measured then is not measured again
    training = Training(chosen, comm, kept.resolved() if kept else None)
    if found is not None:
        training.resume(found)
    for option, check in FILE_CHECKS.items():
        if path := getattr(args, option):
            collective_call(comm, partial(check, path), f"--{option}", root=0)
    if found is not None:
        say(f"resumed {found.path}: {found.step} steps were made, on {found.facts.get('ranks')} ranks")
    if keeper is not None:  # after resume(): it may remove the states
        keeper.begin(training)
        if keeper.can_shrink:
            watchdog.stop()
        elif args.survive_in is None:
            text = "expected --layout dp without a mesh and compression, or chorus train -n N"
            raise ValueError(f"--survive: {text}, found {training.settings.layout}")
    if found is not None:
        for name, (there, here) in changed(found, chosen).items():
            say(f"  {name} was {there}, and is {here} now")
    describe(comm, args, training)
    return training


def limit_threads(comm: Communicator, args: argparse.Namespace, chosen: settings.Settings) -> None:
    """Set `args.threads`, if None, and with it the number of BLAS threads. Also calls `keep_freed_memory`.

    Collective.
    """
    keep_freed_memory()
    usual = 1 if chosen.reproducible else resources.cores_per_rank(comm, cpus_of(os.environ))
    threads = args.threads = args.threads or usual
    collective_call(comm, lambda: resources.limit_threads(threads), "--threads")


def describe(comm: Communicator, args: argparse.Namespace, plan: TrainingPlan) -> None:
    """Print a training's data, model, batch size, layout and remarks."""
    chosen, resolved, ranks = plan.settings, plan.resolved, comm.Get_size()
    batch = f"batch {chosen.batch} in micro-batches of {plan.sampler.micro_batch}"
    say(f"{plan.task.name}: {len(plan.task.train)} samples, {len(plan.task.test)} for the test")
    say(f"{chosen.model}: {short(plan.parameters)} parameters, {chosen.precision}, {chosen.optimizer}, {batch}")
    parts = f", parts begin at units {resolved.cuts.rpartition(',')[0]}" if resolved.cuts else ""
    parts += f", of {resolved.stage_ranks} ranks" if resolved.stage_ranks else ""
    threads = f"{args.threads} thread{'s' * (args.threads != 1)}"
    say(f"{resolved.layout} on {ranks} rank{'s' * (ranks != 1)} of {threads}{parts}, {plan.steps} steps")
    if chosen.device == "cuda" and comm.Get_rank() == 0 and (notice := compilation_notice(os.environ)):
        print(notice, file=sys.stderr, flush=True)
    crowd = resources.crowd(comm, args.threads)
    for remark in (*plan.remarks, *([crowd] if crowd else [])):
        say(remark)


_locks: list[int] = []


def lock_checkpoints(folder: Path) -> None:
    """Create and lock a checkpoint folder until this process ends. OSError if not writable, or locked by another."""
    check_folder(folder)
    while _locks:  # of the training before a death
        os.close(_locks.pop())
    descriptor, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _locks.append(descriptor)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OSError(f"another training writes into {folder}") from None
            time.sleep(0.1)


FILE_CHECKS = {
    "checkpoint": lock_checkpoints,
    "tensorboard": check_tensorboard,
    **dict.fromkeys(("json", "csv", "plot", "trace"), check_writable),
}
"""Checks of the files to write, by option."""


def main(argv: list[str] | None = None) -> int:
    """Train. Exit status 2 if the training cannot begin, 1 if it fails, 128 + signal number after a signal."""
    parser = launcher.LauncherParser(__doc__, USUAL, usage="%(prog)s [options]")
    add_settings(parser)
    add_files(parser)
    add_survive(parser)
    args = parser.parse_args(argv)
    if problem := argument_error(args) or survive_error(args):
        parser.error(problem)
    with contextlib.suppress(ValueError):  # raised again on all ranks
        namespace(args.device or "cpu")  # the communicator looks for GPUs if CuPy is imported
    survivors = Survivors() if args.survive is not None and watchdog.fault_tolerant() else None
    comm = survivors.comm if survivors else Communicator(MPI.COMM_WORLD)
    job = job_of(comm)
    folder = survivors.make_folder() if survivors and args.survive_in is None else None
    keeper = keeper_of(comm, args, folder)
    with survivors or contextlib.nullcontext(), keeper or contextlib.nullcontext():
        while True:
            try:
                code = run(comm, parser, args, job, keeper)
                break
            except (StepFailed, PeerFailed, RankLeft, MPI.Exception) as error:
                if survivors is None or keeper is None or not keeper.can_shrink or not survivors.shrink():
                    if not isinstance(error, StepFailed):
                        raise
                    say(f"{parser.prog}: error: {error}")
                    code = 1
                    break
                comm = survivors.comm
                keeper.shrink(comm)
                say(f"a rank has died: {comm.Get_size()} ranks go on")
    if survivors is not None:  # MPI_Finalize may wait for dead ranks
        launcher.exit_now(code)
    return code


def run(
    comm: Communicator,
    parser: launcher.LauncherParser,
    args: argparse.Namespace,
    job: BatchJob | None,
    keeper: StateKeeper | None,
) -> int:
    """Begin or resume a training, and run it. Returns the exit status. Raises after a death if ranks survive it."""
    try:
        training = begin(comm, args, job, keeper)
    except (CheckpointError, OutOfMemory, ValueError) as error:
        parser.error(str(error))
    with training:
        try:
            code = train(comm, args, training, job, keeper)
        except (CheckpointError, StepFailed, ParameterMismatch, OutputError) as error:
            if keeper is not None and watchdog.fault_tolerant() and isinstance(error, StepFailed):
                raise
            text = f"{parser.prog}: error: {error}"
            alone = training.fault_tolerant and not training.is_reporter
            if alone and isinstance(error, StepFailed) and not error.elsewhere:
                print(text, file=sys.stderr)  # the reporter has no error
            say(text)
            code = 1
            if keeper is not None:
                keeper.problem = error
    if training.fault_tolerant:
        launcher.exit_now(code)
    return code

"""Train a model on all ranks: digits, the text of Python's documentation, made-up tasks, or your own file.

chorus train -n 4 --data digits --model mlp
chorus train -n 2 --data pydoc --model gpt --checkpoint out/gpt --plot out/gpt.png
chorus train -n 4 --checkpoint out/gpt --resume --parallel zero3

Options that are not given come from the resumed checkpoint, else from defaults for the data and the model. Ctrl-C ends
a training with a checkpoint, if --checkpoint names a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark import traces
from collectives.cli import launcher as launch
from collectives.cli.exit_notice import ExitNotice
from collectives.cli.launcher import say
from collectives.cli.writable_files import check_folder, check_writable
from collectives.errors import OutOfMemory
from collectives.selection.timing_file import machine as machine_in_words
from parallel.benchmark.metrics import Metrics
from parallel.benchmark.training_output import (
    REFRESH,
    OutputError,
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
from parallel.checkpoint.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    NotRemoved,
    all_in,
    latest,
    name_of,
    step_of,
)
from parallel.cli import watchdog
from parallel.cli.train_arguments import add_files, add_settings, refuse
from parallel.engine import settings
from parallel.nn.workspace import keep_freed_memory
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.consistency_check import ParameterMismatch, StepFailed
from parallel.runtime.profiler import ProfilerEvent
from parallel.runtime.signals import InterruptFlag
from parallel.runtime.throughput import Throughput, ThroughputMeter
from parallel.trainer.trainer import EvalScore, StepRecord, Training, TrainingPlan, changed, settings_in

LOOKS = 10
"""Default number of tests and checkpoints of a training."""

TEST_SAMPLES = 256
"""Windows of text in a test during the training; the final one takes all."""

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of `ru_maxrss`."""

PATIENCE = 3.0
"""Seconds to wait for the lock of a training that is just ending."""

TRACED = range(2, 7)
"""Steps of this run in its trace."""


def resumed(comm: Communicator, args: argparse.Namespace) -> Checkpoint | None:
    """Checkpoint to continue from, or None. Refuses to replace those of another training."""
    there = collective_call(comm, lambda: all_in(args.checkpoint) if args.checkpoint else [], "--checkpoint", root=0)
    if args.resume is None:
        if there:
            raise CheckpointError(f"{args.checkpoint} has checkpoints already: --resume goes on from the newest")
        return None
    path = latest(comm, args.checkpoint) if args.resume is True else Path(args.resume)
    if path is None:
        raise CheckpointError(f"{args.checkpoint} has no checkpoints to resume")
    try:
        found = Checkpoint(comm, path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{sound_one(comm, there, path)}") from error
    if there and step_of(there[-1]) > found.step:
        raise CheckpointError(f"{there[-1]} is newer than {path}: a training from there needs another --checkpoint")
    return found


def sound_one(comm: Communicator, there: list[Path], damaged: Path) -> str:
    """Text that names the newest intact checkpoint, empty if there is none. Collective."""
    for path in reversed(there):
        if path != damaged:
            with contextlib.suppress(CheckpointError):
                Checkpoint(comm, path)
                return f"; the newest sound one is {path}: with what is newer moved away, --resume goes on from it"
    return ""


def begin(comm: Communicator, args: argparse.Namespace) -> Training:
    """Training before its first step. Errors are raised on all ranks, before a file is touched."""
    found = resumed(comm, args)
    given = {name: getattr(args, name, None) for name in settings.NAMES}
    given |= {"trace": args.trace is not None, "fault_tolerant": watchdog.fault_tolerant()}
    chosen = settings.complete(given, settings_in(found) if found else None)
    limit_threads(comm, args, chosen)
    training = Training(chosen, comm)
    if found is not None:
        training.resume(found)
    for option, check in FILE_CHECKS.items():
        if path := getattr(args, option):
            collective_call(comm, partial(check, path), f"--{option}", root=0)
    if found is not None:
        say(f"resumed {found.path}: {found.step} steps were made, on {found.facts.get('ranks')} ranks")
        for name, (there, here) in changed(found, chosen).items():
            say(f"  {name} was {there}, and is {here} now")
    describe(comm, args, training)
    for remark in training.remarks:
        say(remark)
    return training


def limit_threads(comm: Communicator, args: argparse.Namespace, chosen: settings.Settings) -> None:
    """Set the number of BLAS threads, and `args.threads` to it. Collective."""
    keep_freed_memory()
    threads = args.threads = args.threads or (1 if chosen.reproducible else resources.cores_per_rank(comm))
    collective_call(comm, lambda: resources.limit_threads(threads), "--threads")


def describe(comm: Communicator, args: argparse.Namespace, plan: TrainingPlan) -> None:
    """Print data, model, batch and layout."""
    chosen, resolved = plan.settings, plan.resolved
    batch = f"batch {chosen.batch} in micro-batches of {plan.sampler.micro_batch}"
    say(f"{plan.task.name}: {len(plan.task.train)} samples, {len(plan.task.test)} for the test")
    say(f"{chosen.model}: {short(plan.parameters)} parameters, {chosen.precision}, {chosen.optimizer}, {batch}")
    parts = f", parts begin at units {resolved.cuts.rpartition(',')[0]}" if resolved.cuts else ""
    say(f"{resolved.layout} on {ranks_in_words(comm.Get_size(), args.threads)}{parts}, {plan.steps} steps")


def lock_checkpoints(folder: Path) -> None:
    """Lock a folder until this process ends; OSError if it is not writable, or locked by another training."""
    check_folder(folder)
    descriptor, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OSError(f"another training writes into {folder}") from None
            time.sleep(0.1)


FILE_CHECKS = {"checkpoint": lock_checkpoints, "json": check_writable, "plot": check_writable, "trace": check_writable}
"""Checks of the files to write, by option."""


def ranks_in_words(ranks: int, threads: int) -> str:
    """Number of ranks as text."""
    return f"{ranks} rank{'s' * (ranks != 1)} of {threads} thread{'s' * (threads != 1)}"


def intervals(args: argparse.Namespace, training: Training) -> tuple[int, int]:
    """Steps between two tests, and between two checkpoints."""
    tenth = max(1, training.steps // LOOKS)
    epoch = training.sampler.steps_per_epoch
    return args.test_every or (epoch if training.settings.steps is None else tenth), args.every or tenth


def train(comm: Communicator, args: argparse.Namespace, training: Training) -> int:
    """Train, show and write: the exit status. Collective."""
    run = TrainingRun(comm, args, training)
    return run.steps() or run.finish()


class TrainingRun:
    """The loop over the steps, with its output.

    Attributes
    ----------
    reporter : bool
        True if this rank reported progress at the start. In a fault-tolerant training another one may do so at the end.
    """

    def __init__(self, comm: Communicator, args: argparse.Namespace, training: Training):
        self._args, self._training = args, training
        self._began = time.perf_counter()
        self.reporter = training.is_reporter
        self._meter = ThroughputMeter(
            training.flops_per_sample, resources.peak_flops(comm, args.device, threads=args.threads)
        )
        if training.fault_tolerant:  # from here on, no collective may wait for ranks that may be dead
            watchdog.stop()
            launch.print_when(lambda: training.is_reporter)
            comm = Communicator(MPI.COMM_SELF)
        self._comm = comm
        path = args.json if self.reporter else None
        self._metrics = collective_call(comm, lambda: Metrics(path, training.done), "--json", OutputError)
        self._checkpoints = CheckpointWriter(args, training)
        self._events: list[ProfilerEvent] = []
        self._test_text = ""

    def steps(self) -> int:
        """Make the steps: 0, or the exit status after a signal."""
        args, training, checkpoints = self._args, self._training, self._checkpoints
        each, every = intervals(args, training)
        bar = launch.progress(training.steps, training.task.name, "step")
        notice = ExitNotice(
            self.reporter and not training.fault_tolerant, launch.launcher_stream(2) if self.reporter else None
        )
        launcher = launch.launcher_stream(1) if self.reporter else None
        with bar, notice, InterruptFlag() as interrupt:
            notice.set_text(killed_text(args, checkpoints.step))
            bar.update(training.done)
            for made, record in enumerate(training.run(lambda: interrupt.seen)):
                self._record(record, each)
                if made in TRACED:
                    self._events += training.engine.events
                training.engine.events.clear()
                if args.checkpoint and training.done % every == 0:
                    checkpoints.save()
                    notice.set_text(killed_text(args, checkpoints.step))
                if self._meter.window_seconds > REFRESH:
                    loss, speed = loss_in_words(training, record.report.loss), self._meter.recent()
                    text = f"{loss}{self._test_text}, {speed_in_words(training, speed)}"
                    bar.set_postfix_str(text, refresh=False)
                bar.update()
            if args.checkpoint and training.done > checkpoints.tried:
                checkpoints.save()
            if code := status(self._comm, interrupt):
                text = (
                    f"ended by {signal.Signals(code - 128).name} after step {training.done}; {checkpoints.in_words()}"
                )
                if launcher is None:
                    say(text)
                else:
                    print(text, file=launcher, flush=True)
            return code

    def _record(self, record: StepRecord, each: int) -> None:
        """Add a step to meter and metrics, with a test after every `each` steps."""
        training, metrics = self._training, self._metrics
        self._meter.add(record)
        done, line = training.done, record.line()
        if done % each == 0 and done < training.steps and not record.report.stop:
            score = training.score(TEST_SAMPLES * (training.task.kind == "bytes") or None)
            line |= score.line()
            self._test_text = f", {score_in_words(score)}"
        intact = metrics.problem is None
        metrics.add(line)
        if intact and metrics.problem:
            say(f"warning: {self._args.json} has no line of step {done} yet: {metrics.problem}; the training goes on")

    def _summary(self, score: EvalScore, speed: Throughput) -> dict[str, Any]:
        """Last line of the metrics. Collective."""
        training, lines = self._training, self._metrics.lines
        return {
            "final": True,
            "step": training.done,
            "loss": lines[-1]["loss"] if lines else None,
            **score.line(),
            f"{unit(training)}_per_s": speed.samples_per_s * tokens(training),
            "mfu": speed.mfu,
            "updates": training.engine.updates,
            "communication_share": speed.communication_share,
            **memory(self._comm, training),
            "seconds": time.perf_counter() - self._began,
            "ranks": MPI.COMM_WORLD.Get_size(),
            "settings": asdict(training.settings),
        }

    def finish(self) -> int:
        """Test, and write all files: the exit status. Collective."""
        args, training, comm, metrics = self._args, self._training, self._comm, self._metrics
        checkpoints = self._checkpoints
        score, speed = final_score(training), self._meter.overall(comm)
        final = self._summary(score, speed)
        metrics.add(final)
        metrics.close()
        if args.json and training.is_reporter and not self.reporter:  # the first reporter is dead
            collective_call(comm, partial(metrics.copy, args.json), "--json", OutputError)
        if checkpoints.problem and not training.fault_tolerant:  # else other ranks may not try again with this one
            checkpoints.save()
        spent = f"{training.done} steps and {final['seconds']:.1f} s"
        say(f"{score_in_words(score)} after {spent}; {speed_in_words(training, speed)}")
        if args.checkpoint and not checkpoints.problem:
            say(f"checkpoints are in {args.checkpoint}")
        if training.fault_tolerant and not training.is_reporter:
            return 0
        if args.plot:
            picture = partial(draw, args.plot, metrics, training)
            collective_call(comm, picture, f"{args.plot} was not drawn", OutputError, root=0)
            say(f"{args.plot} drawn")
        if args.trace:
            write_trace(args.trace, comm, self._events, traces.offset(comm), settings=str(asdict(training.settings)))
        collective_call(comm, metrics.complete, f"{args.json} is not complete", OutputError, root=0)
        if checkpoints.problem:
            raise OutputError(f"no checkpoint has the end of the training; {checkpoints.in_words()}")
        return 0


def final_score(training: Training) -> EvalScore:
    """Score of the whole test set, with a progress bar. Collective."""
    with launch.progress(len(training.task.test), "test", "sample") as bar:
        return training.score(tell=lambda done, count: bar.update(done - bar.n))


class CheckpointWriter:
    """Checkpoints of this run. A training goes on after one that cannot be written.

    Attributes
    ----------
    step : int
        Of the newest checkpoint; the first step of this run if there is none.
    tried : int
        Step of the last attempt.
    problem : CheckpointError or None
        Error of the last attempt.
    """

    def __init__(self, args: argparse.Namespace, training: Training):
        self._args, self._training = args, training
        self.step = self.tried = training.done
        self.problem: CheckpointError | None = None

    def save(self) -> None:
        """Write a checkpoint, or warn. Collective."""
        self.tried, self.problem = self._training.done, None
        try:
            self._training.save(self._args.checkpoint, keep=self._args.keep)
        except NotRemoved as error:
            say(f"warning: {error}")
        except CheckpointError as error:
            self.problem = error
            say(f"warning: {error}; it is tried again at the next time")
            return
        self.step = self._training.done

    def in_words(self) -> str:
        """Text on how the training can be continued."""
        if not self._args.checkpoint:
            return "no --checkpoint keeps it"
        if not self.problem:
            return f"--resume goes on from {self._args.checkpoint}"
        return last_checkpoint(self._args, self.step)


def killed_text(args: argparse.Namespace, saved: int) -> str:
    """Message if all ranks are killed, as most launchers do when one of them dies."""
    return f"train.py: the training was killed, or one of its ranks was: {last_checkpoint(args, saved)}"


def last_checkpoint(args: argparse.Namespace, saved: int) -> str:
    """Text on the newest checkpoint."""
    if args.checkpoint and saved:
        return f"its last checkpoint is {args.checkpoint / name_of(saved)}; --resume goes on from there"
    return "no checkpoint keeps it"


def draw(path: Path, metrics: Metrics, training: Training) -> None:
    """Draw the learning curve."""
    from parallel.benchmark.training_plots import plot_learning

    plot_learning(path, metrics.lines, title_of(training), machine_in_words())


def memory(comm: Communicator, training: Training) -> dict[str, int]:
    """Most bytes of a rank: by its ledger, and of the whole process. Collective."""
    ledger = training.engine.ledger
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    known = sum(ledger.allocated.values()) + ledger.work
    return {"peak_bytes": int(comm.allreduce(known, MPI.MAX)), "resident_bytes": int(comm.allreduce(resident, MPI.MAX))}


def main(argv: list[str] | None = None) -> int:
    """Train; 1 after an error, 128 + its number after a signal."""
    made = launch.LauncherParser(__doc__, usage="%(prog)s [options]")
    add_settings(made)
    add_files(made)
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
        except (CheckpointError, StepFailed, ParameterMismatch, OutputError) as error:
            text = f"{made.prog}: error: {error}"
            alone = training.fault_tolerant and not training.is_reporter
            if alone and isinstance(error, StepFailed) and not error.elsewhere:
                print(text, file=sys.stderr)  # the reporter has no error
            say(text)
            code = 1
    if training.fault_tolerant:
        launch.exit_now(code)
    return code

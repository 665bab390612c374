"""Training loop of `chorus train`: progress bar, metrics file, checkpoints, learning curve and trace."""

import argparse
import math
import resource
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark import traces
from collectives.cli import launcher
from collectives.cli.exit_notice import ExitNotice
from collectives.cli.launcher import say
from collectives.selection.timing_file import machine
from collectives.units import format_time
from parallel.checkpoint.checkpoint_files import CheckpointError, NotRemoved, name_of
from parallel.cli import watchdog
from parallel.cli.batch_job import BatchJob, TimeLimit
from parallel.cli.reports.metrics import CsvMetrics, Metrics, TensorBoardMetrics
from parallel.cli.reports.training_output import (
    OutputError,
    format_loss,
    format_score,
    format_speed,
    title_of,
    tokens,
    unit,
    write_trace,
)
from parallel.optim.precision import PRECISIONS
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.profiler import ProfilerEvent
from parallel.runtime.signals import InterruptFlag
from parallel.runtime.throughput import Throughput, ThroughputMeter, slow_rank
from parallel.trainer.records import EvalScore, StepRecord
from parallel.trainer.state_keeper import StateKeeper
from parallel.trainer.trainer import Training

INTERVALS = 10  # default number of tests and checkpoints of a training
TEST_SAMPLES = 256  # windows of text in a test during the training; the final one takes all
TRACED = range(2, 7)  # steps of this run in its trace
REFRESH = 0.2  # seconds between two updates of the progress bar
LOGS = {"json": Metrics, "csv": CsvMetrics, "tensorboard": TensorBoardMetrics}  # by option
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of `ru_maxrss`


def train(
    comm: Communicator,
    args: argparse.Namespace,
    training: Training,
    job: BatchJob | None = None,
    keeper: StateKeeper | None = None,
) -> int:
    """Run a training to its end or a signal, with console output and all files. Returns the exit status. Collective.

    With --checkpoint it also ends before the time limit of `job`, as if SIGUSR1 had come. `keeper` keeps its state.
    """
    run = TrainingRun(comm, args, training, job, keeper)
    return run.steps() or run.finish()


class CheckpointWriter:
    """Writer of a training run's checkpoints. After a failed write, training continues. Construction is collective.

    Attributes
    ----------
    step : int
        Step of the newest checkpoint in --checkpoint. 0 if there is none, for example after a resume from another
        folder.
    tried : int
        Step of the last attempt.
    problem : CheckpointError or None
        Error of the last attempt.
    """

    def __init__(self, comm: Communicator, args: argparse.Namespace, training: Training):
        self._folder, self._training = args.checkpoint, training
        self._options = {"keep": args.keep, "keep_best": args.keep_best, "overwrite": args.overwrite}
        self.step = self.tried = collective_call(comm, self._resumed_step, "--checkpoint", CheckpointError, root=0)
        self.problem: CheckpointError | None = None

    def _resumed_step(self) -> int:
        done = self._training.done
        return done if self._folder and (self._folder / name_of(done)).is_dir() else 0

    def save(self, score: EvalScore | None = None) -> None:
        """Write a checkpoint of this step, with a score if it has been tested. Collective.

        After an error, print a warning and keep it in `problem`.
        """
        self.tried, self.problem = self._training.done, None
        try:
            loss = score.loss if score is not None and math.isfinite(score.loss) else None
            self._training.save(self._folder, score=loss, **self._options)
        except NotRemoved as error:
            say(f"warning: {error}")
        except CheckpointError as error:
            self.problem = error
            say(f"warning: {error}; it is tried again at the next time")
            return
        self.step = self._training.done

    def resume_text(self) -> str:
        """Text for the user after an interruption: how to resume, or that nothing was saved."""
        if not self._folder:
            return "no --checkpoint keeps it"
        if not self.problem:
            return f"--resume goes on from {self._folder}"
        return self._last_text()

    def killed_text(self) -> str:
        """Message to show if this training is killed: from which checkpoint it can be resumed."""
        return f"chorus train: the training was killed, or one of its ranks was: {self._last_text()}"

    def _last_text(self) -> str:
        if self._folder and self.step:
            return f"its last checkpoint is {self._folder / name_of(self.step)}; --resume goes on from there"
        return "no checkpoint keeps it"


class TrainingRun:
    """Loop over training steps, with progress bar, metrics, tests, checkpoints and plots."""

    def __init__(
        self,
        comm: Communicator,
        args: argparse.Namespace,
        training: Training,
        job: BatchJob | None,
        keeper: StateKeeper | None,
    ):
        self._args, self._training, self._keeper = args, training, keeper
        self._began = time.perf_counter()
        self._reporter = training.is_reporter  # in a fault-tolerant training another rank may report at the end
        storage = PRECISIONS[training.settings.precision].storage
        self._peak = peak = resources.peak_flops(comm, training.settings.device, dtype=storage, trains=training.trains)
        self._meter = ThroughputMeter((training.flops_per_sample, training.executed_flops_per_sample), peak)
        if training.fault_tolerant:  # from now on, no collective may wait for ranks that may be dead
            watchdog.stop()
            launcher.print_when(lambda: training.is_reporter)
            comm = Communicator(MPI.COMM_SELF)
        self._comm = comm
        self._limit = TimeLimit(job.end if job and args.checkpoint and self._reporter else None)
        self._is_limited = False
        self._logs = {
            name: collective_call(comm, partial(kind, self._path(name), training.done), f"--{name}", OutputError)
            for name, kind in LOGS.items()
        }
        self._metrics = self._logs["json"]
        self._checkpoints = CheckpointWriter(comm, args, training)
        self._events: list[ProfilerEvent] = []
        self._test_text = ""
        self._is_early = False  # ended by its tests
        self._nodes = comm.allgather(MPI.Get_processor_name())

    def _path(self, log: str) -> Path | None:
        """Path of a log, on the rank that reports."""
        path: Path | None = getattr(self._args, log)
        return path if self._reporter else None

    def steps(self) -> int:
        """Train to the last step, with tests and checkpoints. Returns 0, or 128 + number after a signal. Collective."""
        args, training, checkpoints = self._args, self._training, self._checkpoints
        tenth = max(1, training.steps // INTERVALS)
        test_every = args.test_every or (training.sampler.steps_per_epoch if training.settings.steps is None else tenth)
        save_every = args.every or tenth
        bar = launcher.progress(training.steps, training.task.name, "step")
        output, errors = (launcher.launcher_stream(number) if self._reporter else None for number in (1, 2))
        notice = ExitNotice(self._reporter and not training.fault_tolerant and self._keeper is None, errors)
        with output or nullcontext(), errors or nullcontext(), bar, notice, InterruptFlag() as interrupt:
            notice.set_text(checkpoints.killed_text())
            bar.update(training.done)
            for index, record in enumerate(training.run(lambda: self._stops(interrupt))):
                score = self._record(record, test_every)
                self._keep()  # after the test, whose score may change the learning rate
                if index in TRACED:
                    self._events += training.engine.events
                training.engine.events.clear()
                if args.checkpoint and (training.done % save_every == 0 or (score and args.keep_best)):
                    checkpoints.save(score)
                    notice.set_text(checkpoints.killed_text())
                is_tenth = training.done * INTERVALS % training.steps < INTERVALS
                if score or is_tenth or self._meter.window_seconds > REFRESH:
                    loss, speed = format_loss(training, record.report.loss), self._meter.recent()
                    text = f"{loss}{self._test_text}, {format_speed(training, speed)}"
                    bar.set_postfix_str(text, refresh=False)
                    self._test_text = ""
                bar.update()
                if score:  # its line stays
                    bar.refresh()
                    if launcher.on_terminal():
                        say(f"step {training.done} of {training.steps}, {text}")
            if args.checkpoint and training.done > checkpoints.tried:
                checkpoints.save()
            number = int(self._comm.allreduce(interrupt.number, MPI.MAX))
            if number:
                cause = "before the time limit" if self._is_limited else f"by {signal.Signals(number).name}"
                text = f"ended {cause} after step {training.done}; {checkpoints.resume_text()}"
                print(text, file=output, flush=True) if output else say(text)
            elif self._is_early:
                tests = training.settings.early_stop
                say(f"ended after step {training.done}: {tests} tests in a row had no better loss (--early-stop)")
            return 128 + number if number else 0

    def _keep(self) -> None:
        """Keep the state in memory. Print the number of steps between two states as soon as it has been chosen."""
        if (keeper := self._keeper) is not None:
            before = keeper.every
            keeper.keep()
            if keeper.every != before and keeper.every != 1:
                say(f"the state is kept in memory every {keeper.every} steps")

    def _stops(self, interrupt: InterruptFlag) -> bool:
        """True if this step is the last one: after a signal, or near the end of the job."""
        if not interrupt.seen and self._limit.is_near():
            self._is_limited = True
            signal.raise_signal(signal.SIGUSR1)
        return interrupt.seen or self._is_early

    def _record(self, record: StepRecord, test_every: int) -> EvalScore | None:
        """Add a step to meter and logs. Every `test_every` steps also test, and return the score.

        Not at the end, where `finish` tests, unless the best checkpoints are kept.
        """
        training, score = self._training, None
        self._meter.add(record.samples, record.seconds, record.report.communication)
        done, line = training.done, record.line()
        is_end = (done >= training.steps or record.report.stop) and not self._args.keep_best
        if done % test_every == 0 and not is_end:
            score = training.score(self._args.test_samples or TEST_SAMPLES * training.task.is_text or None)
            line |= score.line()
            self._test_text = f", {format_score(score)}"
            self._is_early = training.observe(score)
        for name, log in self._logs.items():
            intact = log.problem is None
            log.add(line)
            if intact and log.problem:  # at the first failure only: the next line tries again
                path = getattr(self._args, name)
                say(f"warning: {path} has no line of step {done} yet: {log.problem}; the training goes on")
        return score

    def _summary(self, score: EvalScore, tested: int, speed: Throughput) -> dict[str, Any]:
        """Summary of the run for the last line of the metrics file. Collective."""
        training, lines = self._training, self._metrics.lines
        return {
            "final": True,
            "step": training.done,
            "loss": lines[-1]["loss"] if lines else None,
            **score.line(),
            "test_samples": tested,
            f"{unit(training)}_per_s": speed.samples_per_s * tokens(training),
            "mfu": speed.mfu,
            "hfu": speed.hfu,
            "peak_flops": self._peak,
            "updates": training.engine.updates,
            "communication_share": speed.communication_share,
            **self._by_rank(),
            "seconds": time.perf_counter() - self._began,
            "ranks": MPI.COMM_WORLD.Get_size(),
            "settings": asdict(training.settings),
        }

    def finish(self) -> int:
        """Test the trained model, write metrics, plot and trace. Returns 0. OutputError if a file fails.

        Collective.
        """
        args, training, comm = self._args, self._training, self._comm
        checkpoints = self._checkpoints
        every = len(training.task.test)
        count = min(every, args.test_samples or every)
        with launcher.progress(count, "test", "sample") as bar:
            score = training.score(count, tell=lambda done, count: bar.update(done - bar.n))
        speed = self._meter.overall(comm)
        final = self._summary(score, count, speed)
        for name, log in self._logs.items():
            log.add(final)
            log.close()
            path = getattr(args, name)
            if path and training.is_reporter and not self._reporter and name != "tensorboard":  # the first one is dead
                collective_call(comm, partial(log.copy, path), f"--{name}", OutputError)
        if checkpoints.problem and not training.fault_tolerant:  # else other ranks may not try again with this one
            checkpoints.save()
        spent = f"{training.done} steps and {format_time(final['seconds'])}"
        part = f" on {count} of {every} samples" if count < every else ""
        say(f"{format_score(score)}{part} after {spent}; {format_speed(training, speed)}")
        if slow := slow_rank([1 - share for share in final["by_rank"]["communication_share"]]):
            rank, times = slow
            say(f"rank {rank} on {self._nodes[rank]} computes {times:.1f} times as long as the other ranks")
        if args.checkpoint and not checkpoints.problem:
            say(f"checkpoints are in {args.checkpoint}")
        if training.fault_tolerant and not training.is_reporter:
            return 0
        if args.plot:
            collective_call(comm, self._draw, f"{args.plot} was not drawn", OutputError, root=0)
            say(f"{args.plot} drawn")
        if args.trace:
            write_trace(args.trace, comm, self._events, traces.offset(comm), settings=str(asdict(training.settings)))
        for name, log in self._logs.items():
            collective_call(comm, log.complete, f"{getattr(args, name)} is not complete", OutputError, root=0)
        if checkpoints.problem:
            raise OutputError(f"no checkpoint has the end of the training; {checkpoints.resume_text()}")
        return 0

    def _draw(self) -> None:
        from parallel.cli.reports.training_plots import plot_learning

        plot_learning(self._args.plot, self._metrics.lines, title_of(self._training), machine())

    def _by_rank(self) -> dict[str, Any]:
        """Peak bytes by memory ledger and of the process, the maximum and by rank. Communication share by rank.

        Collective. In a fault-tolerant training of this rank only.
        """
        ledger = self._training.engine.ledger
        own = {
            "peak_bytes": int(sum(ledger.allocated.values()) + ledger.work),
            "resident_bytes": int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT),
            "communication_share": self._meter.communication_share,
        }
        ranks = self._comm.allgather(own)
        most = {name: max(one[name] for one in ranks) for name in ("peak_bytes", "resident_bytes")}
        return {**most, "by_rank": {name: [one[name] for one in ranks] for name in own}}

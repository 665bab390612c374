"""Output of training programs: loss, score and speed as text, and a trace file of profiled steps."""

import math
from itertools import chain
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark import traces
from collectives.cli import launcher
from collectives.units import short
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.profiler import ProfilerEvent
from parallel.runtime.throughput import Throughput
from parallel.trainer.records import EvalScore
from parallel.trainer.trainer import Training


class OutputError(RuntimeError):
    """Error on all ranks: a result file could not be written."""


def tokens(training: Training) -> int:
    """Tokens per sample: the sequence length for text. Otherwise 1, as speeds are then in samples (`unit`)."""
    return training.settings.length if training.task.is_text else 1


def unit(training: Training) -> str:
    return "tokens" if training.task.is_text else "samples"


def format_share(share: float) -> str:
    """Format a share with two significant digits if it is below a tenth.

    >>> format_share(0.423), format_share(0.0423), format_share(0.0000423), format_share(0.0)
    ('42%', '4.2%', '0.0042%', '0%')
    """
    decimals = math.ceil(-math.log10(share)) - 1 if 0 < share < 0.1 else 0
    return f"{share:.{decimals}%}"


def format_speed(training: Training, speed: Throughput) -> str:
    words = [f"{short(speed.samples_per_s * tokens(training))} {unit(training)}/s"]
    if speed.mfu is not None and speed.hfu is not None:
        words.append(
            f"MFU {format_share(speed.mfu)}" if speed.mfu <= 1 else "MFU unknown (peak measured on busy cores)"
        )
        words += [f"HFU {format_share(speed.hfu)}"] * (speed.mfu < speed.hfu <= 1)
    return ", ".join([*words, f"communication {format_share(speed.communication_share)}"])


def format_loss(training: Training, loss: float) -> str:
    """Format a loss: bits per byte for text, else the plain value."""
    return f"{loss / math.log(2):.3f} bits/byte" if training.task.kind == "bytes" else f"loss {loss:.4f}"


def format_score(score: EvalScore) -> str:
    if math.isnan(score.loss):
        return "no samples to test"
    if score.bits_per_byte is not None:
        return f"test {score.bits_per_byte:.3f} bits/byte"
    if score.accuracy is not None:
        return f"test accuracy {score.accuracy:.2%}"
    return f"test loss {score.loss:.4g}"


def title_of(training: Training) -> str:
    settings = training.settings
    return f"{settings.model} on {training.task.name}: {settings.layout}, {settings.precision}, {settings.optimizer}"


LANES = ("", " under way")  # threads of a rank in a trace: its work, and exchanges in flight


def write_trace(path: Path, comm: Communicator, events: list[ProfilerEvent], ahead: float, **about: Any) -> None:
    """Write a trace file with the events of all ranks. OutputError on all if it fails. Collective.

    `ahead` is the seconds that this rank's clock is ahead of rank 0's. `about` is stored in the file.
    """
    rank, nodes = comm.Get_rank(), comm.nodes or (0,) * comm.Get_size()
    start = comm.allreduce(min((event.start for event in events), default=float("inf")) - ahead, MPI.MIN)
    mine = []
    for event in events:
        thread = rank * len(LANES) + (event.kind == "flight")
        times = event.start - ahead - start, event.end - ahead - start
        mine.append(traces.span(thread, nodes[rank], event.name, event.kind, *times, **event.about))
    spans = comm.gather(mine) or []

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        traces.write(path, [*traces.names(nodes, LANES), *chain.from_iterable(spans)], **about)

    collective_call(comm, write, f"{path} was not written", OutputError, root=0)
    launcher.say(f"{path} written; ui.perfetto.dev opens it")

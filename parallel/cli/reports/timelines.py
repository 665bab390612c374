"""Plots of pipeline timelines, simulated and measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from collectives.benchmark.reports import read_report, save_figure
from collectives.units import format_time
from parallel.pipeline.schedule.actions import Action, parse
from parallel.pipeline.schedule.activation_memory import peaks, versions
from parallel.pipeline.schedule.simulator import PipelineEvent, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "F": ("#0b6fbf", "#6fb1e6", "#a9d0f0", "#cfe4f6"),
    "B": ("#e07b00", "#f2b266", "#f7cf9e", "#fae3c6"),
    "W": ("#2a9d52", "#7fcf9b", "#addfbf", "#d2eedc"),
    "BW": ("#c4453b", "#e38f88", "#efb9b4", "#f6d8d5"),
    "U": ("#5b4fc4",) * 4,
}
"""By kind, then by chunk."""

NAMES = {"F": "forward", "B": "input gradient", "W": "weight gradients", "BW": "backward", "U": "update"}
INK = "#333333"
WIDTH = 12.0


class TimelineBand(NamedTuple):
    """Timeline to plot: computations of each stage, messages with their receiving stage, and time unit."""

    title: str
    lines: Sequence[Sequence[PipelineEvent]]
    messages: Sequence[tuple[PipelineEvent, int]] = ()
    unit: str = ""


def simulated(timeline: Timeline, title: str) -> TimelineBand:
    """Convert a simulated timeline for plotting. Messages that take no time are omitted."""
    flying = [event for event in timeline.messages if event.end > event.start]
    return TimelineBand(title, timeline.computed, [(event, timeline.plan.peer(event.action).stage) for event in flying])


def measured(path: Path) -> TimelineBand:
    """Timeline of the last pipeline step in a trace file of `chorus train`: spans of its computations (``2F0``).

    A step ends where a computation recurs. It has no messages. Of several ranks with the same stage the first is taken.
    ValueError if the file has no step of a pipeline.
    """
    return read_report(path, "a trace with the step of a pipeline", _last_step)


def _last_step(trace: bytes) -> TimelineBand:
    entries = json.loads(trace)["traceEvents"]
    spans = [(action, entry) for entry in entries if (action := _action(entry))]
    threads: dict[int, dict[tuple[int, int], dict[Action, PipelineEvent]]] = defaultdict(lambda: defaultdict(dict))
    for action, entry in sorted(spans, key=lambda span: span[1]["ts"]):
        start = entry["ts"] / 1e6
        event = PipelineEvent(action, start, start + entry["dur"] / 1e6)
        step = threads[action.stage][entry["pid"], entry["tid"]]
        if action in step:  # a step has each action once, so another one has begun
            step.clear()
        step[action] = event
    if not threads:
        raise ValueError("nothing in this trace is named like an action of a pipeline, such as 2F0")
    lines = [of[min(of)].values() for _, of in sorted(threads.items())]
    zero = min(event.start for line in lines for event in line)
    shifted = [[PipelineEvent(action, start - zero, end - zero) for action, start, end in line] for line in lines]
    end, busy = _end(shifted), sum(map(_covered, shifted))
    idle = 1 - busy / (end * len(shifted))
    return TimelineBand(f"measured: {format_time(end)}, idle {float(idle):.1%}", shifted, (), "s")


def _action(entry: dict[str, Any]) -> Action | None:
    """Pipeline action whose span a trace entry is, by its name. None for sends, receives and other entries."""
    with suppress(ValueError):
        action = parse(entry.get("name", ""))
        return action if entry.get("ph") == "X" and action.kind in NAMES else None
    return None


def _covered(line: Sequence[PipelineEvent]) -> float:
    """Time in which computations of a stage run, one or the two of a pair. The events are in order of their starts."""
    ends = accumulate((float(event.end) for event in line), max, initial=0.0)
    return sum(max(0.0, float(event.end) - max(float(event.start), before)) for event, before in zip(line, ends))


def _end(lines: Sequence[Sequence[PipelineEvent]]) -> float:
    return max((float(event.end) for line in lines for event in line), default=1.0)


def picture(path: Path, bands: Sequence[TimelineBand]) -> None:
    """Plot timelines below each other into a file: a row per stage, the same time axis for equal units."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    heights = [0.34 * len(band.lines) + 0.6 for band in bands]
    look: Any = {"squeeze": False, "layout": "constrained", "height_ratios": heights}
    figure, axes = plt.subplots(len(bands), 1, figsize=(WIDTH, sum(heights) + 0.6), **look)
    for axis, band in zip(axes[:, 0], bands):
        # seconds and units of the simulation share no axis
        _band(axis, band, max(_end(other.lines) for other in bands if other.unit == band.unit))
    present = {(event.action.kind, event.action.chunk) for band in bands for line in band.lines for event in line}
    handles = [
        Patch(color=_colour(kind, chunk), label=f"{NAMES[kind]}{f', chunk {chunk}' if chunk else ''}")
        for kind in NAMES
        for chunk in sorted(chunk for of, chunk in present if of == kind)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    save_figure(path, figure, 100)


def _colour(kind: str, chunk: int) -> str:
    return COLOURS[kind][chunk % 4]


def _band(axis: Axes, band: TimelineBand, end: float) -> None:
    for stage, line in enumerate(band.lines):
        at_once = {event for pair in pairwise(line) if pair[1].start < pair[0].end for event in pair}
        for event in line:
            height = 0.4 if event in at_once else 0.8
            bottom = stage if event in at_once and event.action.kind != "F" else stage - 0.4  # forward above backward
            span = float(event.start), float(event.end - event.start)
            colour = _colour(event.action.kind, event.action.chunk)
            axis.broken_barh([span], (bottom, height), facecolors=colour, edgecolor="white", linewidth=0.5)
            _label(axis, event, bottom + height / 2, end)
    for event, target in band.messages:
        source = event.action.stage
        edge = 0.4 if target > source else -0.4
        axis.plot([float(event.start), float(event.end)], [source + edge, target - edge], color=INK, lw=0.7)
    axis.set_xlim(0, end)
    axis.set_ylim(len(band.lines) - 0.5, -0.5)
    axis.set_yticks(range(len(band.lines)), [f"stage {stage}" for stage in range(len(band.lines))], fontsize=8)
    axis.tick_params(length=0, labelsize=8)
    axis.set_title(band.title, loc="left", fontsize=9)
    axis.set_facecolor("#f1f3f5")
    for spine in axis.spines.values():
        spine.set_visible(False)
    if band.unit:
        axis.set_xlabel(band.unit, fontsize=8)


def _label(axis: Axes, event: PipelineEvent, height: float, end: float) -> None:
    """Write the event's micro-batch number into its bar if it fits."""
    text = str(event.action.microbatch)
    share = float(event.end - event.start) / end * (WIDTH - 1)
    if share > 0.075 * len(text):
        middle, ink = float(event.start + event.end) / 2, INK if event.action.chunk else "white"
        axis.text(middle, height, text, ha="center", va="center", fontsize=7, color=ink)


def summary(timeline: Timeline) -> str:
    plan, bubble = timeline.plan, timeline.bubble
    chunks = plan.placement.chunks
    stashed = ", ".join(map(str, peaks(plan)))
    share = f"idle {float(bubble):.1%}" + (f" ({bubble})" if bubble else "")
    unit = "micro-batches" if chunks == 1 else f"micro-batches in one of {chunks} chunks"
    weights = f", versions of the weights {', '.join(map(str, versions(plan)))}" if plan.versions else ""
    messages = sum(plan.messages().values())
    return f"takes {timeline.makespan}, {share}; keeps {stashed} {unit}{weights}; {messages} messages"

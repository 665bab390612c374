"""Pictures of plans: memory of a stage over a step, predicted steps as timelines, and the best layout by nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.units import format_time, short
from parallel.cli.reports.plan_report import PlanQuestion
from parallel.cli.reports.plan_timeline import title
from parallel.planning.analytic.layout import accumulation
from parallel.planning.analytic.memory import MEMORY_KINDS, over_time
from parallel.planning.analytic.search import PlanChoice
from parallel.planning.measured.step_timeline import IDLE, NETWORK, SHARED, STEP, StepTimeline

STAGES = 4
"""Stages drawn: the first ones and the last."""


def draw_memory(path: Path, question: PlanQuestion, choice: PlanChoice) -> None:
    """Draw stacked memory over time and write it to `path`. The format follows from its suffix."""
    from matplotlib.figure import Figure

    layout, limit = choice.layout, question.setup.device.memory / 1e9
    rounds = accumulation(layout, question.sequences)
    stages = sorted({*range(min(STAGES - 1, layout.pp)), layout.pp - 1})  # a set: of few stages the last is a first one
    figure = Figure(figsize=(8, 1.2 + 1.6 * len(stages)), layout="constrained")
    axes = figure.subplots(len(stages), 1, sharex=True, squeeze=False)[:, 0]
    for axis, stage in zip(axes, stages):
        changes = over_time(question.model, layout, rounds, stage)
        times = [float(change.time) for change in changes]
        memory, bottom = choice.memory[stage], [0.0] * len(times)
        moving = {"activations": [change.saved for change in changes]}
        moving["recomputed"] = [change.recomputed for change in changes]
        for kind in MEMORY_KINDS:
            values = [nbytes / 1e9 for nbytes in moving.get(kind, [memory[kind]] * len(times))]
            if not max(values):
                continue
            top = [low + value for low, value in zip(bottom, values)]
            axis.fill_between(times, bottom, top, step="post", label=kind, linewidth=0)
            bottom = top
        axis.axhline(limit, color="black", linewidth=0.8)
        axis.set_ylabel(f"stage {stage}\nGB")
        axis.set_ylim(0, 1.1 * limit)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 1.35), ncols=len(MEMORY_KINDS), fontsize=8, frameon=False)
    axes[-1].set_xlabel("time (forward pass of a layer = 1)")
    figure.suptitle(title(question, choice), fontsize=9)
    figure.savefig(path, dpi=120)


PARTS = {
    "compute": ("compute", "#0b6fbf"),
    "recompute": ("recomputation", "#7fb8e6"),
    "memory": ("memory-bound operators", "#2a9d8f"),
    "tensor": ("exposed: tp", "#e07b00"),
    "context": ("exposed: cp", "#f2b134"),
    "experts": ("exposed: ep", "#8a5a2b"),
    "stages": ("exposed: pp", "#c4453b"),
    "replicas": ("exposed: dp", "#8e3b8e"),
    "bubble": ("pipeline bubble", "#bbbbbb"),
    "update": ("optimizer", "#333333"),
}
"""Label and colour of the parts of a step, from the bottom up."""

LEAST_SHARE = 0.1
"""Percent of a step from which a part is drawn."""


def draw_nodes(path: Path, plans: Sequence[tuple[PlanQuestion, PlanChoice | None]]) -> None:
    """Draw the best layouts by number of devices: speed beside a line of equal efficiency, and the parts of a step.

    None: no layout fits this number of devices.
    """
    from matplotlib.figure import Figure

    question = plans[0][0]
    figure = Figure(figsize=(max(7, 1.5 * len(plans) + 2.5), 7.5), layout="constrained")
    speed, share = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.3))
    _draw_speeds(speed, plans)
    _draw_parts(share, [choice for _, choice in plans])
    names = []
    for place, (one, choice) in enumerate(plans):
        seconds = choice.time.total if choice else 0.0
        text = f"{format_time(seconds)}, MFU {one.mfu(seconds):.0%}" if choice else "no layout\nfits"
        share.annotate(text, (place, 101 if choice else 3), ha="center", va="bottom", fontsize=7)
        nodes = f"{one.devices // question.setup.cluster.per_node} ({one.devices})"
        names.append("\n".join([nodes, "", *(str(choice.layout).split(", ") if choice else ())]))
    share.set_xticks(range(len(plans)), names, fontsize=7)
    share.set_xlabel("nodes (devices), and their best layout")
    figure.legend(*share.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    sequences = f"{question.sequences} sequences of {question.model.context} tokens a step"
    figure.suptitle(f"{question.model_name} on {question.cluster_name}, {sequences}: best layouts", fontsize=10)
    figure.savefig(path, dpi=120)


def _draw_speeds(axis: Any, plans: Sequence[tuple[PlanQuestion, PlanChoice | None]]) -> None:
    found = [(place, *each) for place, each in enumerate(plans)]
    speeds = [(place, one.devices, one.tokens / choice.time.total) for place, one, choice in found if choice]
    places, devices, tokens = zip(*speeds)
    ideal = [tokens[0] * count / devices[0] for count in devices]
    axis.plot(places, ideal, color="grey", lw=0.8, ls="--", label="linear scaling of the first")
    axis.plot(places, tokens, marker="o", color="#0b6fbf", label="predicted")
    axis.set_yscale("log", base=10)
    axis.yaxis.set_major_formatter(lambda y, _: short(y))
    axis.yaxis.set_minor_formatter(lambda y, _: short(y) if max(tokens) < 10 * min(tokens) else "")
    axis.set_ylabel("tokens/s")
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def _draw_parts(axis: Any, choices: Sequence[PlanChoice | None]) -> None:
    bottom = [0.0] * len(choices)
    for name, (label, colour) in PARTS.items():
        values = [100 * getattr(each.time, name) / each.time.total if each else 0.0 for each in choices]
        if max(values) > LEAST_SHARE:
            axis.bar(range(len(choices)), values, 0.6, bottom, label=label, color=colour)
            bottom = [low + value for low, value in zip(bottom, values)]
    axis.set_ylim(0, 108)
    axis.set_ylabel("share of the step, %")


DRAWN = PARTS | {
    SHARED: (SHARED, "#e07b00"),
    NETWORK: (NETWORK, "#c4453b"),
    IDLE: (IDLE, "#bbbbbb"),
    STEP: (STEP, "#5b4fc4"),
}
"""Label and colour of the causes of spans, on a cluster (`StepTime`) and on measured ranks (`CAUSES`)."""

MOST_EDGES = 400
"""Spans of a picture up to which they have edges."""


def draw_step(path: Path, title: str, step: StepTimeline) -> None:
    """Draw a predicted step: a row for each lane, coloured by cause."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = list(dict.fromkeys(span.lane for span in step.spans))
    causes = list(dict.fromkeys(span.cause for span in step.spans))
    unit, scale = ("s", 1.0) if max(span.end for span in step.spans) >= 10 else ("ms", 1e3)
    figure = Figure(figsize=(10, 1.4 + 0.4 * len(lanes)), layout="constrained")
    axis = figure.subplots()
    width = 0.4 * (len(step.spans) <= MOST_EDGES)  # white edges would cover thin bars
    for row, lane in enumerate(lanes):
        for cause in causes:
            spans = [span for span in step.spans if (span.lane, span.cause) == (lane, cause)]
            bars = [(scale * span.start, scale * (span.end - span.start)) for span in spans]
            axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=DRAWN[cause][1], edgecolor="white", lw=width)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlabel(unit)
    handles = [Patch(color=colour, label=label) for label, colour in map(DRAWN.__getitem__, causes)]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)

"""Pictures of plans: memory of a stage over a step, predicted steps as timelines, and the best layout by nodes."""

from collections.abc import Sequence
from pathlib import Path

from parallel.benchmark.plan_report import PlanQuestion
from parallel.forecast.step_timeline import CAUSES, StepTimeline
from parallel.planner.layout import accumulation
from parallel.planner.memory import MEMORY_KINDS, over_time
from parallel.planner.search import PlanChoice

STAGES = 4
"""Stages drawn: the first ones and the last."""


def draw_memory(path: Path, question: PlanQuestion, choice: PlanChoice) -> None:
    """Draw stacked memory over time and write it to `path`; the format follows from its suffix."""
    from matplotlib.figure import Figure

    layout, limit = choice.layout, question.setup.device.memory / 1e9
    stages = sorted({*range(min(STAGES - 1, layout.pp)), layout.pp - 1})
    figure = Figure(figsize=(8, 1.2 + 1.6 * len(stages)), layout="constrained")
    axes = figure.subplots(len(stages), 1, sharex=True, squeeze=False)[:, 0]
    for axis, stage in zip(axes, stages):
        changes = over_time(question.model, layout, accumulation(layout, question.sequences), stage)
        times = [float(change.time) for change in changes]
        memory, bottom = choice.memory[stage], [0.0] * len(times)
        alive = [change.nbytes / 1e9 for change in changes]
        rest = memory["activations"] / 1e9 - max(alive)
        for kind in MEMORY_KINDS:
            values = [each + rest for each in alive] if kind == "activations" else [memory[kind] / 1e9] * len(times)
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
    figure.suptitle(
        f"{question.model_name} on {question.devices} x {question.setup.cluster.device}: {layout}", fontsize=9
    )
    figure.savefig(path, dpi=120)


def draw_nodes(path: Path, plans: Sequence[tuple[PlanQuestion, PlanChoice]]) -> None:
    """Draw the speed of the best layouts by number of devices, with their names, and a line of equal efficiency."""
    from matplotlib.figure import Figure

    devices = [question.devices for question, _ in plans]
    speeds = [question.tokens / choice.time.total for question, choice in plans]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    axis.plot(devices, [speeds[0] * count / devices[0] for count in devices], color="grey", lw=0.8, ls="--")
    axis.plot(devices, speeds, marker="o", color="#0b6fbf")
    for count, speed, (question, choice) in zip(devices, speeds, plans):
        text = "\n".join([*str(choice.layout).split(", "), f"MFU {question.mfu(choice.time.total):.0%}"])
        axis.annotate(text, (count, speed), (8, -6), textcoords="offset points", fontsize=7, va="top")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10)
    axis.set_xticks(devices, [str(count) for count in devices])
    axis.set_xlim(devices[0] / 1.3, devices[-1] * 2)
    axis.set_ylim(speeds[0] / 3, max(speeds) * 1.5)  # below the first point is its text
    axis.set_xlabel(f"devices ({plans[0][0].setup.cluster.per_node} a node)")
    axis.set_ylabel("tokens/s, predicted")
    figure.suptitle(f"{plans[0][0].model_name}, {plans[0][0].sequences} sequences a step: best layouts", fontsize=10)
    figure.savefig(path, dpi=120)


COLOURS = dict(zip(CAUSES, ("#0b6fbf", "#e07b00", "#c4453b", "#bbbbbb", "#2a9d52", "#5b4fc4"), strict=True))


def draw_step(path: Path, title: str, step: StepTimeline) -> None:
    """Draw a predicted step: a row for each lane, coloured by cause."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = list(dict.fromkeys(span.lane for span in step.spans))
    figure = Figure(figsize=(10, 1.4 + 0.4 * len(lanes)), layout="constrained")
    axis = figure.subplots()
    for span in step.spans:
        place = lanes.index(span.lane) - 0.4, 0.8
        width = 1e3 * (span.end - span.start)
        axis.broken_barh([(1e3 * span.start, width)], place, facecolors=COLOURS[span.cause], edgecolor="white", lw=0.4)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlabel("ms")
    causes = list(dict.fromkeys(span.cause for span in step.spans))
    handles = [Patch(color=COLOURS[cause], label=cause) for cause in causes]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)

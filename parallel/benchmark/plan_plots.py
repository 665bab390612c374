"""Picture of a plan: memory of a device of each pipeline stage over a step, by kind."""

from pathlib import Path

from parallel.benchmark.plan_report import PlanQuestion
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

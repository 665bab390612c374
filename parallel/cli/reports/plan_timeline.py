"""Timeline of the predicted step of a layout on a cluster: the actions of every stage, by cause."""

from collections.abc import Mapping

from parallel.cli.reports.plan_report import PlanQuestion
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.simulator import ActionTimes, simulate
from parallel.planning.analytic.layout import ClusterLayout, accumulation, layer_ranges
from parallel.planning.analytic.memory import plan_of
from parallel.planning.analytic.search import PlanChoice
from parallel.planning.analytic.step_time import BatchTime, batch_time
from parallel.planning.measured.step_timeline import StepTimeline, TimeSpan


def predicted_timeline(question: PlanQuestion, choice: PlanChoice) -> StepTimeline:
    """Step of the micro-batches in each replica that memory follows from (`plan_of`).

    Every action takes a third of its part's time for a micro-batch, backward passes also the recomputation. Replicas'
    messages and the update follow on the slowest stage.
    """
    layout = choice.layout
    rounds = accumulation(layout, question.sequences)
    plan = lower(plan_of(layout.schedule, layout.pp, rounds, layout.virtual))
    parts = part_times(question, layout)
    third = [(part.busy - part.recompute) / 3 for part in parts]
    backward = [each + part.recompute for each, part in zip(third, parts)]
    found = StepTimeline()
    timeline = simulate(plan, ActionTimes(third, backward, third))
    for stage, events in enumerate(timeline.computed):
        for action, start, _ in events:
            share = {"BW": 2 / 3}.get(action.kind, 1 / 3)
            seconds = {
                name: share * value for name, value in parts[plan.placement.part[action.place]]._asdict().items()
            }
            seconds["recompute"] *= (action.kind in ("B", "BW")) / share
            _draw(found, f"stage {stage}", str(action), float(start), seconds)
    slowest = max(range(layout.pp), key=timeline.busy.__getitem__)
    after = {"replicas": choice.time.replicas, "update": choice.time.update}
    _draw(found, f"stage {slowest}", "", float(timeline.makespan), after)
    found.parts.update(choice.time._asdict())
    return found


def drawn_part(layout: ClusterLayout, rounds: int) -> str:
    """Text: number of micro-batches that pictures show, if a step has more."""
    shown = plan_of(layout.schedule, layout.pp, rounds, layout.virtual).microbatches
    return f", {shown} of {rounds} micro-batches" if shown < rounds else ""


def title(question: PlanQuestion, choice: PlanChoice) -> str:
    """Text: model, devices and layout of a picture."""
    shown = drawn_part(choice.layout, accumulation(choice.layout, question.sequences))
    return f"{question.model_name} on {question.devices} x {question.setup.cluster.device}: {choice.layout}{shown}"


def part_times(question: PlanQuestion, layout: ClusterLayout) -> list[BatchTime]:
    """Predicted seconds of a micro-batch in each part of the model."""
    model, whole = question.model, batch_time(question.model, layout, question.setup)
    whole = whole._replace(stages=whole.stages / layout.virtual)
    ranges = layer_ranges(model, layout)
    return [whole.part(len(layers) / model.layers, layers.stop == model.layers) for layers in ranges]


def _draw(found: StepTimeline, lane: str, label: str, start: float, seconds: Mapping[str, float]) -> None:
    """Add spans one after another, of the causes that take time. The head's are products."""
    for cause, length in seconds.items():
        if length:
            found.spans.append(TimeSpan(lane, label, "compute" if cause == "head" else cause, start, start + length))
            start += length

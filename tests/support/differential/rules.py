"""Rules by which layouts and meshes refuse options, with patterns of the errors' texts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel.engine.settings import OPTIONS
from support.differential.columns import SAMPLES, Column
from support.differential.tasks import Task

When = Callable[[Column, Task], bool]


@dataclass(frozen=True)
class Rule:
    """Columns that refuse an option, and a pattern of the error's text."""

    when: When
    text: str
    kinds: tuple[str, ...] = (
        "ValueError",
        "TypeError",
        "PlacementError",
        "ParameterNotGathered",
        "RankMismatch",
        "StepFailed",
    )

    def fits(self, kind: str, text: str) -> bool:
        return kind in self.kinds and re.search(self.text, text) is not None


def everywhere(text: str) -> Rule:
    return Rule(lambda column, task: True, text)


def on(text: str, *kinds: str) -> Rule:
    """Refused by layouts of these kinds."""
    return Rule(lambda column, task: column.kind in kinds, text)


def along(text: str, *axes: str) -> Rule:
    """Refused on meshes with several ranks along one of these axes."""
    return Rule(lambda column, task: any(column.size(axis) > 1 for axis in axes), text)


def where(text: str, when: Callable[[Column], bool]) -> Rule:
    return Rule(lambda column, task: when(column), text)


def owned(name: str) -> Rule:
    """Rule of a setting that only some layouts have, by its declaration."""
    layouts = OPTIONS[name].layouts if name in OPTIONS else ()
    text = rf"^{name}: it belongs to .*, and the layout is "
    return Rule(lambda column, task: bool(layouts) and column.kind not in layouts, text)


STYLES = ("local", "group", "sgp", "hogwild", "federated")


def trainable(task: Task, column: Column) -> bool:
    """True if a column can train a task at all."""
    return not any(rule.when(column, task) for rule in COMMON)


COMMON: tuple[Rule, ...] = (
    Rule(
        lambda column, task: column.size("ep") > 1 and not task.has_experts,
        "mesh: ep and etp divide the experts of a model, and this one has none",
    ),
    Rule(
        lambda column, task: column.schedule.startswith("pipedream") and column.ranks > 1 and task.is_text,
        "pipedream(-2bw)? updates stage by stage, and 0.0.(@0.)?weight belongs to several",
    ),
    Rule(
        lambda column, task: column.size("cp") > 1 and not task.is_text,
        "expected (another placement along cp, found a value sharded along dimension 1|sequences to divide over cp)",
    ),
    Rule(
        lambda column, task: column.size("tp") > 1 and not task.has_cuts,
        "tp: expected a model with a table `cuts` of the operators to cut, found none",
    ),
    Rule(
        lambda column, task: column.parts > task.units,
        "stages: . units cannot be cut in . parts; take fewer stages, or a deeper model",
    ),
)
"""Rules of all rows."""


def transform(name: str) -> tuple[Rule, ...]:
    """Rules of a setting that transforms operators, which then are not cut, nor on parts of sequences."""
    return (
        along(f"{name}: .* is not for (operators that are cut|experts on different ranks)", "tp", "ep"),
        along("mesh: [A-Za-z]* .*: expected another placement along cp, found a value sharded along dimension 1", "cp"),
    )


def is_pipedream(column: Column) -> bool:
    return column.schedule.startswith("pipedream")


FIELDS: dict[str, Sequence[Rule]] = {
    "reproducible": (
        on("reproducible: with .* the result depends on the number of ranks", *STYLES),
        where(
            "expected a power of two of parts, found 3; cp=2 or cp=4 would fit", lambda column: column.size("cp") == 3
        ),
    ),
    "compress": (
        where(
            "compress: expected none, since gradients are compressed only where every rank has the whole sum",
            lambda column: column.replicas.startswith("zero"),
        ),
        along("compress: .* is not for experts on different ranks", "ep"),
    ),
    "check_every": (
        on("check_every: with .* ranks have different weights", *STYLES),
        on("check_every: expected 0, since ps has one copy", "ps"),
    ),
    "pool": (
        along("pool: .* is not for (operators that are cut|experts on different)", "tp", "ep"),
        along("pool: ranks that share sequences need the same micro-batches", "cp"),
    ),
    "precision": (
        Rule(lambda column, task: column.kind == "hogwild", "precision: hogwild has fp32 or fp64, found (bf16|fp16)"),
    ),
    "clip": (where("clip: pipedream.* updates stage by stage", is_pipedream),),
    "products": transform("products"),
    "fake_quant": transform("fake_quant"),
    "fake_quant_inputs": transform("fake_quant_inputs"),
    "prune": transform("prune"),
    "sequence_parallel": (
        Rule(
            lambda column, task: 8 // column.size("cp") % column.size("tp") > 0,
            "sequence_parallel: expected a multiple of 3 tokens, in tp=3; found 8",
        ),
        Rule(
            lambda column, task: column.size("tp") > 1 and not task.is_text,
            "sequence_parallel: expected a model of sequences; .* takes their parts along tp, found a replicated value",
        ),
    ),
    "sequence_parts": (
        where("sequence_parts: expected a multiple of cp, in cp=3; found 4", lambda column: column.size("cp") == 3),
    ),
    "tensor_shards": (
        where("tensor_shards: expected a multiple of tp, in tp=3; found 4", lambda column: column.size("tp") == 3),
    ),
    "context": (where("context: .* is for sequences divided along cp", lambda column: column.size("cp") == 1),),
    "dispatch": (
        where("dispatch: .* is for replicas that share experts, by ep", lambda column: column.expert_replicas == 1),
    ),
    "expert_shards": (
        where(
            "expert_shards: expected a divisor of the 1 tensor_shards of a rank|expert_shards: expected 1, for",
            lambda column: column.size("etp") != 2,
        ),
    ),
    "overlap_expert_comm": (
        where(
            "overlap_expert_comm: zero3 has the weights of one unit at a time",
            lambda column: column.kind == "pp" and column.replicas == "zero3",
        ),
        where(
            "overlap_expert_comm: True is for replicas that share experts, by ep",
            lambda column: column.expert_replicas == 1,
        ),
        where(
            "overlap_expert_comm: expected steps of several micro-batches .*, found 1 a rank",
            lambda column: column.kind != "pp" and 2 * column.teams > SAMPLES // 2,
        ),
    ),
    "stages": (where("stages: 2 are not those of the mesh", lambda column: column.size("pp") != 2),),
    "virtual": (
        where(
            "virtual: .* has . parts of the model per stage, found 2",
            lambda column: column.chunks != 2,
        ),
    ),
    "stage_ranks": (
        where(
            "ranks: stages have replicas in 1f1b, pipedream, pipedream-2bw; found",
            lambda column: column.schedule not in ("1f1b", "pipedream", "pipedream-2bw"),
        ),
        where("ranks: (.* stages|expected numbers from 1 on that add up to .)", lambda column: column.size("pp") != 2),
    ),
    "cuts": (where("cuts: expected . ascending numbers from 0 to 4", lambda column: column.parts != 2),),
    "memory": (on("memory: a limit is for pp:auto, the layout is", "pp"),),
    "slow": (
        where("slow: rank 2 is no worker", lambda column: not column.settings.get("servers", 1) <= 2 < column.ranks),
    ),
    "servers": (where("servers: 2 of 2 ranks leave no workers", lambda column: column.ranks == 2),),
}
"""Rules of settings, by name."""

LAMB_RULES = (
    along("optimizer: lamb needs norms of whole tensors; they are cut into", "tp"),
    where(
        "optimizer: lamb needs bsp on one server",
        lambda column: (
            column.kind == "ps"
            and (column.settings.get("servers", 1) > 1 or column.settings.get("consistency", "bsp") != "bsp")
        ),
    ),
)
NOT_HELD = where(
    "has no values here",
    lambda column: (
        column.kind in ("zero3", "ps")
        or column.size("tp") > 1
        or (column.size("pp") > 1 and column.schedule != "dualpipe")
        or column.replicas == "zero3"
    ),
)
"""Weights that not every rank has whole cannot be edited in place: an error of the user's own code on these ranks."""

READ_ONLY = on("output array is read-only", "hogwild")
"""Weights in one array of all ranks."""

NO_AVERAGE = on("ema: a client's optimizer lives for a round only", "federated")

NO_LOSS_SCALE = Rule(
    lambda column, task: column.schedule.startswith("pipedream") or column.kind == "ps",
    "precision: (pipedream.* has no loss scale for all|fp16 needs a loss scale that is equal on all workers)",
)
"""Layouts without a loss scale that all ranks share."""

"""Rows of the option table: each an option (or a few), where it is refused, and why."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from parallel import LAMB, SGD, Adam, AdamW, LRSchedule, ParamGroup, ReduceLROnPlateau, Settings
from parallel.nn.depths import DepthLayers
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp
from parallel.optim.optimizers import OPTIMIZERS
from support.differential.columns import SAMPLES, Column
from support.differential.programs import PLAIN, STATE, STEP, TEST, Action, do
from support.differential.rules import (
    COMMON,
    FIELDS,
    LAMB_RULES,
    NO_AVERAGE,
    NO_LOSS_SCALE,
    NOT_HELD,
    READ_ONLY,
    STYLES,
    Rule,
    along,
    everywhere,
    on,
    owned,
    trainable,
    where,
)
from support.differential.tasks import (
    BUILT,
    CONVOLUTIONS,
    FROZEN_GAIN,
    GATED_TASKS,
    GPT,
    HEADS,
    LLAMA,
    LOSS_TASKS,
    MIXTURE,
    MLP,
    NORMED,
    REGRESSION,
    SHARED_DROPOUT,
    SYNCHRONISED,
    TEXT_LOSS_TASKS,
    WEIGHTED,
    Task,
    full_tokens,
    gpt,
    mixture,
)


def sgd(model: Any) -> SGD:
    return SGD(lr=0.1, momentum=0.9)


@dataclass(frozen=True, eq=False)
class Row:
    """Option of the table.

    Attributes
    ----------
    name : of the row
    settings : by name, of the engine
    optimizer : function of the model
    tasks : that are trained
    program : actions
    tolerance : largest difference from one rank, relative to the largest element; 0 compares bits
    refusals : rules of this row, the first that holds counts
    one_rank : settings of the one-rank reference that differ from the cell's
    in_torch : True if PyTorch has the option: tasks with twins are compared with it
    same_as : program of the reference, if it is another one
    needs_mpi : True if threads of one process cannot be the ranks
    covers : public names that are in no constructor call: of methods, and of refused settings
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], Any] = sgd
    tasks: Sequence[Task] = (GPT, MLP)
    program: Sequence[Action] = PLAIN
    tolerance: float = 1e-9
    refusals: Sequence[Rule] = ()
    one_rank: Mapping[str, Any] = field(default_factory=dict)
    in_torch: bool = True
    same_as: Sequence[Action] = ()
    needs_mpi: bool = False
    covers: Sequence[str] = ()

    @property
    def sets_micro_batches(self) -> bool:
        return any(
            name in self.settings for name in ("micro_batch", "accumulate", "microbatches", "batch", "batch_tokens")
        )

    def alone(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the one-rank reference; None removes one."""
        return {name: value for name, value in (dict(settings) | dict(self.one_rank)).items() if value is not None}

    def task(self, column: Column) -> Task:
        """Task of a cell: one that the column can train, by turns."""
        fitting = [task for task in self.tasks if trainable(task, column)] or self.tasks
        return fitting[zlib.crc32(f"{self.name} {column}".encode()) % len(fitting)]

    def fits(self, column: Column) -> bool:
        """False for asynchronous layouts, if the row is about micro-batches: their steps have one micro-batch here.

        Also for the states of replicas of which only one has trained, and for updates and averages whose time is free.
        """
        names = [action.name for action in self.program]
        whole = not self.sets_micro_batches and not any(action.options.get("samples") for action in self.program)
        if "consistency" in self.settings and column.kind == "ps":
            return False
        if "tau" in self.settings and column.layout != "local" and self.refusals_of(self.tasks[0], column) == []:
            return False
        divided = (
            column.kind == "hogwild" and column.ranks > 1 and ({"save", "load_state"} & {*names} or "ema" in self.name)
        )
        return column.samples == SAMPLES or bool(whole and "sequences" not in names and not divided)

    def refusals_of(self, task: Task, column: Column) -> list[Rule]:
        """Rules by which a column refuses the row; none if it trains."""
        half = self.settings.get("precision") in ("bf16", "fp16")
        names = [name for name in self.settings if name != "precision" or half]
        fields = [rule for name in names for rule in (owned(name), *FIELDS.get(name, ()))]
        return [rule for rule in (*self.refusals, *fields, *COMMON) if rule.when(column, task)]


ROWS: list[Row] = []


def row(name: str, **options: Any) -> None:
    ROWS.append(Row(name, **options))


def texts(name: str, model: Callable[[], Any], **options: Any) -> Task:
    """Task of tokens with another model."""
    return replace(GPT, name=name, model=model, twin=None, **options)


def mlps(name: str, **options: Any) -> Task:
    return replace(MLP, name=name, model=lambda: mlp([6, 8, 8, 8, 5], **options), twin=None)


BITS = {"tolerance": 0.0}

row("plain", tasks=(GPT, MLP, MIXTURE))

# ------------------------------------------------------------------------------------------ precision and order of sums

row("fp32", settings={"precision": "fp32"}, tolerance=1e-4, in_torch=False)
for precision in ("fp64", "fp32", "bf16", "fp16"):
    row(
        f"reproducible {precision}",
        settings={"precision": precision, "reproducible": True},
        tasks=(GPT, MLP, MIXTURE) if precision in ("fp64", "fp32") else (GPT, MLP),
        in_torch=False,
        refusals=(NO_LOSS_SCALE,) if precision == "fp16" else (),
        **BITS,
    )
row("seed", settings={"seed": 3})
row("check_every", settings={"check_every": 1})
row("bucket_bytes", settings={"bucket_bytes": 1, "first_bytes": 1})
row(
    "first_bytes",
    settings={"bucket_bytes": 300, "first_bytes": 200},
    optimizer=lambda model: AdamW(lr=0.01),
    tolerance=1e-6,
)
row("trace", settings={"trace": True})
row(
    "device",
    settings={"device": "cuda"},
    tasks=(GPT,),
    refusals=(
        on("device: .* is for cpu, found cuda", "sgp", "hogwild"),
        on("device: servers and workers are on the host, found cuda", "ps"),
        everywhere('device: "cuda" needs CuPy'),
    ),
)
row("pool", settings={"pool": True}, one_rank={"pool": None}, needs_mpi=True)
row("clip", settings={"clip": 0.05})
row("clip adamw", settings={"clip": 0.05}, optimizer=lambda model: AdamW(lr=0.01, decay=0.1), tolerance=1e-6)
row(
    "compress all",
    settings={"compress": "topk:1", "precision": "fp32"},
    tolerance=1e-4,
    one_rank={"compress": None},
    in_torch=False,
)

# ------------------------------------------------------------------------------------------ micro-batches

for size in (1, 3, 8):
    row(
        f"micro_batch {size}",
        settings={"micro_batch": size, "batch": 8},
        refusals=(
            where(
                "microbatches: [13] of a step do not divide among 2 pipelines",
                lambda column, size=size: column.kind == "pp" and -(-8 // size) % column.teams > 0,
            ),
        ),
    )
row("accumulate", settings={"accumulate": 2, "batch": 8})
row("microbatches", settings={"microbatches": 3}, one_rank={"microbatches": None, "micro_batch": 2})
row("batch", settings={"batch": 8, "micro_batch": 2}, program=(do("epoch", samples=20, shuffle=False), TEST, STATE))
row(
    "drop_last",
    settings={"drop_last": True, "batch": 8, "micro_batch": 2},
    program=(do("epoch", samples=20, shuffle=False), TEST, STATE),
    in_torch=False,
)
row(
    "window",
    settings={"window": 4, "batch": 8, "micro_batch": 2},
    program=(do("epoch", samples=20), TEST, STATE),
    in_torch=False,
)
row(
    "batch of an epoch",
    program=(do("epoch", samples=20, batch=6, epoch=1), TEST, STATE),
    in_torch=False,
    refusals=(
        where(
            "microbatches: 3 of a step do not divide among 2 pipelines",
            lambda column: column.kind == "pp" and 3 % column.teams > 0,
        ),
    ),
)
row("batch_tokens", settings={"batch_tokens": 24}, tasks=(GPT,), program=(do("sequences"), TEST, STATE), in_torch=False)
for sizes in ((1, 8), (3, 1), (8, 3), (8, 5)):
    row(
        f"evaluate {sizes[1]} after {sizes[0]}",
        settings={"micro_batch": 2, "batch": 8},
        program=(
            do("step", samples=sizes[0]),
            do("evaluate", samples=sizes[1]),
            STEP,
            do("evaluate", samples=1, measure=False),
            STATE,
        ),
    )
row(
    "step of more",
    settings={"micro_batch": 2, "batch": 8},
    program=(do("step", samples=17), TEST, STATE),
    refusals=(on("micro-batches: expected at most . for each pipeline, found [59]", "pp"),),
)
row("stop", program=(STEP, do("step", stop=True), TEST, STATE))
for dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
    row(
        f"targets {dtype}",
        tasks=(replace(GPT, name="gpt full", data=full_tokens), MLP),
        program=(do("step", dtype=dtype), do("step", dtype=dtype), TEST, STATE),
    )
for dtype in ("int8", "int16", "int32"):
    row(
        f"ignored targets {dtype}",
        tasks=(GPT,),
        program=(do("step", dtype=dtype), do("step", dtype=dtype), TEST, STATE),
    )

# ------------------------------------------------------------------------------------------ optimizers

ADAMW = {"tolerance": 1e-6}


def changed(kind: Any) -> Any:
    """Optimizer in which every number has another value than the default."""
    numbers = {one.name: 0.9 * one.default or 0.1 for one in fields(kind) if "range" in one.metadata}
    return kind(lr=0.01, groups=[{"params": "*.bias", "lr": 0.05}], **numbers)


row("sgd", optimizer=lambda model: SGD(rate=0.3))
row("nesterov", optimizer=lambda model: SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1))
row(
    "adam",
    optimizer=lambda model: Adam(lr=0.01, betas=(0.7, 0.9), eps=1e-5, decay=0.1, ema=0.5),
    refusals=(NO_AVERAGE,),
    **ADAMW,
)
row("adam groups", optimizer=lambda model: Adam(lr=0.01, groups=[{"params": "*.bias", "lr": 0.05}]), **ADAMW)
row("adamw ema", optimizer=lambda model: AdamW(lr=0.01, ema=0.9), refusals=(NO_AVERAGE,), **ADAMW)
row("adamw", optimizer=lambda model: AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1), **ADAMW)
row(
    "lamb",
    optimizer=lambda model: LAMB(rate=0.01, beta1=0.8, beta2=0.95, eps=1e-5, decay=0.1, ema=0.5),
    in_torch=False,
    refusals=(*LAMB_RULES, NO_AVERAGE),
    **ADAMW,
)
row(
    "lamb groups",
    optimizer=lambda model: LAMB(lr=0.01, groups=[{"params": "0.*", "lr": 0.0}]),
    in_torch=False,
    refusals=LAMB_RULES,
    **ADAMW,
)
for kind in [kind for kind in OPTIMIZERS.values() if kind not in (SGD, Adam, AdamW, LAMB)]:
    row(
        kind.__name__, optimizer=lambda model, kind=kind: changed(kind), in_torch=False, refusals=(NO_AVERAGE,), **ADAMW
    )
row(
    "ema",
    optimizer=lambda model: SGD(lr=0.2, ema=0.7),
    program=(*PLAIN, do("evaluate", ema=True), do("predict", ema=True, room=True), do("state", ema=True), STEP, STATE),
    refusals=(NO_AVERAGE,),
)
SCHEDULES = {
    "constant": LRSchedule("constant", rate=0.1),
    "linear_warm_up": LRSchedule("linear_warm_up", rate=0.4, warm_up=3),
    "cosine": LRSchedule("cosine", rate=0.4, steps=4, floor=0.1),
    "warm_up_cosine": LRSchedule("warm_up_cosine", rate=0.4, warm_up=1, steps=4, floor=0.05),
}
for name, schedule in SCHEDULES.items():
    row(
        f"schedule {name}",
        optimizer=lambda model, schedule=schedule: SGD(lr=schedule, momentum=0.5),
        covers=(f"{name}.step",),
    )


def plateaued() -> ReduceLROnPlateau:
    """Schedule that has lowered its rate."""
    made = ReduceLROnPlateau(SCHEDULES["cosine"], patience=0, factor=0.3, cooldown=1, threshold=0.01, least=0.01)
    for loss in (2.0, 2.0, 1.0, 3.0):
        made.observe(loss)
    return made


def halving(step: int) -> float:
    return 0.4 / (1 + step)


row(
    "schedule on a plateau",
    optimizer=lambda model: SGD(lr=plateaued(), momentum=0.5),
)
row("schedule function", optimizer=lambda model: AdamW(lr=halving), **ADAMW)
row("rate between steps", program=(STEP, do("rate", value=0.4), STEP, do("rate", value=0.0), STEP, TEST, STATE))
GROUPS = {
    "group pattern": lambda model: [
        {"params": "0.*", "lr": 0.0},
        {"params": ["*.bias", "*.gain"], "weight_decay": 0.2},
    ],
    "group object": lambda model: [ParamGroup(model.items[0].parameters(), rate=0.0)],
    "group object inner": lambda model: [{"params": model.items[1].parameters(), "lr": 0.5, "weight_decay": 0.3}],
    "group object rest": lambda model: [{"params": model.items[-1].parameters(), "rate": 0.02, "decay": 0.0}],
    "group name": lambda model: [{"params": [one.name for one in named(model)[2:5]], "lr": 0.0}],
    "group schedule": lambda model: [ParamGroup("*.weight", lr=SCHEDULES["cosine"], decay=0.1)],
    "group of one": lambda model: [ParamGroup(named(model)[-1], rate=0.7)],
    "groups in order": lambda model: [ParamGroup("1.*", lr=0.0), ParamGroup("*", lr=0.3)],
}


def named(model: Any) -> list[Any]:
    """Parameters of a model, with names."""
    from parallel.nn.flat_params import FlatParams

    FlatParams(model)
    return model.parameters()


for name, groups in GROUPS.items():
    row(name, optimizer=lambda model, groups=groups: SGD(lr=0.1, momentum=0.9, decay=0.1, groups=groups(model)))
row("group adamw", optimizer=lambda model: AdamW(lr=0.01, groups=GROUPS["group object inner"](model)), **ADAMW)

# ------------------------------------------------------------------------------------------ flags, hooks, values


def decaying(model: Any) -> Any:
    return SGD(lr=0.1, momentum=0.9, decay=0.3)


def frozen(task: Task, unit: int) -> Task:
    return replace(task, name=f"{task.name} frozen {unit}", model=lambda: thawed(task.model(), unit))


def thawed(model: Any, unit: int) -> Any:
    model.items[unit].requires_grad_(False)
    return model


def undecayed(task: Task) -> Task:
    def model() -> Any:
        made = task.model()
        for number, parameter in enumerate(made.parameters()):
            parameter.decay = number % 2 == 0
        return made

    return replace(task, name=f"{task.name} undecayed", model=model)


row("decay", optimizer=decaying)
row("decay before", optimizer=decaying, tasks=(undecayed(GPT), undecayed(MLP)))
row(
    "decay after",
    optimizer=decaying,
    program=(do("decay", pattern="1.*", decays=False), do("decay", pattern="*.bias", decays=True), *PLAIN),
)
row("decay between", optimizer=decaying, program=(STEP, do("decay", pattern="*.weight", decays=False), *PLAIN))
row("frozen before", tasks=(frozen(GPT, 1), frozen(MLP, 1), frozen(MLP, 0), frozen(GPT, -1)))
row("frozen after", program=(do("freeze", pattern="1.*"), *PLAIN))
row("frozen between", program=(STEP, do("freeze", pattern="*.weight"), *PLAIN))
row("frozen all but one", program=(do("freeze", pattern="*"), do("freeze", pattern="2.*", trains=True), *PLAIN))
row("frozen clip", settings={"clip": 0.05}, program=(do("freeze", pattern="1.*"), *PLAIN))
RELEASED = (
    do("freeze", pattern="1.*"),
    *[STEP] * 4,
    do("freeze", pattern="1.*", trains=True),
    STEP,
    STEP,
    TEST,
    STATE,
)
for name, optimizer in {
    "sgd": decaying,
    "adam": lambda model: Adam(lr=0.01),
    "adamw": lambda model: AdamW(lr=0.01, decay=0.3),
}.items():
    row(
        f"released {name}",
        optimizer=optimizer,
        tolerance=1e-6,
        program=RELEASED,
    )
row(
    "released lamb",
    optimizer=lambda model: LAMB(lr=0.01),
    in_torch=False,
    refusals=LAMB_RULES,
    tolerance=1e-6,
    program=RELEASED,
)
row("hook", program=(do("hook", pattern="1.*", factor=2.0), STEP, STEP, do("unhook"), STEP, TEST, STATE))
row("hook in place", program=(STEP, do("hook", pattern="*.weight", factor=0.5, in_place=True), STEP, STEP, TEST, STATE))
row("hook clip", settings={"clip": 0.05}, program=(do("hook", pattern="0.*", factor=3.0), *PLAIN))
row("state loaded", program=(STEP, do("load_state", factor=1.5), STEP, STEP, TEST, STATE))
row("state loaded in part", program=(STEP, do("load_state", factor=0.5, only="1.*"), STEP, STEP, TEST, STATE))
row("edit", program=(do("edit", pattern="1.*", factor=0.5), *PLAIN), refusals=(NOT_HELD, READ_ONLY))
row(
    "edit between",
    program=(STEP, do("edit", pattern="1.*", factor=0.5), TEST, STEP, STEP, TEST, STATE),
    same_as=(STEP, do("load_state", factor=0.5, only="1.*"), TEST, STEP, STEP, TEST, STATE),
    refusals=(NOT_HELD, READ_ONLY),
)
for precision in ("fp32", "bf16", "fp16"):
    row(
        f"edit {precision}",
        settings={"precision": precision, "reproducible": True},
        program=(do("edit", pattern="1.*", factor=0.5), *PLAIN, do("edit", pattern="*", factor=2.0), TEST, STATE),
        same_as=(
            do("load_edited", pattern="1.*", factor=0.5),
            *PLAIN,
            do("load_edited", pattern="*", factor=2.0),
            TEST,
            STATE,
        ),
        in_torch=False,
        refusals=(NOT_HELD, NO_LOSS_SCALE) if precision == "fp16" else (NOT_HELD,),
        **BITS,
    )

# ------------------------------------------------------------------------------------------ checkpoints

SAVED = (STEP, STEP, do("save", epoch=3), do("reopen"), STEP, TEST, STATE)
row("saved", program=SAVED)
row("saved adamw", optimizer=lambda model: AdamW(lr=0.01, decay=0.1), program=SAVED, tolerance=1e-6)
row(
    "saved ema",
    optimizer=lambda model: SGD(lr=0.2, momentum=0.5, ema=0.7),
    program=(*SAVED, do("state", ema=True)),
    refusals=(NO_AVERAGE,),
)
row(
    "saved clip reproducible",
    settings={"clip": 0.05, "precision": "fp16", "reproducible": True},
    program=SAVED,
    refusals=(NO_LOSS_SCALE,),
    in_torch=False,
    **BITS,
)
row(
    "saved twice",
    program=(
        STEP,
        do("save", keep=1),
        STEP,
        do("save", keep=1, keep_best=1, score=2.0, note="later"),
        do("reopen"),
        STEP,
        TEST,
        STATE,
    ),
)
row(
    "saved over another run",
    program=(STEP, do("save"), do("restart"), STEP, do("save", overwrite=True), do("reopen"), STEP, TEST, STATE),
    in_torch=False,
)
for layout in ("dp", "zero1", "zero2", "zero3"):
    row(
        f"saved, then {layout}",
        optimizer=lambda model: Adam(lr=0.01),
        program=(STEP, STEP, do("save"), do("reopen", layout=layout), STEP, TEST, STATE),
        tolerance=1e-6,
    )

# ------------------------------------------------------------------------------------------ models and losses

row(
    "dropout",
    tasks=(texts("gpt dropout", gpt(dropout=0.3)), mlps("mlp dropout", dropout=0.3)),
    program=(STEP, do("step", numbers=100), STEP, TEST, STATE),
)
row("dropout used twice", tasks=(SHARED_DROPOUT,))
for kind in ("full", "selective", "full,none", "selective,full", True):
    row(
        f"recompute {kind}",
        tasks=(
            replace(GPT, name=f"gpt {kind}", model=gpt(recompute=kind)),
            *([mlps("mlp recompute", recompute=kind)] if kind in ("full", True) else []),
        ),
    )
row("gated", tasks=GATED_TASKS)
row("llama", tasks=(LLAMA,))
row("convnet", tasks=CONVOLUTIONS)
row("built by name", tasks=BUILT)
row("settings object", settings={"settings": Settings(clip=0.05, optimizer="lamb", batch=8)}, refusals=FIELDS["clip"])
row("example", settings={"example": MLP.batch(0, 2)}, tasks=(MLP,), one_rank={"example": None})
row(
    "frozen parameter",
    tasks=(FROZEN_GAIN,),
    refusals=(along("Scale 1: expected another placement along tp, found a value sharded along dimension -1", "tp"),),
)
row("regression", tasks=(REGRESSION,))
NOT_NORMED = (
    on("expected operators without buffers, which it does not update", *STYLES, "ps"),
    along("BatchNorm 1: expected another placement along tp", "tp"),
)
for task in NORMED:
    row(
        f"batch norm of {task.name}",
        settings={"micro_batch": 4, "batch": 8},
        tasks=(task,),
        refusals=(
            *NOT_NORMED,
            where(
                "microbatches: 2 of a step do not divide among 3 pipelines",
                lambda column: column.kind == "pp" and 2 % column.teams > 0,
            ),
        ),
    )
row(
    "batch norm of all replicas",
    settings={"accumulate": 1, "batch": 8},
    tasks=(SYNCHRONISED,),
    refusals=(*NOT_NORMED, on("layout: pp.* is for BatchNorm without sync", "pp")),
)
row(
    "smoothing",
    tasks=(
        replace(GPT, name="gpt smooth", loss=lambda: SoftmaxCrossEntropy(smoothing=0.2)),
        replace(MLP, name="mlp smooth", loss=lambda: SoftmaxCrossEntropy(0.1)),
    ),
)
row("weighted loss", tasks=(WEIGHTED,))
for task in LOSS_TASKS:
    row(f"loss of {task.name}", tasks=(task,))
for task in TEXT_LOSS_TASKS:
    row(
        f"loss of {task.name}",
        tasks=(task,),
        refusals=(
            along("loss: weights need whole scores|VocabularyCrossEntropy: expected targets that are integers", "tp"),
        ),
    )
row(
    "depths",
    tasks=(
        texts("gpt depths", lambda: DepthLayers(0.5, 1).of(gpt()(), 8)),
        texts("gpt depth 2", lambda: DepthLayers(0.3, 2).of(gpt(dropout=0.1)(), 8)),
    ),
)
ROUTERS = {
    "sigmoid": {"scores": "sigmoid"},
    "biases": {"scores": "sigmoid", "bias_rate": 0.1, "balance_loss": 0.0},
    "unnormalized": {"choices": 1, "normalize": False},
    "scale": {"scale": 2.5},
    "groups": {"choices": 2, "groups": 4, "chosen_groups": 2},
    "capacity": {"capacity": 0.6},
    "priority": {"capacity": 0.8, "priority": "score"},
    "noise": {"noise": True},
    "jitter": {"jitter": 0.1},
    "z_loss": {"z_loss": 0.01},
    "every": {"every": 2},
    "shared": {"shared": True},
    "experts": {"experts": 3},
}
for name, router in ROUTERS.items():
    biased = on("expected operators without buffers, which it does not update", *STYLES, "ps")
    task = replace(MIXTURE, name=f"mixture {name}", model=mixture(**router))
    row(f"router {name}", tasks=(task,), in_torch=False, refusals=(biased,) if name == "biases" else ())

# ------------------------------------------------------------------------------------------ transforms

for products in ("fp8", "mxfp8"):
    row(f"products {products}", settings={"products": products}, in_torch=False)
for spec in ("int8", "int4_g32", "int3_row"):
    row(f"fake_quant {spec}", settings={"fake_quant": spec}, in_torch=False)
row("fake_quant_inputs", settings={"fake_quant_inputs": "int8"}, in_torch=False)
row("fake_quant both", settings={"fake_quant": "int8", "fake_quant_inputs": "int8"}, in_torch=False)
row("prune", settings={"prune": 0.5, "steps": 4}, in_torch=False)
row("prune rows", settings={"prune": 0.3, "prune_pattern": "rows", "steps": 4}, in_torch=False)
row("prune 2:4", settings={"prune": 0.5, "prune_pattern": "2:4", "steps": 4}, in_torch=False)

# ------------------------------------------------------------------------------------------ meshes

row("tensor_shards", settings={"tensor_shards": 4}, tasks=(GPT,))
row(
    "tensor_shards reproducible",
    settings={"tensor_shards": 4, "reproducible": True},
    tasks=(GPT,),
    in_torch=False,
    **BITS,
)
row("sequence_parallel", settings={"sequence_parallel": True}, tasks=(GPT, texts("gpt dropout", gpt(dropout=0.3))))
row("sequence_parts", settings={"sequence_parts": 4}, tasks=(GPT,))
row(
    "sequence_parts reproducible",
    settings={"sequence_parts": 4, "reproducible": True},
    tasks=(GPT,),
    in_torch=False,
    **BITS,
)
HEADS_DIVIDE = where(
    "ulysses: expected a number of ranks that divides the 4 heads", lambda column: HEADS % column.size("cp") > 0
)
for context in ("ring", "allgather", "ulysses"):
    row(
        f"context {context}",
        settings={"context": context},
        tasks=(GPT,),
        one_rank={"context": None},
        refusals=(HEADS_DIVIDE,) if context == "ulysses" else (),
    )
HALF_A_CODE = 1 / 254
"""Largest error of an int8 code, as a part of the largest element."""
# Gradients of biases are sums over tokens that cancel in part, the errors of their codes do not.
row(
    "dispatch direct:int8",
    settings={"dispatch": "direct:int8", "precision": "fp32"},
    tolerance=4 * HALF_A_CODE,
    tasks=(MIXTURE,),
    one_rank={"dispatch": None},
    in_torch=False,
)
row(
    "dispatch hierarchical",
    settings={"dispatch": "hierarchical"},
    tasks=(MIXTURE,),
    one_rank={"dispatch": None},
    in_torch=False,
)
row("expert_shards", settings={"expert_shards": 2}, tasks=(MIXTURE,), one_rank={"expert_shards": None}, in_torch=False)
row(
    "overlap_expert_comm",
    settings={"overlap_expert_comm": True},
    tasks=(MIXTURE,),
    one_rank={"overlap_expert_comm": None},
    in_torch=False,
)

# ------------------------------------------------------------------------------------------ one kind of layout

row("stages", settings={"stages": 2}, one_rank={"stages": None}, tasks=(GPT,))
row("virtual", settings={"virtual": 2}, one_rank={"virtual": None}, tasks=(GPT,))
row("stage_ranks", settings={"stage_ranks": "1,1"}, one_rank={"stage_ranks": None}, tasks=(GPT,))
row("cuts", settings={"cuts": "0,1,4"}, one_rank={"cuts": None}, tasks=(GPT,))
row("memory", settings={"memory": 1e9}, one_rank={"memory": None}, tasks=(GPT,))
OF_SERVERS = {
    "servers": {"servers": 2},
    "replicas": {"servers": 2, "replicas": 2},
    "consistency async": {"consistency": "async"},
    "consistency": {"consistency": "ssp:2"},
    "slow": {"slow": "2:1.5"},
    "delay": {"delay": 0.001},
}
for name, some in OF_SERVERS.items():
    row(name, settings=some, tasks=(MLP,), one_rank=dict.fromkeys(some))
row(
    "record",
    settings={"record": "one", "replay": "two"},
    tasks=(MLP,),
    refusals=[on("record|replay|No such file", "ps")],
)
row("tau", settings={"tau": 2}, tasks=(MLP,), program=(*[STEP] * 4, TEST, STATE), in_torch=False)
row("group", settings={"group": 2}, tasks=(MLP,), one_rank={"group": None})
row("overlap", settings={"overlap": 0.5}, tasks=(MLP,), in_torch=False)
CLIENTS: dict[str, Any] = {"clients": 6, "client_fraction": 1.0, "local_epochs": 2, "label_shards": 1}
for name, value in CLIENTS.items():
    row(
        name,
        settings={name: value},
        tasks=(MLP,),
        program=(STEP, do("epoch", samples=24), STEP, TEST, STATE),
        in_torch=False,
    )

# ------------------------------------------------------------------------------------------ settings of other arguments

OTHERS: dict[str, Any] = {
    "data": "copy",
    "model": "gpt",
    "rate": 0.1,
    "decay": 0.2,
    "momentum": 0.5,
    "beta2": 0.9,
    "epochs": 2.0,
    "warm_up": 3,
    "length": 16,
    "tokenizer": "t.json",
    "loss": "l1",
    "class_weights": "1,2",
    "plateau": 2,
    "plateau_factor": 0.5,
    "early_stop": 3,
    "dropout": 0.1,
    "experts": "4",
    "depths": "0.5",
    "recompute": "full",
    "fault_tolerant": True,
}
"""Settings of the training program, which engines refuse."""
for name, value in OTHERS.items():
    row(
        f"other {name}",
        settings={"settings": Settings(**{name: value})},
        tasks=(MLP,),
        refusals=(everywhere(f"^{name}: expected an option of engines; .* has it"),),
    )

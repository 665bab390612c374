"""Random programs over the engine's public API: options, a layout, actions, and perhaps a fault of one rank."""

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from conformance.thread_communicator import run_threads

from parallel import SGD, Adam, AdamW, LRSchedule
from support.differential.cells import (
    Cell,
    Refusal,
    difference,
    engine_maker,
    reference,
    reports_of,
    settings_of,
    tolerance_of,
)
from support.differential.columns import COLUMNS, Column
from support.differential.faults import CAUSE, OTHER_BATCHES, FailingData, set_fault, trapped
from support.differential.programs import OWN, Action, EnginePlayer, Observation, do
from support.differential.rows import Row
from support.differential.rules import everywhere, trainable
from support.differential.tasks import GPT, LENGTH, MIXTURE, MLP, Task

ACTIONS = (
    *(do("step"),) * 6,
    do("step", samples=1),
    do("step", samples=5),
    do("step", numbers=40),
    do("evaluate"),
    do("evaluate", samples=3, measure=False),
    do("state"),
    do("freeze", pattern="1.*"),
    do("freeze", pattern="*.weight"),
    do("freeze", pattern="*", trains=True),
    do("decay", pattern="*.weight", decays=False),
    do("decay", pattern="*.bias", decays=True),
    do("hook", pattern="*.weight", factor=0.5),
    do("hook", pattern="1.*", factor=2.0, in_place=True),
    do("unhook"),
    do("rate", value=0.05),
    do("rate", value=0.2),
    do("load_state", factor=0.5),
    do("load_state", factor=1.5, only="1.*"),
    do("epoch", samples=11, batch=8),
)
"""Actions of a program; those that come up more often stand here more often."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"clip": 0.1},
    {"check_every": 1},
    {"bucket_bytes": 1, "first_bytes": 1},
    {"seed": 5},
    {"trace": True},
    {"reproducible": True},
    {"sequence_parallel": True},
    {"tensor_shards": 4},
    {"context": "ring"},
    {"overlap_expert_comm": True},
)

OPTIMIZERS = {
    "sgd": lambda model: SGD(lr=0.1, momentum=0.9, decay=0.1),
    "schedule": lambda model: SGD(lr=LRSchedule("cosine", rate=0.2, steps=5)),
    "adam": lambda model: Adam(lr=0.01, groups=[{"params": model.items[1].parameters(), "lr": 0.03}]),
    "adamw": lambda model: AdamW(lr=0.01, decay=0.2, groups=[{"params": "0.*", "lr": 0.0}]),
}

RAISING = ("forward", "backward", "hook", "evaluation", "data")
"""Places of `faults.raise_at`."""

IN_LOSS = ("loss", "count", "measure")
"""Places in a loss of the user's own."""

EXITING = {f"exit in {place}": place for place in ("forward", "backward", "hook", "evaluation")}
"""Kinds of faults that raise SystemExit, and their places."""

LEAVING = "exit between"
"""Kind of fault that raises SystemExit between two actions; ranks that are threads have no notice of it."""

DIFFERING = {
    "another clip": {"settings": {"clip": 0.3}},
    "another seed": {"settings": {"seed": 77}},
    "another precision": {"settings": {"precision": "fp32"}},
    "another rate": {"optimizer": lambda model: SGD(lr=0.11, momentum=0.9, decay=0.1)},
    "another optimizer": {"optimizer": lambda model: Adam(lr=0.1)},
    "another group": {"optimizer": lambda model: SGD(lr=0.1, groups=[{"params": "*", "lr": 0.3}])},
}
"""Options of one rank that differ from those of the others."""

CHANGING = (
    do("freeze", pattern="1.*"),
    do("decay", pattern="*", decays=False),
    do("rate", value=0.33),
    do("load_state", factor=3.0),
)
"""Actions of one rank that the others do not take, or that take other values there."""


@dataclass(frozen=True)
class Fault:
    """Fault of one rank: its kind, a key of the tables, and the action of the program from which on it holds."""

    kind: str
    rank: int
    action: int


@dataclass(frozen=True)
class Program:
    """Random program: cell of options, a task and a column, and a fault or None."""

    seed: int
    cell: Cell
    fault: Fault | None

    def __str__(self) -> str:
        row, task, column = self.cell
        actions = ", ".join(map(str, row.program))
        return f"seed {self.seed}: {column}; {task.name}; {dict(row.settings)}; {row.name}; {actions}; {self.fault}"


def draw(seed: int, columns: Sequence[Column] = COLUMNS, faulty: float = 0.6, leaving: bool = False) -> Program:
    """Program number `seed`, in one of the columns; with a fault, by this probability, on meshes of several ranks."""
    random = Random(seed)
    column = random.choice([one for one in columns if one.samples > 2])
    fits = [task for task in (GPT, MLP, MIXTURE) if trainable(task, column)]
    own_loss = column.size("tp") == 1 and random.random() < 0.5  # a cut vocabulary has a loss of its own
    task = trapped(random.choice(fits), own_loss)
    settings = _settings(random, task, column)
    name = random.choice([*OPTIMIZERS])
    program = [random.choice(ACTIONS) for _ in range(random.randint(2, 6))] + [do("step"), do("evaluate"), do("state")]
    refusals = []
    if {"context", "reproducible"} <= settings.keys():
        refusals += [everywhere("context: reproducible training needs allgather, found ring")]
    if "tensor_shards" in settings:  # then the model is cut on one rank too
        if own_loss and task.is_text:
            refusals += [everywhere("TrapLoss: expected a replicated value along tp, found a value sharded")]
        if "sequence_parallel" in settings and not task.is_text:
            refusals += [everywhere("sequence_parallel: expected a model of sequences")]
        if "sequence_parallel" in settings and LENGTH // column.size("cp") % settings["tensor_shards"]:
            refusals += [everywhere("expected a multiple of 4 tokens in every part along cp")]
    row = Row(
        name,
        settings=settings,
        optimizer=OPTIMIZERS[name],
        program=tuple(program),
        tolerance=1e-6,
        one_rank={"overlap_expert_comm": None, "context": None},
        refusals=refusals,
    )
    fault = None
    if column.ranks > 1 and random.random() < faulty:
        kinds = [*RAISING, *EXITING, *OTHER_BATCHES, *DIFFERING, *(one.name for one in CHANGING)]
        kinds += (IN_LOSS if own_loss else ()) + ((LEAVING,) * 8 if leaving else ())
        fault = Fault(random.choice(kinds), random.randrange(column.ranks), random.randrange(len(program)))
    return Program(seed, Cell(row, task, column), fault)


def _settings(random: Random, task: Task, column: Column) -> dict[str, Any]:
    """Two options, most of which the column has."""
    fitting = [some for some in OPTIONS if not Row("", settings=some).refusals_of(task, column)]
    return random.choice(fitting) | random.choice(fitting if random.random() < 0.9 else OPTIONS)


class FaultyPlayer(EnginePlayer):
    """Player whose rank has a fault."""

    def __init__(self, fault: Fault, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._fault = fault
        self._at = -1

    def play(self, program: Sequence[Action]) -> list[Observation]:
        """Run the program, with the fault from its action on."""
        for number, action in enumerate(program):
            self._at = number
            if number >= self._fault.action:
                self._arm()
            getattr(self, action.name)(**(action.options | self._changed(action)))
            if number == self._fault.action:
                self._change()
        return self.found

    def _arm(self) -> None:
        """Raise the fault from now on, if it is one that raises; at once, if it is between actions."""
        kind = self._fault.kind
        if kind in (*RAISING, *IN_LOSS):
            set_fault(kind)
        elif kind in EXITING:
            set_fault(EXITING[kind], SystemExit)
        elif kind == LEAVING:
            raise SystemExit(CAUSE)

    def _changed(self, action: Action) -> dict[str, Any]:
        """Values of this rank's action that differ from those of the others."""
        for other in CHANGING:
            same = other.name == action.name == self._fault.kind
            if same and self._at >= self._fault.action:
                return {name: value for name, value in other.options.items() if name != "pattern"}
        return {}

    def _change(self) -> None:
        for other in CHANGING:
            if other.name == self._fault.kind and other.name != "load_state":
                getattr(self, other.name)(**other.options)

    def batch(self, number: int, samples: int) -> tuple[Any, Any]:
        x, y = super().batch(number, samples)
        if self._fault.kind in OTHER_BATCHES and self._at >= self._fault.action:
            return OTHER_BATCHES[self._fault.kind](x, y)
        return x, y

    def data(self, samples: int) -> Any:
        return FailingData(*super().batch(100, samples))


def outcome(program: Program, comm: Any, folder: Path) -> Any:
    """Observations of this rank, or the error that it raises. Collective."""
    row, task, column = program.cell
    settings, optimizer, fault = settings_of(row, column), row.optimizer, program.fault
    mine = fault is not None and fault.rank == comm.Get_rank()
    set_fault()
    if mine and fault.kind in DIFFERING:
        other = DIFFERING[fault.kind]
        settings, optimizer = settings | other.get("settings", {}), other.get("optimizer", optimizer)
    make = engine_maker(task, optimizer, comm, settings)
    arguments = task, column, make, folder, reports_of(row, column)
    try:
        with FaultyPlayer(fault, *arguments) if mine else EnginePlayer(*arguments) as player:
            return player.play(row.program)
    except (Exception, SystemExit) as error:
        return Refusal(type(error).__name__, str(error), hasattr(error, OWN), time.monotonic())
    finally:
        set_fault()


def outcomes_on_threads(program: Program) -> list[Any]:
    """Outcomes of all ranks, which are threads."""
    with tempfile.TemporaryDirectory() as folder:
        return run_threads(program.cell.column.ranks, lambda comm: outcome(program, comm, Path(folder, "saved")))


NAMES_CAUSE = {
    **dict.fromkeys((*RAISING, *IN_LOSS, *EXITING, LEAVING), CAUSE),
    **dict.fromkeys(OTHER_BATCHES, r"rank|not finite|not a finite|is not below|below 0|from 0|lengths|expected"),
    **dict.fromkeys(DIFFERING, r"rank"),
    **{one.name: r"rank" for one in CHANGING},
}
"""Pattern of the cause in an error's text, by the kind of fault."""


LONGEST = 5.0
"""Seconds from the first rank's error to the last one's."""


def problem(program: Program, found: Sequence[Any]) -> str:
    """Text of what is wrong with a program's outcomes on all ranks; empty if nothing is."""
    refused = [one for one in found if isinstance(one, Refusal)]
    if not refused:
        return _wrong_result(program, found)
    if stuck := [one for one in refused if one.kind == "BrokenBarrierError"]:
        others = next((one for one in refused if one not in stuck), "ended")
        return f"{len(stuck)} of {len(found)} ranks wait for ever; another has {others}"
    if len(refused) < len(found):
        return f"an error on {len(refused)} of {len(found)} ranks only: {refused[0]}"
    if (apart := max(one.time for one in refused) - min(one.time for one in refused)) > LONGEST:
        return f"expected errors within {LONGEST} s, found {apart:.1f} s between them"
    return _wrong_error(program, refused)


def _wrong_error(program: Program, refused: Sequence[Refusal]) -> str:
    """What is wrong with an error that all ranks raise: expected by a rule, or for the fault, with its rank."""
    cell, fault = program.cell, program.fault
    rules = cell.row.refusals_of(cell.task, cell.column)
    if rules and all(any(rule.fits(one.kind, one.text) for rule in rules) for one in refused):
        return ""
    if fault is None:
        return f"expected {rules[0].text if rules else 'a result'}, found {refused[0]}"
    for one in refused:
        if not re.search(NAMES_CAUSE[fault.kind], one.text):
            return f"expected a text with {NAMES_CAUSE[fault.kind]!r}, found {one}"
        named = one.kind == "SystemExit" or re.search(rf"\brank {fault.rank}\b|\branks\b", one.text)
        if not named:
            return f"expected a text that names rank {fault.rank}, found {one}"
    return ""


def _wrong_result(program: Program, found: Sequence[Any]) -> str:
    """Difference between observations and those of one rank."""
    cell = program.cell
    expected = reference(cell)
    first_only = cell.column.averaged or cell.column.kind == "ps"  # replicas count their own updates
    for rank, one in enumerate(found[:1] if first_only else found):
        if text := difference(one, expected, tolerance_of(cell)):
            return f"silently different on rank {rank}: {text}"
    return ""

"""Public options by name, and those that the table's rows and columns use."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from types import FrameType
from typing import Any

from parallel import Engine, ParamGroup, nn
from parallel.engine.settings import DEFAULTS, Settings
from parallel.nn.depths import DepthLayers
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.router import RouterSettings
from parallel.optim.lr_schedules import SCHEDULES
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.param_groups import TORCH_NAMES, from_torch
from support.differential.cells import Cell, play
from support.differential.columns import COLUMNS, Column
from support.differential.rows import ROWS

METHODS = (
    *("__init__", "step", "evaluate", "predict", "model_on_one_rank", "batches", "state_dict", "load_state_dict"),
    *("save", "load"),
)
"""Methods of `Engine` with options."""

INTERFACES = (
    *("Operator", "Loss", "ArraySpec", "OperatorOutline", "PassMode", "StateBuffer", "generate", "with_weights"),
    *("from_autograd", "from_torch"),
)
"""Public names of `parallel.nn` without options of a training. `test_torch_modules` has the last two in all layouts."""


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public constructors and methods with options, by name."""
    yield from ((f"Engine.{name}".replace(".__init__", ""), getattr(Engine, name)) for name in METHODS)
    for kind in (*OPTIMIZERS.values(), ParamGroup, RouterSettings, ExpertLayers, DepthLayers):
        yield kind.__name__, kind.__init__  # type: ignore[misc]
    yield from SCHEDULES.items()
    for name in nn.__all__:
        if name not in INTERFACES:
            made = getattr(nn, name)
            yield name, made.__init__ if isinstance(made, type) else made


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of a function, without `self` and those of any name."""
    every = inspect.signature(function).parameters
    return {name: one for name, one in every.items() if name != "self" and "VAR" not in one.kind.name}


def public_options() -> set[str]:
    """Names of all public options, such as ``Settings.clip`` and ``AdamW.beta2``."""
    found = {f"Settings.{field.name}" for field in fields(Settings)}
    found |= {f"{name}.{option}" for name, function in public_functions() for option in options_of(function)}
    return found | {f"torch.{name}" for name in TORCH_NAMES}


def settings_in_use() -> set[str]:
    """Settings that some row or column sets to another value than the default."""
    every = [dict(one.settings) for one in (*ROWS, *COLUMNS)]
    every += [asdict(some["settings"]) for some in every if "settings" in some]
    return {
        f"Settings.{name}" for some in every for name, value in some.items() if value != getattr(DEFAULTS, name, None)
    }


class Calls:
    """Context that records which options of public functions get another value than the default."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self._functions: dict[int, list[tuple[str, dict[str, inspect.Parameter]]]] = {}  # codes may be equal: by id
        for name, function in public_functions():
            if hasattr(function, "__code__"):  # not that of `object`
                self._functions.setdefault(id(function.__code__), []).append((name, options_of(function)))

    def __enter__(self) -> "Calls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code is from_torch.__code__:
            self.used |= {f"torch.{name}" for name in frame.f_locals["given"] if name in TORCH_NAMES}
        for name, options in self._functions.get(id(frame.f_code), ()):
            mine = type(frame.f_locals.get("self")).__name__
            if mine in (name, "NoneType") or name.startswith("Engine"):
                self._note_options(name, options, frame.f_locals)

    def _note_options(self, name: str, options: Mapping[str, inspect.Parameter], values: Mapping[str, Any]) -> None:
        for option, parameter in options.items():
            if not _equal(values.get(option, parameter.default), parameter.default):
                self.used.add(f"{name}.{option}")


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # arrays
        return False


def options_in_use(comm: Any, folder: Any) -> set[str]:
    """Options that some row uses: all models and optimizers are made, and each program is run once on one rank."""
    seen: set[Any] = set()
    with Calls() as calls:
        for row in ROWS:
            for task in row.tasks:
                rate = row.optimizer(task.model()).rate
                task.loss()
                if callable(rate):
                    rate(1)
            kind = str((row.program, "settings" in row.settings, "example" in row.settings))
            if kind not in seen and not row.needs_mpi and not row.refusals_of(row.tasks[0], ALONE):
                seen.add(kind)
                play(Cell(row, row.tasks[0], ALONE), comm, folder / str(len(seen)))
    return settings_in_use() | calls.used | {option for row in ROWS for option in row.covers}


ALONE = Column(1, {"layout": "dp"})
"""Column of one rank."""

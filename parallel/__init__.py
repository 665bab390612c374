"""Training on NumPy and CuPy arrays with MPI alone: data-parallel, ZeRO, parameter server, pipeline."""

# Imports no MPI: programs start their watchdog before it.
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of `EXPORTS`, for type checkers
    from collectives.communicator import Communicator as Communicator
    from parallel import nn as nn
    from parallel.checkpoint.step_folders import CheckpointError as CheckpointError
    from parallel.data.datasets import ArrayDataset as ArrayDataset
    from parallel.data.sampler import Batch as Batch
    from parallel.data.sampler import Sampler as Sampler
    from parallel.engine.settings import Settings as Settings
    from parallel.optim.lr_schedules import LRSchedule as LRSchedule
    from parallel.optim.optimizer import Optimizer as Optimizer
    from parallel.optim.optimizers import LAMB as LAMB
    from parallel.optim.optimizers import SGD as SGD
    from parallel.optim.optimizers import Adam as Adam
    from parallel.optim.optimizers import AdamW as AdamW
    from parallel.optim.param_groups import ParamGroup as ParamGroup
    from parallel.optim.plateau import EarlyStop as EarlyStop
    from parallel.optim.plateau import ReduceLROnPlateau as ReduceLROnPlateau
    from parallel.runtime.consistency_check import ParameterMismatch as ParameterMismatch
    from parallel.runtime.consistency_check import RankMismatch as RankMismatch
    from parallel.runtime.consistency_check import StepFailed as StepFailed
    from parallel.runtime.step_report import Evaluation as Evaluation
    from parallel.runtime.step_report import StepReport as StepReport
    from parallel.trainer.engine import Engine as Engine


def _require(package: str) -> None:
    """Raise ImportError if importing `package` would find another file than the package next to this one."""
    root, spec = Path(__file__).resolve().parents[1], find_spec(package)
    found = Path(spec.origin).resolve() if spec and spec.origin else None
    if found != root / package / "__init__.py":
        raise ImportError(
            f"{__name__} needs the package {package} of chorus-mpi in {root}, found {found or 'none'}: "
            "rename that file if it is yours, or install chorus-mpi into an environment of its own"
        )


_require("collectives")
_require("quant")

EXPORTS = {
    "parallel.trainer.engine": "Engine",
    "parallel.engine.settings": "Settings",
    "parallel.optim.optimizer": "Optimizer",
    "parallel.optim.optimizers": "SGD Adam AdamW LAMB",
    "parallel.optim.param_groups": "ParamGroup",
    "parallel.optim.lr_schedules": "LRSchedule",
    "parallel.optim.plateau": "EarlyStop ReduceLROnPlateau",
    "parallel.data.datasets": "ArrayDataset",
    "parallel.data.sampler": "Batch Sampler",
    "parallel.runtime.step_report": "Evaluation StepReport",
    "parallel.runtime.consistency_check": "ParameterMismatch RankMismatch StepFailed",
    "parallel.checkpoint.step_folders": "CheckpointError",
    "collectives.communicator": "Communicator",
}
"""Public names by the module that has them."""

_MODULE_OF = {name: module for module, names in EXPORTS.items() for name in names.split()}

__all__ = ["nn", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "nn":
        return import_module("parallel.nn")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

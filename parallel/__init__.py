"""Training on NumPy and CuPy arrays with MPI alone: data-parallel, ZeRO, parameter server, pipeline."""

# Imports no MPI: programs start their watchdog before it.
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


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
    "parallel.optim.optimizers": "SGD Adam AdamW LAMB Optimizer",
    "parallel.optim.param_groups": "ParamGroup",
    "parallel.optim.lr_schedules": "LRSchedule",
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

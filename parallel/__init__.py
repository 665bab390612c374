"""Training on NumPy and CuPy arrays with MPI alone: data-parallel, ZeRO, parameter server, pipeline."""

# Imports no MPI: programs start their watchdog before it.
from importlib.util import find_spec
from pathlib import Path


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

"""Quartiles of samples, writing of JSON reports and figures, and checks that files can be written."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")


def quartiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    return dict(zip(("q1", "median", "q3"), np.quantile(values, (0.25, 0.5, 0.75)).tolist(), strict=True))


def write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def save_figure(path: str | Path, figure: Any, dpi: int) -> None:
    """Write a figure of matplotlib to a file, creating its folder, and close it."""
    import matplotlib.pyplot as plt

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def read_report(path: Path, what: str, make: Callable[[bytes], Result]) -> Result:
    """Result of `make` for the content of a file. ValueError if it has another form than `what`."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no plain file")
        return make(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: expected {what}, found no such file") from None
    except FORM_ERRORS as error:
        found = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: expected {what}, found another form ({found})") from error


FORM_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of a reader that finds other values than those it expects."""

PICTURES = (".png", ".pdf", ".svg", ".jpg")
"""Suffixes of pictures."""


def check_folder(folder: Path) -> None:
    """Create a folder and check that files can be created in it. OSError if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:  # which may name the temporary file
        raise type(error)(f"{folder}: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Check that a file can be written at `path`, creating its folder. OSError if not."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no plain file")
    if path.parent.exists() and not path.parent.is_dir():
        raise NotADirectoryError(f"{path.parent} is no folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} may not be written")
    check_folder(path.parent)

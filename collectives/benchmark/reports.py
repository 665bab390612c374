"""Summary statistics and JSON files of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles."""
    return dict(zip(("q1", "median", "q3"), np.quantile(values, (0.25, 0.5, 0.75)).tolist(), strict=True))


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Write all results as JSON, unless there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")

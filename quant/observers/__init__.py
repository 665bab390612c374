"""Observers of activation ranges for calibration.

Observers take batches on any number of ranks. `allreduce` gives exactly the result of one observer that saw all.
"""

from collections.abc import Callable

from quant.observers.histogram import Entropy, Histogram, MeanSquare, Percentile
from quant.observers.ranges import Ema, MinMax
from quant.spec.quant_spec import QuantSpec

OBSERVERS: dict[str, Callable[[QuantSpec], MinMax | Ema | Histogram]] = {
    "minmax": lambda spec: MinMax(),
    "ema": lambda spec: Ema(),
    "percentile": lambda spec: Percentile(),
    "meansquare": lambda spec: MeanSquare(spec.bits, spec.symmetric),
    "entropy": lambda spec: Entropy(spec.bits, spec.symmetric),
}
"""Observers that give a range, by name: functions of the spec of the codes."""

__all__ = ["OBSERVERS", "Ema", "Entropy", "Histogram", "MeanSquare", "MinMax", "Percentile"]

"""Observers of activation ranges for calibration.

Observers take batches on any number of ranks; `merge` and `allreduce` give exactly the result of one observer that saw
all batches.
"""

from quant.observers.clipping import Entropy, MeanSquare, Percentile
from quant.observers.histogram import Histogram
from quant.observers.ranges import Ema, MinMax

OBSERVERS = {kind.__name__.lower(): kind for kind in (MinMax, Ema, Percentile, MeanSquare, Entropy)}
"""Observers that give a range, by name."""

__all__ = ["OBSERVERS", "Ema", "Entropy", "Histogram", "MeanSquare", "MinMax", "Percentile"]

"""What is seen of activations while a model runs on samples, and the ranges that codes should cover.

Observers see batch after batch, on any number of ranks, and `merge` or `allreduce` gives what one observer would have
seen that had got it all: exactly, for every one of them.
"""

from quant.observers.clipping import Entropy, MeanSquare, Percentile
from quant.observers.histogram import Histogram
from quant.observers.ranges import Ema, MinMax

OBSERVERS = {kind.__name__.lower(): kind for kind in (MinMax, Ema, Percentile, MeanSquare, Entropy)}
"""Those that give a range, by name."""

__all__ = ["OBSERVERS", "Ema", "Entropy", "Histogram", "MeanSquare", "MinMax", "Percentile"]

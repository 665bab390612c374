"""Feed-forward layers of a transformer's block."""

from parallel.nn.activation import GELU
from parallel.nn.linear import Linear
from parallel.nn.operator import Init, Operator


def feed_forward(width: int, hidden: int, init: Init, init_out: Init) -> list[Operator]:
    """Operators from vectors of `width` over `hidden` features to `width`, with these initial weights."""
    return [Linear(width, hidden, init=init), GELU(), Linear(hidden, width, init=init_out)]

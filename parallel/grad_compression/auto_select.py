"""Choice of the fastest compressor, or none, by all ranks from measurements."""

from __future__ import annotations

from collectives import Communicator
from collectives.compressed import QuantCodec
from collectives.compressed.compression_model import fitted, forecast
from parallel.grad_compression import NONE
from parallel.nn.flat_params import BLOCK
from quant import grouped

WIDTHS = {"int8": 8, "int4": 4}
"""What is tried, by name: bits. Those that change a gradient more are nobody's choice but the user's."""


def choose(comm: Communicator, count: int) -> tuple[str, str]:
    """The name of the quicker one, "none" if plain sums of so many float32 are quicker still; and why. Collective.

    Within a node nothing is measured: reading a neighbour's memory is quicker than encoding one's own.
    """
    if len(set(comm.nodes or (0,))) == 1:
        return NONE, "plain is quicker within a node"
    wire = fitted(comm)
    found = {
        name: forecast(comm, count, QuantCodec(grouped(bits, BLOCK, "fp32")), wire, feedback=True)
        for name, bits in WIDTHS.items()
    }
    best = min(found, key=lambda name: found[name].encoded)
    told = "; ".join(f"{name}: {made}" for name, made in found.items())
    return (best, f"{best} ({told})") if found[best].pays else (NONE, f"plain is quicker ({told})")

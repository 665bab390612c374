"""Choice of int8, int4 or plain sums by predicted time, from measurements of network and kernels on all ranks."""

from collectives import Communicator
from collectives.compressed import QuantCodec
from collectives.compressed.compression_model import fitted, forecast
from parallel.engine.grad_compression import NONE
from parallel.nn.flat_params import BLOCK
from quant import grouped

WIDTHS = {"int8": 8, "int4": 4}
"""Bits of the candidates; compressors with larger errors must be requested by name."""


def choose(comm: Communicator, count: int) -> tuple[str, str]:
    """("int8" or "int4" if one of them is predicted to sum `count` float32 faster than plain, else "none"; the reason).

    Collective. Always "none" on a single node, where reading a neighbour's memory is faster than encoding.
    """
    if len(set(comm.nodes or (0,))) == 1:
        return NONE, "plain is quicker within a node"
    wire = fitted(comm)
    found = {
        name: forecast(comm, count, QuantCodec(grouped(bits, BLOCK, "fp32")), wire, feedback=True)
        for name, bits in WIDTHS.items()
    }
    best = min(found, key=lambda name: found[name].encoded)
    reason = "; ".join(f"{name}: {cost}" for name, cost in found.items())
    return (best, f"{best} ({reason})") if found[best].pays else (NONE, f"plain is quicker ({reason})")

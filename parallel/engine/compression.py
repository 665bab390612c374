"""Gradient compression of an engine, from `Settings.compress`: validity, choice of "auto", and the factory."""

from dataclasses import replace

import numpy as np

from collectives import Communicator
from collectives.compressed import QuantCodec
from collectives.compressed.compression_model import fitted, forecast
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.grad_compression import AUTO, COMPRESSORS, NONE, CompressorFactory, parse
from parallel.engine.settings import Settings
from parallel.nn.flat_params import BLOCK
from parallel.optim.precision import PRECISIONS
from parallel.sharding.mesh import Mesh
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


def resolve_compression(
    settings: Settings, comm: Communicator, mesh: Mesh, length: int
) -> tuple[Settings, tuple[str, ...]]:
    """Settings with ``compress="auto"`` decided, and remarks on it, for a model of `length` elements. Collective.

    Ranks with the same shards of the same stage measure; the choice of rank 0's is that of all.
    """
    if settings.compress != AUTO:
        return settings, ()
    rank, groups = comm.Get_rank(), mesh.groups(mesh.summed.sizes)
    with comm.Split(next(at for at, ranks in enumerate(groups) if rank in ranks), rank) as replicas:
        chosen, why = comm.bcast(choose(replicas, length // len(groups)))
    return replace(settings, compress=chosen), (f"compress {AUTO}: {why}",)


def compressor_of(compress: str) -> CompressorFactory | None:
    return None if compress == NONE else parse(compress)


def check_compression(settings: Settings, layout: str) -> None:
    """Raise ValueError if `settings.compress` is unknown or does not fit the layout or the other settings."""
    compress = settings.compress
    if compress == NONE:
        return
    if compress != AUTO:
        parse(compress)
    if LAYOUTS[layout].divided:
        whole = ", ".join(name for name, line in LAYOUTS.items() if not line.divided)
        why = f"gradients are compressed only where every rank has the whole sum ({whole}), and the layout is {layout}"
    elif settings.reproducible:
        why = "a reproducible training adds gradients as they are, in canonical order"
    elif PRECISIONS[settings.precision].wide != np.float32:
        why = f"gradients are to be float32, and in {settings.precision} they are not"
    elif settings.device != "cpu" and compress == AUTO:
        expected = f"{NONE} or one of {', '.join(COMPRESSORS)} on {settings.device}"
        raise ValueError(f"compress: expected {expected}, since {AUTO} times the host; found {compress}")
    else:
        return
    raise ValueError(f"compress: expected {NONE}, since {why}; found {compress}")

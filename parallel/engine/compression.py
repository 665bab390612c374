"""Gradient compression of an engine, from `Settings.compress`: validity, choice of "auto", and the factory."""

import numpy as np

from collectives import Communicator
from parallel.data_parallel.layouts import LAYOUTS
from parallel.engine.settings import Settings
from parallel.grad_compression import AUTO, NONE, CompressorFactory, parse
from parallel.grad_compression.auto_select import choose
from parallel.optim.precision import PRECISIONS


def choose_compression(comm: Communicator, compress: str, length: int) -> tuple[str, tuple[str, ...]]:
    """Compression to use for sums of `length` elements, and remarks on it: "auto" is decided here. Collective."""
    if compress != AUTO:
        return compress, ()
    chosen, why = choose(comm, length)
    return chosen, (f"compress {AUTO}: {why}",)


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
    elif settings.device != "cpu":
        why = f"gradients on {settings.device} are not compressed"
    else:
        return
    raise ValueError(f"compress: expected {NONE}, since {why}; found {compress}")

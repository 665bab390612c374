"""Table of averaging styles: options, limits and constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives import Communicator
from parallel.data_parallel.run_context import RunContext
from parallel.decentralized import gossip, group_averaging, hogwild, local_sgd
from parallel.decentralized.averaging_style import AveragingStyle
from parallel.engine.settings import Settings
from parallel.runtime.vector_memory import VectorAllocator
from quant.types import Array


class StyleOptions(NamedTuple):
    """Options of a style; None selects the style's default.

    Attributes
    ----------
    tau : int or None
        local: steps between averages; group: steps between global averages; sgp: steps that a message may be late.
    group : int or None
        Ranks of a group.
    """

    tau: int | None = None
    group: int | None = None


class StyleEntry(NamedTuple):
    """Entry of `STYLES`.

    Attributes
    ----------
    make : callable (context, vector, options) -> AveragingStyle
    buffers : callable (bytes of the vector, options) -> int
        Bytes of memory besides the replica.
    options : tuple of str
        Supported fields of `StyleOptions`.
    least : int
        Smallest `tau`.
    memory : callable (communicator, device) -> VectorAllocator
        Allocator of the weights.
    precisions : tuple of str or None
        Supported precisions; None for all.
    devices : tuple of str
    """

    make: Callable[[RunContext, Array, StyleOptions], AveragingStyle]
    buffers: Callable[[int, StyleOptions], int] = lambda nbytes, options: 0
    options: tuple[str, ...] = ()
    least: int = 1
    memory: Callable[[Communicator, str], VectorAllocator] = VectorAllocator
    precisions: tuple[str, ...] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _local(context: RunContext, vector: Array, options: StyleOptions) -> AveragingStyle:
    return local_sgd.LocalSGD(context, vector, _or(options.tau, local_sgd.TAU))


def _groups(context: RunContext, vector: Array, options: StyleOptions) -> AveragingStyle:
    most = _or(options.group, group_averaging.default_size(context.comm.Get_size()))
    return group_averaging.GroupAveraging(context, vector, most, _or(options.tau, group_averaging.TAU))


def _gossip(context: RunContext, vector: Array, options: StyleOptions) -> AveragingStyle:
    return gossip.Gossip(context, vector, _or(options.tau, 0))


def _gossip_buffers(nbytes: int, options: StyleOptions) -> int:
    return nbytes + 2 * (_or(options.tau, 0) + 1) * (gossip.HEAD + nbytes)


STYLES = {
    "local": StyleEntry(_local, options=("tau",)),
    "group": StyleEntry(_groups, lambda nbytes, options: nbytes, options=("tau", "group")),
    "sgp": StyleEntry(_gossip, _gossip_buffers, options=("tau",), least=0, devices=("cpu",)),
    "hogwild": StyleEntry(
        lambda context, vector, options: hogwild.Hogwild(context, vector),
        memory=hogwild.SharedWindow,
        precisions=("fp32", "fp64"),  # of half weights every rank would have a master of its own
        devices=("cpu",),
    ),
}


def refuse(settings: Settings, ranks: int) -> None:
    """Raise ValueError for settings that a style does not support; the message names the setting."""
    name, options = settings.layout, StyleOptions(settings.tau, settings.group)
    if name not in STYLES:
        raise ValueError(f"layout: expected one of {', '.join(STYLES)}, found {name!r}")
    line = STYLES[name]
    if settings.device not in line.devices:
        raise ValueError(f"device: {name} is for {' and '.join(line.devices)}, found {settings.device}")
    for option, value in options._asdict().items():
        if value is not None and option not in line.options:
            raise ValueError(f"{option}: {name} has none, found {value}")
    if options.tau is not None and options.tau < line.least:
        raise ValueError(f"tau: expected {line.least} steps or more, found {options.tau}")
    if options.group is not None and not 2 <= options.group <= max(2, ranks):
        raise ValueError(f"group: expected 2 to {max(2, ranks)} of {ranks} ranks, found {options.group}")
    if line.precisions is not None and settings.precision not in line.precisions:
        raise ValueError(f"precision: {name} has {' or '.join(line.precisions)}, found {settings.precision}")
    if settings.reproducible:
        raise ValueError(f"reproducible: with {name} other numbers of ranks learn otherwise; leave it out")
    if settings.check_every:
        found = settings.check_every
        raise ValueError(f"check_every: with {name} ranks have different weights; leave it out, found {found}")

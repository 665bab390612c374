"""Table of averaging styles: options, limits and constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives import Communicator
from parallel.data_parallel.run_context import RunContext
from parallel.decentralized import gossip, group_averaging, hogwild, local_sgd
from parallel.decentralized.averaging_style import AveragingStyle
from parallel.engine.settings import STYLE_FIELDS, Settings
from parallel.runtime.vector_memory import VectorAllocator
from quant.types import Array


class StyleEntry(NamedTuple):
    """Entry of `STYLES`.

    `options` are the supported fields of `STYLE_FIELDS`: `tau` is the number of steps between averages (local), between
    global averages (group), or that a message may be late (sgp); `group` the number of ranks in a group.
    """

    make: Callable[[RunContext, Array, Settings], AveragingStyle]
    buffers: Callable[[int, Settings], int] = lambda nbytes, settings: 0  # memory besides the replica of nbytes
    options: tuple[str, ...] = ()
    least: int = 1  # smallest `tau`
    memory: Callable[[Communicator, str], VectorAllocator] = VectorAllocator  # of the weights
    precisions: tuple[str, ...] | None = None  # None for all
    devices: tuple[str, ...] = ("cpu", "cuda")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _groups(context: RunContext, vector: Array, settings: Settings) -> AveragingStyle:
    most = _or(settings.group, group_averaging.default_size(context.comm.Get_size()))
    return group_averaging.GroupAveraging(context, vector, most, _or(settings.tau, group_averaging.TAU))


STYLES = {
    "local": StyleEntry(
        lambda context, vector, settings: local_sgd.LocalSGD(context, vector, _or(settings.tau, local_sgd.TAU)),
        options=("tau",),
    ),
    "group": StyleEntry(_groups, lambda nbytes, settings: nbytes, options=("tau", "group")),
    "sgp": StyleEntry(
        lambda context, vector, settings: gossip.Gossip(context, vector, settings.tau or 0),
        lambda nbytes, settings: nbytes + 2 * ((settings.tau or 0) + 1) * (gossip.HEAD + nbytes),
        options=("tau",),
        least=0,
        devices=("cpu",),
    ),
    "hogwild": StyleEntry(
        lambda context, vector, settings: hogwild.Hogwild(context, vector),
        memory=hogwild.SharedWindow,
        precisions=("fp32", "fp64"),  # with half weights every rank would have its own master weights
        devices=("cpu",),
    ),
}


def refuse(settings: Settings, ranks: int) -> None:
    """Raise ValueError for settings that a style does not support; the message names the setting."""
    name, tau, group = settings.layout, settings.tau, settings.group
    if name not in STYLES:
        raise ValueError(f"layout: expected one of {', '.join(STYLES)}, found {name!r}")
    entry = STYLES[name]
    if settings.device not in entry.devices:
        raise ValueError(f"device: {name} is for {' and '.join(entry.devices)}, found {settings.device}")
    for option in STYLE_FIELDS:
        if (value := getattr(settings, option)) is not None and option not in entry.options:
            raise ValueError(f"{option}: {name} has none, found {value}")
    if tau is not None and tau < entry.least:
        raise ValueError(f"tau: expected {entry.least} steps or more, found {tau}")
    if group is not None and not 2 <= group <= max(2, ranks):
        raise ValueError(f"group: expected 2 to {max(2, ranks)} of {ranks} ranks, found {group}")
    if entry.precisions is not None and settings.precision not in entry.precisions:
        raise ValueError(f"precision: {name} has {' or '.join(entry.precisions)}, found {settings.precision}")
    if settings.reproducible:
        raise ValueError(f"reproducible: with {name} the result depends on the number of ranks; leave it out")
    if settings.check_every:
        found = settings.check_every
        raise ValueError(f"check_every: with {name} ranks have different weights; leave it out, found {found}")

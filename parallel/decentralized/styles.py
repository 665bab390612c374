"""The table of styles: what each of them may be told, what it refuses, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives import Communicator
from parallel.data_parallel.run_context import Context
from parallel.runtime.vector_memory import Memory
from parallel.nn.operator import Array
from parallel.decentralized import gossip
from parallel.decentralized import group_averaging as groups
from parallel.decentralized import hogwild
from parallel.decentralized import local_sgd as local
from parallel.replicas.style import Style


class Options(NamedTuple):
    """What a style may be told; None leaves it to the style.

    Attributes
    ----------
    tau : int or None
        local: steps from mean to mean; group: steps from one meeting of all to the next; sgp: steps that a message may
        be late.
    group : int or None
        Ranks of a group.
    """

    tau: int | None = None
    group: int | None = None


class Line(NamedTuple):
    """A style.

    Attributes
    ----------
    make : callable (context, vector, options) -> Style
    buffers : callable (bytes of the vector, options) -> int
        Bytes that it keeps besides the replica.
    options : tuple of str
        Those of `Options` that it knows.
    least : int
        The smallest `tau`.
    memory : callable (communicator, device) -> Memory
        Where the weights come from.
    precisions : tuple of str
        None for all.
    devices : tuple of str
    """

    make: Callable[[Context, Array, Options], Style]
    buffers: Callable[[int, Options], int] = lambda nbytes, options: 0
    options: tuple[str, ...] = ()
    least: int = 1
    memory: Callable[[Communicator, str], Memory] = Memory
    precisions: tuple[str, ...] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")


def _or(said: int | None, usual: int) -> int:
    return usual if said is None else said


def _local(context: Context, vector: Array, options: Options) -> Style:
    return local.Local(context, vector, _or(options.tau, local.TAU))


def _groups(context: Context, vector: Array, options: Options) -> Style:
    most = _or(options.group, groups.usual(context.comm.Get_size()))
    return groups.Groups(context, vector, most, _or(options.tau, groups.TAU))


def _gossip(context: Context, vector: Array, options: Options) -> Style:
    return gossip.Gossip(context, vector, _or(options.tau, 0))


def _gossip_buffers(nbytes: int, options: Options) -> int:
    return nbytes + 2 * (_or(options.tau, 0) + 1) * (gossip.HEAD + nbytes)


STYLES = {
    "local": Line(_local, options=("tau",)),
    "group": Line(_groups, lambda nbytes, options: nbytes, options=("tau", "group")),
    "sgp": Line(_gossip, _gossip_buffers, options=("tau",), least=0, devices=("cpu",)),
    "hogwild": Line(
        lambda context, vector, options: hogwild.Hogwild(context, vector),
        memory=hogwild.Window,
        precisions=("fp32", "fp64"),  # of half weights every rank would have a master of its own
        devices=("cpu",),
    ),
}


def refuse(name: str, options: Options, ranks: int, precision: str, reproducible: bool, check_every: int) -> None:
    """Raise ValueError for what a style cannot do; it names the option."""
    if name not in STYLES:
        raise ValueError(f"layout: expected one of {', '.join(STYLES)}, found {name!r}")
    line = STYLES[name]
    for option, value in options._asdict().items():
        if value is not None and option not in line.options:
            raise ValueError(f"{option}: {name} has none, found {value}")
    if options.tau is not None and options.tau < line.least:
        raise ValueError(f"tau: expected {line.least} steps or more, found {options.tau}")
    if options.group is not None and not 2 <= options.group <= max(2, ranks):
        raise ValueError(f"group: expected 2 to {max(2, ranks)} of {ranks} ranks, found {options.group}")
    if line.precisions is not None and precision not in line.precisions:
        raise ValueError(f"precision: {name} has {' or '.join(line.precisions)}, found {precision}")
    if reproducible:
        raise ValueError(f"reproducible: with {name} other numbers of ranks learn otherwise; leave it out")
    if check_every:
        raise ValueError(f"check_every: with {name} ranks have different weights; leave it out, found {check_every}")

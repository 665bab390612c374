"""Table of decentralised averaging styles: constructors, supported options and precisions, memory."""

from collections.abc import Callable
from typing import NamedTuple

from collectives import Communicator
from parallel.asynchronous.decentralized import gossip, hogwild
from parallel.asynchronous.decentralized.averaging_style import AveragingStyle, LocalSGD
from parallel.asynchronous.decentralized.client_sampler import client_sampler
from parallel.asynchronous.decentralized.federated import FederatedAverage, refusal
from parallel.asynchronous.decentralized.group_averaging import GroupAveraging, default_size
from parallel.data.sampler import Sampler
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.settings import Settings
from parallel.optim.precision import PRECISIONS
from parallel.runtime.vector_memory import VectorAllocator
from quant.types import Array


class StyleEntry(NamedTuple):
    """Decentralised averaging style: constructor, buffer bytes, and supported precisions and devices.

    `tau` is the number of steps between averages (local), between global averages (group), or that a message may be
    late (sgp). `group` the most places (one or two ranks) in a group. `refusal` returns a message about settings that
    cannot be used on this number of ranks, or None.
    """

    make: Callable[[RunContext, Array, Settings], AveragingStyle]
    buffers: Callable[[int, Settings], int] = lambda nbytes, settings: 0  # memory besides the replica of nbytes
    least: int = 1  # smallest `tau`
    memory: Callable[[Communicator, str], VectorAllocator] = VectorAllocator  # of the weights
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    devices: tuple[str, ...] = ("cpu", "cuda")
    refusal: Callable[[Settings, int], str | None] = lambda settings, ranks: None
    shares_weights: bool = False  # all ranks have the same array
    engine: str = f"{__package__}.replica_engine:ReplicaEngine"  # by name, because the module imports this table
    sampler: Callable[..., Sampler] | None = None  # of rounds, whose micro-batches have the samples of a client


STYLES = {
    "local": StyleEntry(lambda context, vector, settings: LocalSGD(context, vector, settings.tau or 8)),
    "group": StyleEntry(
        lambda context, vector, settings: GroupAveraging(
            context, vector, settings.group or default_size(context.comm.Get_size()), settings.tau or 10
        ),
        lambda nbytes, settings: nbytes,
    ),
    "sgp": StyleEntry(
        lambda context, vector, settings: gossip.Gossip(context, vector, settings.tau or 0),
        lambda nbytes, settings: nbytes + 2 * ((settings.tau or 0) + 1) * (gossip.HEAD + nbytes),
        least=0,
        devices=("cpu",),
    ),
    "hogwild": StyleEntry(
        lambda context, vector, settings: hogwild.Hogwild(context, vector),
        memory=hogwild.WindowAllocator,
        shares_weights=True,
        precisions=("fp32", "fp64"),  # with half weights every rank would have its own master weights
        devices=("cpu",),
    ),
    "federated": StyleEntry(
        lambda context, vector, settings: FederatedAverage(context, vector),
        lambda nbytes, settings: 2 * nbytes,
        refusal=refusal,
        engine=f"{__package__}.federated_engine:FederatedEngine",
        sampler=client_sampler,
    ),
}


def refuse(settings: Settings, ranks: int) -> None:
    """Raise ValueError if the averaging style does not support the settings. The message names the setting."""
    name, tau, group, most = settings.layout, settings.tau, settings.group, max(2, ranks)
    if name not in STYLES:
        raise ValueError(f"layout: expected one of {', '.join(STYLES)}, found {name!r}")
    entry, precision, device, checked = STYLES[name], settings.precision, settings.device, settings.check_every
    precisions = entry.precisions
    settings.expect_used()
    for is_wrong, text in (
        (device not in entry.devices, f"device: {name} is for {' and '.join(entry.devices)}, found {device}"),
        (tau is not None and tau < entry.least, f"tau: expected {entry.least} steps or more, found {tau}"),
        (group is not None and not 2 <= group <= most, f"group: expected 2 to {most} of {ranks} ranks, found {group}"),
        (precision not in precisions, f"precision: {name} has {' or '.join(precisions)}, found {precision}"),
        (settings.reproducible, f"reproducible: with {name} the result depends on the number of ranks; leave it out"),
        (checked, f"check_every: with {name} ranks have different weights; leave it out, found {checked}"),
    ):
        if is_wrong:
            raise ValueError(text)
    if (problem := entry.refusal(settings, ranks)) is not None:
        raise ValueError(problem)

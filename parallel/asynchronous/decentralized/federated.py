"""Federated averaging: clients train from the common weights on their own data. The mean of their weights follows.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-efficient learning of deep networks
from decentralized data", AISTATS 2017, algorithm 1.
"""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from parallel.asynchronous.decentralized.averaging_style import AveragingStyle, ReplicaSums
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.settings import Settings
from quant.types import Array


class FederatedAverage(AveragingStyle):
    """Mean of the clients' weights after each round, each counted as often as it has samples.

    All ranks have the same weights between rounds. `start` begins a client's training, `collect` ends it. A round
    sends weights only: one allreduce of n bytes, for any number of clients.
    """

    def __init__(self, context: RunContext, vector: Array):
        super().__init__(context, vector)
        self._common = self.memory.private("buffers", vector.size, vector.dtype)
        self._sum = self.memory.shared("buffers", vector.size, vector.dtype)
        self._samples = 0

    def reach(self, step: int) -> int:
        return 0

    def start(self) -> None:
        """Set the weights to those that are common to all clients."""
        self.vector[...] = self._common

    def collect(self, samples: int) -> None:
        """Add the present weights to the sum. A client with `samples` samples has trained them."""
        self._sum += samples * self.vector
        self._samples += samples

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        samples, sums = self.exchange_status(self.comm, sums, self._samples)
        if samples:
            self.comm.Allreduce(MPI.IN_PLACE, self._sum)
            self._sum /= samples
            self.vector[...] = self._sum
        else:
            self.start()
        self.begin()
        return sums

    def mean(self, out: Array) -> None:
        out[...] = self.vector  # equal on all ranks

    def begin(self) -> None:
        self._common[...] = self.vector
        self._sum[...] = 0
        self._samples = 0


def clients_of(settings: Settings) -> tuple[int, int]:
    """(number of clients, number of them that take part in a round): 20 and half of them by default.

    >>> clients_of(Settings(layout="federated", clients=7, client_fraction=0.1))
    (7, 1)
    """
    clients = 20 if settings.clients is None else settings.clients
    fraction = 0.5 if settings.client_fraction is None else settings.client_fraction
    return clients, max(1, round(fraction * clients))


def local_epochs_of(settings: Settings) -> int:
    """Passes of a client over its samples in a round, 5 by default."""
    return 5 if settings.local_epochs is None else settings.local_epochs


def label_shards_of(settings: Settings) -> int:
    """Number of single-label runs of samples that each client gets, 2 by default."""
    return 2 if settings.label_shards is None else settings.label_shards


def refusal(settings: Settings, ranks: int) -> str | None:
    """Message about a setting that federated averaging on `ranks` ranks cannot use, or None."""
    clients, _ = clients_of(settings)
    if clients < ranks:
        return f"clients: expected {ranks} or more, one for each rank, found {clients}"
    fraction = settings.client_fraction
    if fraction is not None and not 0 < fraction <= 1:
        return f"client_fraction: expected a number above 0 and up to 1, found {fraction:g}"
    return None


def local_batches(settings: Settings, step: int, client: int, samples: int) -> Iterator[np.ndarray]:
    """Indices of each local batch of a client with `samples` samples: `batch` each, in new order in each pass."""
    random = np.random.default_rng([settings.seed, step, client])
    for _ in range(local_epochs_of(settings)):
        order = random.permutation(samples)
        yield from (order[first : first + settings.batch] for first in range(0, samples, settings.batch))

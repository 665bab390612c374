"""Private training sets of federated clients: division of a data set by labels, and clients sampled for each round."""

from __future__ import annotations

import numpy as np

from parallel.asynchronous.decentralized.federated import clients_of, label_shards_of, local_epochs_of
from parallel.data.sampler import Dataset, Sampler, StepBatches
from parallel.engine.settings import Settings

CHUNK = 4096  # samples that are taken at a time to read their labels


def divide(labels: np.ndarray, clients: int, shards: int, seed: int) -> list[np.ndarray]:
    """Divide samples among clients: sample indices (int64, ascending) of each, disjoint and together all.

    Samples are sorted by label and cut into ``clients * shards`` equal runs. Each client gets `shards` of them at
    random, so with 2 it has few labels (McMahan et al., AISTATS 2017, section 3). With `shards` 0 samples are dealt at
    random. With more runs than samples some are empty.

    Examples
    --------
    >>> [part.tolist() for part in divide(np.array([1, 0, 1, 0]), clients=2, shards=1, seed=0)]
    [[0, 2], [1, 3]]
    """
    for name, value, least in (("clients", clients, 1), ("shards", shards, 0), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name}: expected {least} or more, found {value}")
    random, count = np.random.default_rng([seed, clients, shards]), len(labels)
    order = np.argsort(labels, kind="stable") if shards else random.permutation(count)
    runs = np.array_split(order, clients * max(shards, 1))
    dealt = random.permutation(len(runs)).reshape(clients, -1)
    return [np.sort(np.concatenate([runs[at] for at in mine])).astype(np.int64) for mine in dealt]


def labels_of(data: Dataset) -> np.ndarray:
    """Class of each sample. Without classes its index, so that clients get neighbouring samples."""
    starts = range(0, len(data), CHUNK)
    parts = [data.take(np.arange(start, min(start + CHUNK, len(data))))[1] for start in starts[:1]]
    if not parts or parts[0].ndim != 1 or parts[0].dtype.kind not in "iu":
        return np.arange(len(data))
    parts += [data.take(np.arange(start, min(start + CHUNK, len(data))))[1] for start in starts[1:]]
    return np.concatenate(parts)


class ClientSampler(Sampler):
    """Sampler whose steps are rounds: micro-batch k holds all samples of client k, or none if it does not take part.

    An epoch is as many rounds as there are groups of `sampled` clients. In each epoch every client takes part once, in
    an order that depends on the seed and the epoch. The last round of an epoch may have fewer clients.

    Parameters
    ----------
    parts : indices of each client's samples, for example from `divide`
    sampled : clients of a round
    micro_batch : samples per pass through the model, also in a test
    passes : of a client over its samples in a round
    seed, shuffle : of the order of clients

    Examples
    --------
    >>> sampler = ClientSampler([np.array([0, 3]), np.array([1]), np.array([2])], sampled=2, shuffle=False)
    >>> [[part.tolist() for part in step.parts] for step in sampler.steps(0)]
    [[[0, 3], [1], []], [[], [], [2]]]
    """

    def __init__(
        self,
        parts: list[np.ndarray],
        sampled: int,
        micro_batch: int = 1,
        seed: int = 0,
        *,
        passes: int = 1,
        shuffle: bool = True,
    ):
        if not 1 <= sampled <= len(parts):
            raise ValueError(f"sampled: expected 1 to {len(parts)} clients, found {sampled}")
        super().__init__(len(parts), sampled, micro_batch, seed, shuffle=shuffle)
        self._parts, self.passes = parts, passes

    def at(self, epoch: int, step: int) -> StepBatches:
        """Samples of the clients that take part in a given round of a given epoch."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"round {step}: an epoch of {self.count} clients has {self.steps_per_epoch} rounds")
        chosen = set(self._chosen(epoch, *self._bounds(epoch, step)).tolist())
        nothing = np.zeros(0, np.int64)
        parts = tuple(part if client in chosen else nothing for client, part in enumerate(self._parts))
        return StepBatches(epoch, step, parts)

    def sizes(self, steps: int) -> list[tuple[int, ...]]:
        """Samples of each client in the first `steps` rounds of the first epoch, each distinct round once."""
        counts = (tuple(map(len, self.at(0, step).parts)) for step in range(min(steps, self.steps_per_epoch)))
        return list(dict.fromkeys(counts))


def client_sampler(
    settings: Settings, data: Dataset, workers: int, shuffle: bool = True, window: int | None = None
) -> Sampler:
    """Sampler of federated rounds. Data with classes are divided among the clients by class, others by position."""
    clients, sampled = clients_of(settings)
    parts = divide(labels_of(data), clients, label_shards_of(settings), settings.seed)
    passes = local_epochs_of(settings)
    return ClientSampler(parts, sampled, settings.micro(1), settings.seed, passes=passes, shuffle=shuffle)

"""Sequences of differing lengths, and steps with a number of tokens in place of a number of samples.

Targets of padding are -1. Losses do not count them: the mean over a step's targets is the mean over its tokens, for
any division into micro-batches and ranks.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from parallel.data.sampler import Sampler
from parallel.nn.array_checks import whole_number
from parallel.runtime.validation import exact_integers


class PaddedSequences:
    """Data set of token sequences: targets are the inputs shifted by one. Samples taken together are padded.

    Parameters
    ----------
    sequences : of 2 or more integers each. They may be views of one (memory-mapped) vector

    Attributes
    ----------
    lengths : int64, number of targets of each sequence
    """

    def __init__(self, sequences: Sequence[np.ndarray]):
        self._sequences = sequences
        self.lengths = np.array([len(one) - 1 for one in sequences], np.int64)
        if len(self.lengths) and self.lengths.min() < 1:
            at = int(self.lengths.argmin())
            raise ValueError(
                f"sequences: expected 2 tokens or more in each, found {self.lengths[at] + 1} in number {at}"
            )

    def __len__(self) -> int:
        return len(self._sequences)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of some sequences: int64 of shape (sequences, longest), padded with token 0 and target -1."""
        indices = exact_integers(indices, "indices")
        shape = len(indices), int(self.lengths[indices].max(initial=0))
        x, y = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        for row, index in enumerate(indices.tolist()):
            tokens = self._sequences[index]
            x[row, : len(tokens) - 1], y[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        return x, y


class TokenSampler(Sampler):
    """Sampler of steps of at most `global_tokens` tokens, cut into micro-batches of at most `micro_tokens`.

    A step has as many samples, in the order of the epoch, as fit. It is sorted by length, longest first, so that
    micro-batches need little padding. Padding counts in a micro-batch's tokens: samples times the longest one. A
    sample that is longer than a limit is alone. A step of more than `most` micro-batches is cut by the smallest larger
    limit that suffices.

    Parameters
    ----------
    lengths : tokens of each sample
    global_tokens, micro_tokens : of a step over all ranks, and of a pass through the model. Default: the step's
    most : number of micro-batches of a step, at least 1, planned by pipelines. Default: any number
    seed, shuffle, window : see `Sampler`

    Examples
    --------
    >>> sampler = TokenSampler(np.array([3, 1, 5, 2, 2]), global_tokens=6, micro_tokens=4, shuffle=False)
    >>> [[part.tolist() for part in step.parts] for step in sampler.steps(0)]
    [[[0], [1]], [[2]], [[3, 4]]]
    """

    def __init__(
        self,
        lengths: np.ndarray,
        global_tokens: int,
        micro_tokens: int | None = None,
        seed: int = 0,
        *,
        most: int | None = None,
        shuffle: bool = True,
        window: int | None = None,
    ):
        super().__init__(len(lengths), global_tokens, micro_tokens, seed, shuffle=shuffle, window=window)
        self._lengths = exact_integers(lengths, "lengths")
        self._most = None if most is None else whole_number("most", most, 1)
        self._starts = lru_cache(2)(self._starts_of)

    def steps_in(self, epoch: int) -> int:
        return len(self._starts(epoch)) - 1

    def sizes(self, steps: int) -> list[tuple[int, ...]]:
        """Samples of each micro-batch of the first `steps` steps of the first epoch, each distinct step once."""
        counts = (tuple(map(len, self.at(0, step).parts)) for step in range(min(steps, self.steps_in(0))))
        return list(dict.fromkeys(counts))

    def _starts_of(self, epoch: int) -> list[int]:
        """First position of each step in the order of an epoch, and the number of samples."""
        ends = np.cumsum(self._lengths[self.order(epoch)])
        starts = [0]
        while starts[-1] < self.count:
            before = int(ends[starts[-1] - 1]) if starts[-1] else 0
            fitting = int(np.searchsorted(ends, before + self.global_batch, side="right"))
            starts.append(max(fitting, starts[-1] + 1))
        return starts

    def _bounds(self, epoch: int, step: int) -> tuple[int, int]:
        start, stop = self._starts(epoch)[step : step + 2]
        return start, stop

    def _cut(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        chosen = chosen[np.argsort(-self._lengths[chosen], kind="stable")]
        lengths, limit = self._lengths[chosen], self.micro_batch
        if (most := self._most) is not None:
            larger = range(limit, len(lengths) * int(lengths[0]))  # beyond, the step is one micro-batch
            limit += bisect_left(larger, True, key=lambda tokens: len(_cuts(lengths, tokens)) <= most)
        return (chosen[part] for part in _cuts(lengths, limit))


def _cuts(lengths: np.ndarray, limit: int) -> list[slice]:
    """Parts of sequences, longest first, of at most `limit` tokens with padding, or of one sequence."""
    found, start = list[slice](), 0
    while start < len(lengths):
        stop = start + max(1, limit // max(1, int(lengths[start])))
        found.append(slice(start, stop))
        start = stop
    return found

"""Sampler: the same seeded order of samples on all ranks, cut into global batches and micro-batches.

Neither depends on the number of ranks. A layout assigns micro-batches by number (`contiguous`, `interleaved`), or ranks
draw them as they become ready (`WorkQueue`).
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import index
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from parallel.nn.array_checks import whole_number
from parallel.runtime.validation import exact_integers, expect_integer, expect_mapping, is_real, widened

Item = TypeVar("Item")


class Dataset(Protocol):
    """Interface of data sets in memory whose samples are taken by index."""

    def __len__(self) -> int:
        """Number of samples."""

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of the samples at `indices`, as new arrays."""


class Batch(NamedTuple):
    """Micro-batch: samples along the first axis of x and y, and their indices in the data set (`samples`, int64).

    `number` counts the step's micro-batches over all ranks: the position of its gradient in the canonical order.
    """

    number: int
    x: np.ndarray
    y: np.ndarray
    samples: np.ndarray


def batch_of(some: Any, at: int, xp: ModuleType = np) -> Batch:
    """Convert (number, x, y, samples) to a `Batch`, x and y as arrays of `xp`. `at` is its index for error messages.

    Integers become int64, so that no operator or loss computes with narrow ones.
    """
    parts = tuple(some) if isinstance(some, tuple | list) else ()
    if len(parts) != len(Batch._fields):
        found = f"a {type(some).__name__} of {len(parts)}" if isinstance(some, tuple | list) else type(some).__name__
        raise ValueError(f"micro-batch at {at}: expected (number, inputs, targets, sample numbers), found {found}")
    number, *arrays = parts
    try:
        number = index(number)
    except TypeError:
        raise ValueError(f"micro-batch at {at}: expected an integer as its number, found {number!r}") from None
    for what, array in zip(("inputs", "targets", "sample numbers"), arrays):
        shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
        # an array of objects would fail only inside an operator
        if shape == () or not (shape or hasattr(array, "__len__")) or getattr(dtype, "kind", "") == "O":
            kind = type(array).__name__ if shape is None else f"{dtype} of shape {shape}"
            raise ValueError(f"micro-batch {number}: expected {what} as an array with an axis of samples, found {kind}")
    try:
        x, y = xp.asarray(arrays[0]), xp.asarray(arrays[1])
    except (TypeError, ValueError) as error:
        raise ValueError(f"micro-batch {number}: inputs and targets make no arrays: {error}") from error
    names = [f"micro-batch {number}: {what}" for what in ("inputs", "targets", "sample numbers")]
    for name, array in zip(names, (x, y)):
        if not is_real(array):
            raise ValueError(f"{name}: expected real numbers, found {array.dtype}")
    return Batch(number, widened(x, names[0]), widened(y, names[1]), exact_integers(arrays[2], names[2]))


class StepBatches(NamedTuple):
    """Sample indices (int64) of each micro-batch of step `number` of an epoch. The last one may be smaller."""

    epoch: int
    number: int
    parts: tuple[np.ndarray, ...]

    @property
    def samples(self) -> int:
        """Number of samples in the global batch of this step."""
        return sum(len(part) for part in self.parts)

    def batches(self, data: Dataset, numbers: Iterable[int]) -> Iterator[Batch]:
        """Load the micro-batches `numbers` of this step from the data set, one by one as the iterator advances."""
        for number in numbers:
            yield Batch(number, *data.take(self.parts[number]), self.parts[number])


class OnDemandSampler(Sequence[Batch]):
    """Sequence of a step's micro-batches, each loaded when indexed: for ranks that draw work from a queue."""

    def __init__(self, step: StepBatches, data: Dataset):
        self._step, self._data = step, data

    def __len__(self) -> int:
        return len(self._step.parts)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(*number.indices(len(self)))]
        return next(self._step.batches(self._data, [range(len(self))[number]]))


class Sampler:
    """Sampler without replacement: order of samples by seed and epoch, with a position for checkpoints.

    Equal on all ranks without communication. NumPy's `default_rng([seed, epoch])` determines the order. One epoch's
    order is kept, 8 bytes per sample. With `window` it orders windows of `window` neighbouring samples (a shorter last
    one stays last). Each is shuffled in itself when its turn comes: data are then read from a few places at a time.

    Parameters
    ----------
    count : int
        Samples in the data set.
    global_batch : int
        Samples of a step, over all ranks.
    micro_batch : int, optional
        Samples per pass through the model. Default: all of the step's.
    seed : int
    shuffle : bool
        False keeps the data set's order.
    window : int, optional
        Neighbouring samples that are shuffled among themselves. Default: all samples.
    drop_last : bool
        True to leave out the last step of an epoch if it is short. Other samples each epoch, if shuffled.

    Attributes
    ----------
    epoch, step : int
        Position: the next step.
    steps_per_epoch : int
        The last may be short. 0 if there are no samples.
    passes : int
        Times that a step's samples are trained on.

    Examples
    --------
    >>> sampler = Sampler(5, global_batch=4, micro_batch=2, shuffle=False)
    >>> [[part.tolist() for part in step.parts] for step in sampler.steps(0)]
    [[[0, 1], [2, 3]], [[4]]]
    """

    passes = 1

    def __init__(
        self,
        count: int,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int = 0,
        *,
        shuffle: bool = True,
        window: int | None = None,
        drop_last: bool = False,
    ):
        micro_batch = global_batch if micro_batch is None else micro_batch
        self.count, self.global_batch = whole_number("count", count), whole_number("global_batch", global_batch, 1)
        self.micro_batch, self.seed = whole_number("micro_batch", micro_batch, 1), whole_number("seed", seed)
        self.shuffle, self.window = shuffle, None if window is None else whole_number("window", window, 1)
        self.drop_last, self.steps_per_epoch = drop_last, -(-count // global_batch)
        if drop_last:
            self.steps_per_epoch = count // global_batch
            if not self.steps_per_epoch:
                raise ValueError(f"drop_last: {count} samples make no step of {global_batch}")
        self.epoch = self.step = 0
        self._size = max(1, count if window is None or not shuffle else min(window, count))
        self._windows = lru_cache(1)(self._window_order)
        self._within = lru_cache(2)(self._order_within)

    def order(self, epoch: int) -> np.ndarray:
        """Sample indices of an epoch in the order of use: int64, read-only."""
        return self._chosen(epoch, 0, self.count)

    def _chosen(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Sample indices at the positions `start` to `stop` of an epoch."""
        found = [np.zeros(0, np.int64)]
        for at in range(start // self._size, -(-stop // self._size)):
            first = at * self._size
            found.append(self._within(epoch, at)[max(0, start - first) : stop - first])
        return found[-1] if len(found) <= 2 else np.concatenate(found)

    def _window_order(self, epoch: int) -> np.ndarray:
        """Numbers of the whole windows of an epoch in the order of use."""
        whole = np.arange(self.count // self._size)
        if len(whole) > 1:
            np.random.default_rng([self.seed, epoch]).shuffle(whole)
        return whole

    def _order_within(self, epoch: int, at: int) -> np.ndarray:
        """Sample indices of the window that is used as number `at` in an epoch."""
        whole = self._windows(epoch)
        number = int(whole[at]) if at < len(whole) else len(whole)
        start = number * self._size
        samples = np.arange(start, min(start + self._size, self.count), dtype=np.int64)
        if self.shuffle:
            np.random.default_rng([self.seed, epoch, number] if len(whole) > 1 else [self.seed, epoch]).shuffle(samples)
        samples.flags.writeable = False
        return samples

    def at(self, epoch: int, step: int) -> StepBatches:
        """Micro-batches of a given step of a given epoch. The sampler's position is unchanged."""
        if not 0 <= step < self.steps_in(epoch):
            raise IndexError(f"step {step}: an epoch of {self.count} samples has {self.steps_in(epoch)} steps")
        return StepBatches(epoch, step, tuple(self._cut(self._chosen(epoch, *self._bounds(epoch, step)))))

    def steps_in(self, epoch: int) -> int:
        """Number of steps of an epoch."""
        return self.steps_per_epoch

    def _bounds(self, epoch: int, step: int) -> tuple[int, int]:
        """First position of a step in the order of an epoch, and the end."""
        start = step * self.global_batch
        return start, min(start + self.global_batch, self.count)

    def _cut(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Cut the samples of a step into micro-batches."""
        for start in range(0, len(chosen), self.micro_batch):
            yield chosen[start : start + self.micro_batch]

    def sizes(self, steps: int) -> list[tuple[int, ...]]:
        """Micro-batch sizes (samples) of each distinct step among an epoch's first `steps`: the first, and a shorter
        last.

        >>> Sampler(5, global_batch=4, micro_batch=2).sizes(3), Sampler(5, global_batch=4, micro_batch=2).sizes(1)
        ([(2, 2), (1,)], [(2, 2)])
        """
        starts, micro = range(0, self.count, self.global_batch)[: min(steps, self.steps_per_epoch)], self.micro_batch
        batches = (min(self.global_batch, self.count - start) for start in (*starts[:1], *starts[-1:]))
        return [tuple(min(micro, batch - at) for at in range(0, batch, micro)) for batch in dict.fromkeys(batches)]

    def steps(self, epoch: int, start: int = 0) -> Iterator[StepBatches]:
        """Iterate over the steps of an epoch from step `start` on. The sampler's position is unchanged."""
        for step in range(start, self.steps_in(epoch)):
            yield self.at(epoch, step)

    def ahead(self) -> Iterator[StepBatches]:
        """Iterate without end over steps from the position on (none without samples). `done` moves the position."""
        epoch, start = self.epoch, self.step
        while self.count:
            yield from self.steps(epoch, start)
            epoch, start = epoch + 1, 0

    def done(self, step: StepBatches) -> None:
        """Set the sampler's position to the step after `step`. `step` is finished."""
        self.epoch, self.step = step.epoch, step.number + 1
        if self.step >= self.steps_in(step.epoch):
            self.epoch, self.step = step.epoch + 1, 0

    def position(self) -> dict[str, int]:
        """Position (epoch, step) and the settings that it depends on, as integers, for a checkpoint."""
        return {"epoch": self.epoch, "step": self.step} | self._fixed()

    def load(self, position: dict[str, int]) -> None:
        """Restore a position from a checkpoint. The micro-batch size may be another, as it does not affect the order.

        ValueError if count, global batch, seed or shuffle is another, or it is no position. The sampler is unchanged.
        """
        try:
            known = {"window": 0, "drop_last": 0} | dict(expect_mapping(position, "position"))
            for name, mine in self._fixed().items():
                if (there := expect_integer(known, name)) != mine:
                    raise ValueError(f"it was saved with {name} {there}, this run has {mine}")
            epoch, step = expect_integer(known, "epoch"), expect_integer(known, "step")
        except ValueError as error:
            raise ValueError(f"sampler position: {error}") from error
        if step >= max(self.steps_in(epoch), 1):
            raise ValueError(
                f"sampler position: epoch {epoch}, step {step}, where an epoch has {self.steps_in(epoch)} steps"
            )
        self.epoch, self.step = epoch, step

    def _fixed(self) -> dict[str, int]:
        fixed = {"count": self.count, "global_batch": self.global_batch, "seed": self.seed}
        return fixed | {"shuffle": int(self.shuffle), "window": self.window or 0, "drop_last": int(self.drop_last)}


def contiguous(count: int, rank: int, size: int) -> range:
    """Contiguous share of the micro-batches 0 .. count-1 for a rank. Shares differ in size by at most one.

    >>> [list(contiguous(5, rank, 3)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(rank * count // size, (rank + 1) * count // size)


def interleaved(count: int, rank: int, size: int) -> range:
    """Share of the micro-batches 0 .. count-1 for a rank, with stride `size`: rank, rank + size, ...

    >>> [list(interleaved(5, rank, 3)) for rank in range(3)]
    [[0, 3], [1, 4], [2]]
    """
    return range(rank, count, size)


def overlapping(count: int, rank: int, size: int, fraction: float) -> list[int]:
    """Contiguous share of 0 .. count-1 for a rank, extended into the next ranks' shares by `fraction` of its length.

    The extension is rounded up and continues at 0 after the last number. No number occurs twice.

    >>> [overlapping(6, rank, 3, 0.5) for rank in range(3)]
    [[0, 1, 2], [2, 3, 4], [4, 5, 0]]
    """
    own = contiguous(count, rank, size)
    length = min(count, len(own) + math.ceil(fraction * len(own)))
    return [(own.start + at) % count for at in range(length)]


def prefetch(source: Iterable[Item], depth: int = 2) -> Iterator[Item]:
    """Iterate over `source` with up to `depth` items computed ahead in a background thread (0: no thread).

    Exceptions of the source are raised in place of the item. The thread starts with the first item and ends with
    the iteration: after the last item, an exception, Ctrl-C, or `close` (which Python calls when the iterator is
    collected). A generator is then closed. Its error is raised. The source must not call MPI.
    """
    depth = whole_number("depth", depth)
    return _ahead(source, depth) if depth else iter(source)


def _ahead(source: Iterable[Item], depth: int) -> Iterator[Item]:
    from concurrent.futures import Future, ThreadPoolExecutor  # loads the module logging

    items, end = iter(source), object()
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        made: deque[Future[Any]] = deque(pool.submit(next, items, end) for _ in range(depth))
        while (item := made.popleft().result()) is not end:
            made.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the item being made
        getattr(items, "close", lambda: None)()

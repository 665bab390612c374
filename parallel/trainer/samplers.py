"""Samplers of a training: order of samples, steps and micro-batches, by settings and data set."""

from dataclasses import replace
from typing import Any

import numpy as np

from parallel.data.sampler import Dataset, Sampler
from parallel.data.sequences import TokenSampler
from parallel.engine.settings import Settings


def batch_sampler(
    settings: Settings, data: Dataset, workers: int, shuffle: bool = True, window: int | None = None
) -> Sampler:
    """Sampler of steps of `batch` samples or `batch_tokens` tokens. Data with `lengths` are cut by tokens exactly."""
    options: dict[str, Any] = {"seed": settings.seed, "shuffle": shuffle, "window": settings.window or window}
    if settings.batch_tokens is None or not hasattr(data, "lengths"):
        settings = sized(settings, data)
        return Sampler(len(data), settings.batch, settings.micro(workers), **options, drop_last=settings.drop_last)
    if settings.drop_last:
        raise ValueError("drop_last: steps of sequences of unequal lengths have unequal sizes, and none is short")
    if settings.micro_batch is not None:
        raise ValueError(f"micro_batch: it counts samples, batch_tokens tokens; found {settings.micro_batch}")
    options["most"] = _most_parts(settings, workers)
    return TokenSampler(data.lengths, settings.batch_tokens, settings.micro_tokens(workers), **options)


def _most_parts(settings: Settings, workers: int) -> int | None:
    """Most micro-batches that pipelines plan for a step. In reproducible training the same in all layouts."""
    if not (settings.reproducible or settings.layout.startswith("pp")):
        return None
    if settings.microbatches is not None:
        return settings.microbatches * workers
    return -(-settings.batch // settings.micro(workers))


def sized(settings: Settings, data: Dataset) -> Settings:
    """Settings whose `batch` is as many sequences of equal length as have `batch_tokens` tokens, if that is given."""
    if settings.batch_tokens is None or not len(data):
        return settings
    tokens = data.take(np.zeros(1, np.int64))[1]
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(f"batch_tokens: expected sequences, found targets of {tokens.dtype}, shape {tokens.shape[1:]}")
    return replace(settings, batch=max(1, settings.batch_tokens // tokens.size))

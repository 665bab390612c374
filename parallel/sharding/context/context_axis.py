"""Row of the axis ``cp``: ranks share every sequence, and each has some positions."""

from __future__ import annotations

from typing import Any

from parallel.nn.placement import Shard
from parallel.sharding.axis import Axis
from parallel.sharding.context.models_by_length import AUTO

INVARIANT = "allgather"
"""Attention whose bits do not depend on the number of ranks."""


def parts_of(settings: Any, ranks: int) -> int:
    """Parts of every sequence: `settings.sequence_parts`, by default one per rank of the axis."""
    parts: int | None = settings.sequence_parts
    return parts or ranks


def check_sequences(settings: Any, mesh: Any) -> None:
    """Raise ValueError if settings do not go with sequences that are divided on this mesh."""
    ranks = mesh.sizes.get(CONTEXT.name, 1)
    parts = parts_of(settings, ranks)
    if parts % ranks:
        raise ValueError(f"sequence_parts: expected a multiple of cp, in {mesh}; found {parts}")
    if parts == 1:
        if settings.context != AUTO and CONTEXT.name not in mesh.sizes:
            raise ValueError(f"context: {settings.context} is for sequences divided along cp; found {mesh}")
        return
    if settings.pool:
        raise ValueError(f"pool: ranks that share sequences need the same micro-batches; found pool and {mesh}")
    if settings.reproducible and settings.context not in (AUTO, INVARIANT):
        raise ValueError(f"context: reproducible training needs {INVARIANT}, found {settings.context}")
    # a rank's part of the tree is a whole subtree only for powers of two
    if settings.reproducible and parts & (parts - 1):
        fits = "cp=2 or cp=4" if ranks & (ranks - 1) else f"sequence_parts={1 << (parts - 1).bit_length()}"
        expected = f"expected a power of two of parts, found {parts}; {fits} would fit"
        raise ValueError(f"sequence_parts: reproducible sums follow a binary tree: {expected}")


CONTEXT = Axis("cp", "parts of the sequence", Shard(1), options=("sequence_parts", "context"), check=check_sequences)
"""Attention exchanges keys and values forward, and their gradients backward. Routers exchange scores."""

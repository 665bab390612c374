"""Attention tile by tile, forward and backward: no array is larger than a tile's queries times a tile's keys.

The result of a tile of queries over several tiles of keys is merged by the logarithm of the sum of exponentials, and
the backward pass computes the probabilities again from it (Dao et al., "FlashAttention", 2022). Memory is proportional
to the length, where `parallel.nn.attention.CausalAttention`, the plain version, saves all probabilities.

Tiles have positions, so keys may come in any order and from other ranks. Shapes, with g key/value heads, r query heads
for each of them, n positions, width d: queries (batch, g, r, n, d), keys and values together (2, batch, g, n, d).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from parallel.nn import kernels
from parallel.nn.attention_mask import AttentionMask
from quant.types import Array

QUERIES, KEYS = 64, 256
"""Most positions of a tile of queries, and of keys."""


class AttentionTile(NamedTuple):
    """Neighbouring entries of an array along its axis of positions: where they are, and their positions."""

    place: slice
    positions: range


def tiles(blocks: Iterable[range], length: int) -> Iterator[AttentionTile]:
    """Cut arrays that hold these blocks of positions, one after another, into tiles of at most `length`."""
    at = 0
    for block in blocks:
        for first in range(0, len(block), length):
            positions = block[first : first + length]
            yield AttentionTile(slice(at + first, at + first + len(positions)), positions)
        at += len(block)


class ForwardTile(NamedTuple):
    """Queries of a tile with their attention over the keys so far, and the log of the sum of exponentials; wide."""

    tile: AttentionTile
    q: Array
    out: Array
    log_sum: Array


class BackwardTile(NamedTuple):
    """Queries of a tile in the backward pass: `row_sum` is that of `dout` times the result; `dq` accumulates, wide."""

    tile: AttentionTile
    q: Array
    dout: Array
    log_sum: Array
    row_sum: Array
    dq: Array


def fold(x: Array, tile: AttentionTile) -> Array:
    """Copy of a tile of (batch, g, r, n, ...), C-contiguous, the rows of all r heads joined: (batch, g, rows, ...)."""
    piece = x[:, :, :, tile.place]
    batch, groups, heads, count = piece.shape[:4]
    folded: Array = kernels.array_namespace(x).ascontiguousarray(piece)
    return folded.reshape(batch, groups, heads * count, *piece.shape[4:])


def unfold(folded: Array, tile: AttentionTile, x: Array) -> None:
    """Write what `fold` has joined to the tile's place in `x`, rounded to its dtype."""
    piece = x[:, :, :, tile.place]
    kernels.narrow(folded.reshape(piece.shape), x.dtype, piece)


def forward_tiles(q: Array, blocks: Iterable[range]) -> list[ForwardTile]:
    """Tiles of the queries at these blocks of positions, before any key."""
    xp, wide, made = kernels.array_namespace(q), kernels.wide(q.dtype), []
    for tile in tiles(blocks, QUERIES):
        rows = fold(q, tile)
        made.append(ForwardTile(tile, rows, xp.zeros(rows.shape, wide), xp.full(rows.shape[:-1], -math.inf, wide)))
    return made


def backward_tiles(q: Array, out: Array, log_sum: Array, dout: Array, blocks: Iterable[range]) -> list[BackwardTile]:
    """Tiles of the queries at these blocks of positions, for the gradient `dout` of the result `out`."""
    xp, wide, made = kernels.array_namespace(q), kernels.wide(q.dtype), []
    for tile in tiles(blocks, QUERIES):
        rows, upper = fold(q, tile), fold(dout, tile)
        row_sum = (kernels.widen(upper) * kernels.widen(fold(out, tile))).sum(axis=-1)
        made.append(BackwardTile(tile, rows, upper, fold(log_sum, tile), row_sum, xp.zeros(rows.shape, wide)))
    return made


def _nothing() -> None:
    """Default of `progress`."""


def attend(
    queries: Iterable[ForwardTile],
    kv: Array,
    keys: Iterable[range],
    mask: AttentionMask,
    progress: Callable[[], object] = _nothing,
) -> None:
    """Merge into tiles of queries their attention over the keys of `kv`, which are at these blocks of positions.

    Keys that no query of a tile sees are not read. `progress` is called after each tile of queries.
    """
    key_tiles = list(tiles(keys, KEYS))
    for tile, q, out, log_sum in queries:
        for place, low, high in visible_tiles(mask, tile, key_tiles):
            k, v = kv[0, :, :, place], kv[1, :, :, place]
            scores = _scores(q, k)
            part_sum = kernels.visible_softmax(scores, _scale(q), low, high)
            part = _product(kernels.narrow(scores, q.dtype), v)
            kernels.merge_attention(out, log_sum, part, part_sum)
        progress()


def attend_backward(
    queries: Iterable[BackwardTile],
    kv: Array,
    dkv: Array,
    keys: Iterable[range],
    mask: AttentionMask,
    progress: Callable[[], object] = _nothing,
) -> None:
    """Add to `dkv`, wide and of the shape of `kv`, and to the `dq` of each tile their gradients by `attend`."""
    key_tiles = list(tiles(keys, KEYS))
    for tile, q, dout, log_sum, row_sum, dq in queries:
        for place, low, high in visible_tiles(mask, tile, key_tiles):
            k, v = kv[0, :, :, place], kv[1, :, :, place]
            p = kernels.visible_probabilities(_scores(q, k), _scale(q), low, high, log_sum)
            ds = kernels.attention_gradient(_scores(dout, v), p, _scale(q), row_sum)
            ds, p = kernels.narrow(ds, q.dtype), kernels.narrow(p, q.dtype)
            dq += _product(ds, k)
            dkv[0, :, :, place] += _product(ds.swapaxes(2, 3), q)
            dkv[1, :, :, place] += _product(p.swapaxes(2, 3), dout)
        progress()


def visible_tiles(
    mask: AttentionMask, tile: AttentionTile, key_tiles: Iterable[AttentionTile]
) -> Iterator[tuple[slice, Any, Any]]:
    """Yield, for each tile of keys that the queries see: place of the visible keys, each query's range of them."""
    for keys in key_tiles:
        ranges = mask.key_ranges(tile.positions, keys.positions)
        if ranges.pairs:
            span, start = ranges.span, keys.place.start
            yield slice(start + span.start, start + span.stop), ranges.low - span.start, ranges.high - span.start


def _scale(q: Array) -> float:
    return 1 / math.sqrt(max(q.shape[-1], 1))


def _scores(rows: Array, keys: Array) -> Array:
    """Products of all rows with all keys, wide: (batch, g, rows, keys)."""
    return _product(rows, keys.swapaxes(2, 3))


def _product(a: Array, b: Array) -> Array:
    xp = kernels.array_namespace(a)
    return kernels.matmul(a, b, out=xp.empty((*a.shape[:-1], b.shape[-1]), kernels.wide(a.dtype)))


def attention(
    q: Array, kv: Array, queries: Iterable[range], keys: Iterable[range], mask: AttentionMask
) -> tuple[Array, Array]:
    """Attention of queries over keys at these blocks of positions: (result like q, log of the sum of exponentials)."""
    made = forward_tiles(q, queries)
    attend(made, kv, keys, mask)
    return collected(made, q)


def attention_gradients(
    queries: Iterable[BackwardTile], q: Array, kv: Array, keys: Iterable[range], mask: AttentionMask
) -> tuple[Array, Array]:
    """Gradients, wide, of q and of kv."""
    made, dkv = list(queries), kernels.array_namespace(q).zeros(kv.shape, kernels.wide(q.dtype))
    attend_backward(made, kv, dkv, keys, mask)
    return collected_gradient(made, q), dkv


def collected(queries: Iterable[ForwardTile], q: Array) -> tuple[Array, Array]:
    """Results of all tiles, of the shape and dtype of q, and the logs of sums of exponentials, wide."""
    xp = kernels.array_namespace(q)
    out, log_sum = xp.empty(q.shape, q.dtype), xp.empty(q.shape[:-1], kernels.wide(q.dtype))
    for tile in queries:
        unfold(tile.out, tile.tile, out)
        unfold(tile.log_sum, tile.tile, log_sum)
    return out, log_sum


def collected_gradient(queries: Iterable[BackwardTile], q: Array) -> Array:
    """Gradient of the queries, put together from all tiles: in the dtype of sums, of the shape of q."""
    dq = kernels.array_namespace(q).empty(q.shape, kernels.wide(q.dtype))
    for tile in queries:
        unfold(tile.dq, tile.tile, dq)
    return dq

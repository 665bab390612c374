"""Activations that a layer saves from forward to backward, for 16-bit training.

For a plain layer with dropout, of s positions, b sequences, width h and a heads, tensor parallelism over t ranks, the
table below adds up to the formulas of Korthikanti et al., "Reducing activation recomputation in large transformer
models" (2022), section 4:

    tp                      s b h (10 + 24/t + 5 a s / (h t))
    tp, sequence            s b h / t (34 + 5 a s / h)
    tp, selective           s b h (10 + 24/t)
    tp, sequence, selective 34 s b h / t
    full                    2 s b h

Chorus' own operators save other arrays (masks are drawn again, for example): `parallel.engine.memory_ledger` has them.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from parallel.planning.analytic.layout import ClusterLayout
from parallel.planning.analytic.transformer import Transformer

HALF = 2
"""Bytes of an activation."""


class SavedArray(NamedTuple):
    """Saved array of a layer: bytes per token, and whether ranks of tp share it without sequence parallelism too."""

    name: str
    nbytes: int
    shared: bool


def saved_arrays(model: Transformer, layer: int) -> Iterator[SavedArray]:
    """Arrays that a layer saves without recomputation, for one token of a sequence of the model's context."""
    width = HALF * model.width
    masks = [SavedArray("dropout mask", model.width, False)] if model.dropout else []
    yield SavedArray("norm's input", width, False)
    yield SavedArray("attention's input", width, False)
    yield from _attention_arrays(model)
    yield from masks
    if model.norms > 1:
        yield SavedArray("norm's input", width, False)
        yield SavedArray("FFN's input", width, False)
    for each in model.products(layer):
        if each.part in ("ffn", "experts"):
            if each.part == "experts" and each.name == "in":
                yield SavedArray("experts' input", each.active * width, False)
            # The input of the activation function, and its result (the second product saves it).
            elements = each.inputs if each.by_rows else each.outputs
            yield SavedArray(f"{each.part} {each.name}", HALF * each.active * elements, True)
    yield from masks


def _attention_arrays(model: Transformer) -> Iterator[SavedArray]:
    heads, latent = model.heads, model.latent
    if latent is None:
        queries, keys, values, output = (each * model.head_width for each in (heads, *2 * [model.kv_heads], heads))
    else:
        queries = keys = heads * (latent.plain + latent.rotary)
        values = output = heads * latent.value
        yield SavedArray("latents", HALF * (latent.query_rank + latent.kv_rank + latent.rotary), False)
    yield SavedArray("queries", HALF * queries, True)
    yield SavedArray("keys", HALF * keys, True)
    yield SavedArray("values", HALF * values, True)
    # The softmax. With dropout also its mask and its result.
    yield SavedArray("scores", heads * model.context * (5 if model.dropout else HALF), True)
    yield SavedArray("output's input", HALF * output, True)


def layer_bytes(model: Transformer, layer: int, layout: ClusterLayout, recompute: str | None = None) -> int:
    """Bytes that one rank saves for a layer and micro-batch, with the layout's recomputation or another.

    Along cp, attention works block by block and never saves scores.
    """
    recompute = layout.recompute if recompute is None else recompute
    tokens = layout.micro_batch * model.context // layout.cp
    if recompute == "full":
        shared, whole = 0, HALF * model.width
    else:
        shared, whole = bytes_per_token(model, model.is_sparse(layer), recompute == "none" and layout.cp == 1)
    return -(-tokens * shared // layout.tp) + -(-tokens * whole // (layout.tp if layout.sequence else 1))


@lru_cache(maxsize=1024)
def bytes_per_token(model: Transformer, sparse: bool, scores: bool) -> tuple[int, int]:
    """Bytes that a layer saves for a token, with or without scores: those that ranks of tp share, and others."""
    layer = model.experts.dense_layers if model.experts and sparse else 0
    arrays = [each for each in saved_arrays(model, layer) if scores or each.name != "scores"]
    shared = sum(each.nbytes for each in arrays if each.shared)
    return shared, sum(each.nbytes for each in arrays) - shared


def embedding_bytes(model: Transformer, layout: ClusterLayout) -> int:
    """Bytes that the embedding saves for a micro-batch: the mask of its dropout."""
    if not model.vocabulary:
        return 0
    tokens = layout.micro_batch * model.context // layout.cp
    return -(-tokens * model.width * model.dropout // (layout.tp if layout.sequence else 1))


def head_bytes(model: Transformer, layout: ClusterLayout) -> int:
    """Bytes that the last norm, the head and the loss save for a micro-batch: two inputs, and float32 logits."""
    if not model.vocabulary:
        return 0
    tokens = layout.micro_batch * model.context // layout.cp
    inputs = -(-2 * HALF * tokens * model.width // (layout.tp if layout.sequence else 1))
    return inputs + tokens * 4 * -(-model.vocabulary // layout.tp)


def recomputed_bytes(model: Transformer, layer: int, layout: ClusterLayout) -> int:
    """Bytes that one layer's backward pass computes again and holds until it ends."""
    if layout.recompute == "none":
        return 0
    return layer_bytes(model, layer, layout, "none") - layer_bytes(model, layer, layout) * (layout.recompute != "full")

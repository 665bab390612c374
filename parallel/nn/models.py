"""Models: multilayer perceptron, small convolutional network, decoder-only transformer.

A model is a `Sequential`; its items are the units in which parameters are gathered, freed and recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel.nn.activation import ReLU
from parallel.nn.array_checks import whole_number
from parallel.nn.attention import self_attention
from parallel.nn.compose import Recompute, Residual, Sequential
from parallel.nn.conv import Conv2d, MaxPool2d
from parallel.nn.depths import DepthLayers
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.linear import Flatten, Linear, feed_forward
from parallel.nn.norm import LayerNorm
from parallel.nn.operator import Operator, normal
from parallel.nn.recompute import recompute_kinds, unit_of, whole_units


def mlp(widths: Sequence[int], *, dropout: float = 0.0, recompute: bool | str = False) -> Sequential:
    """Multilayer perceptron with ReLU and layers of these widths, each linear layer one unit; flattens samples first.

    `widths` are the elements of a sample, of each hidden layer, and the classes: at least two. `dropout` follows each
    ReLU; with `recompute`, hidden layers are computed again in the backward pass. Weights start normal, with variance
    2 / inputs before a ReLU (He et al., 2015).
    """
    widths = [whole_number("widths", width) for width in widths]
    if len(widths) < 2:
        raise ValueError(f"mlp: expected at least two widths, found {list(widths)}")
    whole = whole_units(recompute, "mlp")
    units: list[Operator] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        last, first = number == len(widths) - 2, number == 0
        linear = Linear(inputs, outputs, init=normal(math.sqrt((1 if last else 2) / inputs)), first=first)
        unit = [Flatten()] * first + [linear] + ([] if last else [ReLU(), *_dropouts(dropout)])
        units.append(unit_of(unit, whole and not last))
    return Sequential(units, cuts=_mlp_cuts(widths, dropout))


def _mlp_cuts(widths: Sequence[int], dropout: float) -> dict[str, str]:
    """Table of placements of `mlp`: layers are cut by outputs and by inputs in turn; a last one alone stays whole."""
    cuts = {}
    for number in range(len(widths) - 1):
        first = int(number == 0)
        if number % 2:
            cuts[f"{number}.0"] = "row"
        elif number < len(widths) - 2:
            cuts[f"{number}.{first}"] = "column"
            if dropout:
                cuts[f"{number}.{first + 2}"] = f"features:{widths[number + 1]}"
    return cuts


def convnet(
    shape: tuple[int, int, int],
    classes: int,
    channels: Sequence[int] = (16, 32),
    *,
    dropout: float = 0.0,
    recompute: bool | str = False,
) -> Sequential:
    """Convolutional network: for each of `channels` a 3 x 3 convolution, ReLU, 2 x 2 max pooling; then a linear layer.

    `shape` is that of a sample, (channels, height, width); `channels` are those after each convolution. `dropout`
    precedes the linear layer; with `recompute`, the convolutions' units are computed again in the backward pass.
    """
    whole = whole_units(recompute, "convnet")
    units: list[Operator] = []
    before, height, width = shape
    for number, after in enumerate(channels):
        if min(height, width) < 2:
            raise ValueError(f"convnet: images of {shape[1]} x {shape[2]} cannot be halved {len(channels)} times")
        conv = Conv2d(before, after, 3, padding=1, init=normal(math.sqrt(2 / (9 * before))), first=number == 0)
        units.append(unit_of([conv, ReLU(), MaxPool2d(2)], whole))
        before, height, width = after, height // 2, width // 2
    units.append(Sequential([Flatten(), *_dropouts(dropout), Linear(before * height * width, classes)]))
    return Sequential(units)


def transformer(
    vocabulary: int,
    context: int,
    layers: int,
    heads: int,
    width: int,
    *,
    dropout: float = 0.0,
    recompute: bool | str = False,
    experts: ExpertLayers | None = None,
) -> Sequential:
    """Decoder-only transformer like GPT-2: pre-norm, GELU, learned positions, tied output embedding.

    Maps tokens from 0 to below `vocabulary`, of shape (batch, length up to `context`), to scores (batch, length,
    vocabulary). Units: the embedding, each of `layers` blocks, the head. `width`, the numbers per position, is a
    multiple of `heads`. `dropout` follows the embedding and both halves of each block. `recompute` is that of all
    blocks, or of each (`recompute_kinds`): with "full" only a block's input is kept, and the block computed again in
    the backward pass; with "selective" the attention's probabilities are. With `experts`, some blocks have mixtures of
    experts; ValueError if there are too few blocks for one. Weights start normal with deviation 0.02, those that add to
    the residual stream with 0.02 / sqrt(2 layers) (Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2019).
    """
    init, init_out = normal(0.02), normal(0.02 / math.sqrt(2 * max(whole_number("layers", layers), 1)))
    embedding = Embedding(vocabulary, width, init=init)
    units: list[Operator] = [Sequential([embedding, PositionEmbedding(context, width, init=init), *_dropouts(dropout)])]
    if experts is not None and layers < experts.every:
        raise ValueError(f"experts: expected a model of at least {experts.every} blocks, found {layers}")
    dense = [number for number in range(1, layers + 1) if experts is None or number % experts.every]
    for number, kind in enumerate(recompute_kinds(recompute, layers), 1):
        attention = [LayerNorm(width), *self_attention(width, heads, init=init, init_out=init_out).items]
        # Probabilities grow with the square of the length, and are quickly computed again.
        attention[2] = Recompute(attention[2]) if kind == "selective" else attention[2]
        forward: list[Operator] = [LayerNorm(width)]
        if experts is None or number in dense:
            forward += feed_forward(width, 4 * width, init, init_out)
        else:
            forward.append(experts.mixture(width, init, init_out))
        halves = [Residual(Sequential([*half, *_dropouts(dropout)])) for half in (attention, forward)]
        units.append(unit_of(halves, kind == "full"))
    units.append(Sequential([LayerNorm(width), Unembedding(embedding)]))
    return Sequential(units, cuts=_transformer_cuts(layers, dense))


ATTENTION_CUTS = {"0.inner.1": "column", "0.inner.2": "heads", "0.inner.3": "row"}
FEED_FORWARD_CUTS = {"1.inner.1": "column", "1.inner.3": "row"}
MIXTURE_CUTS = {"1.inner.1": "experts"}
"""Placements within a block of `transformer`: norms, dropout and residual sums stay whole on every rank."""


def _transformer_cuts(layers: int, dense: list[int]) -> dict[str, str]:
    """Table of placements of `transformer`, whose `dense` blocks have feed-forward layers."""
    blocks = {f"*.{place}": style for place, style in ATTENTION_CUTS.items()} if layers else {}
    sparse = [number for number in range(1, layers + 1) if number not in dense]
    for numbers, cuts in ((dense, FEED_FORWARD_CUTS), (sparse, MIXTURE_CUTS)):
        places = ["*"] if len(numbers) == layers and layers else numbers
        blocks |= {f"{block}.{place}": style for block in places for place, style in cuts.items()}
    return {"0.0": "vocabulary", f"{layers + 1}.1": "vocabulary", **blocks}


def _dropouts(rate: float) -> list[Operator]:
    return [Dropout(rate)] if rate else []


# ------------------------------------------------------------------------------------------ by name


class ModelFamily(NamedTuple):
    """Model family: dimensions of each size, and names of a sample's axes (none: samples of any shape)."""

    dimensions: dict[str, tuple[int, ...]]
    axes: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the available sizes, such as ``"tiny"``."""
        return tuple(self.dimensions)

    @property
    def is_text(self) -> bool:
        """True for models of tokens."""
        return self.axes == ("length",)


MLPS = {"tiny": (32,), "small": (256, 128), "medium": (1024, 1024), "large": (4096, 4096, 4096)}  # hidden widths
CONVNETS = {"tiny": (4, 8), "small": (16, 32), "medium": (32, 64, 128)}  # channels
TRANSFORMERS: dict[str, tuple[int, ...]] = {  # layers, heads, width
    "tiny": (2, 2, 64),
    "mini": (4, 4, 128),
    "small": (4, 4, 256),
    "medium": (6, 6, 384),
    "large": (12, 12, 768),
}
MODELS = {
    "mlp": ModelFamily(MLPS),
    "convnet": ModelFamily(CONVNETS, ("channels", "height", "width")),
    "gpt": ModelFamily(TRANSFORMERS, ("length",)),
    "gpt-moe": ModelFamily(TRANSFORMERS, ("length",)),
}


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    dropout: float = 0.0,
    recompute: bool | str = False,
    experts: str | None = None,
    depths: str | None = None,
) -> Sequential:
    """Build a model by name and optional size: ``"mlp"``, ``"gpt:tiny"``; the default size is ``small``.

    Parameters
    ----------
    name : str
        ValueError for an unknown name or size.
    shape : tuple of int
        Shape of a sample: any for mlp, (channels, height, width) for convnet, (length,) for gpt and gpt-moe.
    classes : int
        For gpt: the vocabulary.
    dropout : float
    recompute : bool or str
        As `recompute_kinds`; "selective" for transformers only.
    experts : str, optional
        Mixtures of gpt-moe, as `ExpertLayers.parse`; ValueError with another model.
    depths : str, optional
        Blocks of a gpt or gpt-moe for some tokens only, as `DepthLayers.parse`; ValueError with another model.

    Examples
    --------
    >>> len(build("gpt:tiny", (64,), 256).items)  # the embedding, two blocks, the head
    4
    """
    family, separator, size = name.partition(":")
    if family not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, found {family!r}")
    dimensions, axes = MODELS[family]
    if (size := size if separator else "small") not in dimensions:  # "mlp:" has an empty size, no default
        raise ValueError(f"model {family}: expected a size of {', '.join(dimensions)}, found {size!r}")
    if experts is not None and family != "gpt-moe":
        raise ValueError(f"experts: expected the model gpt-moe, found {name}")
    if depths is not None and not MODELS[family].is_text:
        raise ValueError(f"depths: expected a model of tokens, found {name}")
    numbers = dimensions[size]
    if family == "mlp":
        return mlp([math.prod(shape), *numbers, classes], dropout=dropout, recompute=recompute)
    if len(shape) != len(axes):
        expected = str(axes).replace("'", "")
        raise ValueError(f"{family}: expected samples of shape {expected}, found {tuple(shape)}")
    if family == "convnet":
        channels, height, width = shape
        return convnet((channels, height, width), classes, numbers, dropout=dropout, recompute=recompute)
    layers = ExpertLayers.parse(experts or "") if family == "gpt-moe" else None
    model = transformer(classes, *shape, *numbers, dropout=dropout, recompute=recompute, experts=layers)
    return model if depths is None else DepthLayers.parse(depths).of(model, numbers[-1])

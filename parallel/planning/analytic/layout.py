"""Layout of a training on a cluster: ranks along each mesh axis, ZeRO stage, pipeline schedule, recomputation."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import accumulate, groupby, pairwise

from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.planning.analytic.checked import expect_at_least, lookup
from parallel.planning.analytic.transformer import Transformer
from parallel.sharding.axes import AXES
from parallel.sharding.mesh import Mesh

RECOMPUTE = ("none", "selective", "full")
"""Activation recomputation: of nothing, of attention scores (as flash attention does), of whole layers."""

COMPRESSED_BITS = {"int8": 8, "int4": 4}
"""Bits of an element of compressed gradients, beside a float32 scale for each block."""

NO_COMPRESSION, DEFAULT_SCHEDULE = "none", "1f1b"


@dataclass(frozen=True)
class ClusterLayout:
    """Number of ranks along each axis, and the form of a step. `ep` ranks of dp x cp share the experts.

    Attributes
    ----------
    sequence : bool
        Sequence parallelism: norms, dropout and residuals are shared along tp as well (Korthikanti et al., "Reducing
        activation recomputation in large transformer models", 2022).
    zero : int
        Stage 0 to 3 of ZeRO over dp x cp.
    micro_batch : int
        Sequences.
    schedule, virtual : str, int
        Pipeline schedule, and parts of the model on a stage.
    compress : str
        Compression of gradients between replicas, with error feedback: none, or of `COMPRESSED_BITS`.
    layers : tuple of int
        Layers of each part of the model. Empty: numbers that differ by at most one.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sequence: bool = False
    micro_batch: int = 1
    recompute: str = "none"
    schedule: str = DEFAULT_SCHEDULE
    virtual: int = 1
    compress: str = NO_COMPRESSION
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expect_at_least(self, 1, *self.axes, "micro_batch", "virtual")
        lookup("schedule", self.schedule, SCHEDULES)
        if self.zero not in range(4):
            raise ValueError(f"zero: expected a stage from 0 to 3, found {self.zero}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute: expected one of {', '.join(RECOMPUTE)}; found {self.recompute!r}")
        if self.compress != NO_COMPRESSION:
            lookup("compress", self.compress, COMPRESSED_BITS)
            if self.zero:
                raise ValueError(f"compress: expected zero=0, where ranks have whole sums; found zero={self.zero}")
        if min(self.layers, default=1) < 1:
            raise ValueError(f"layers: expected 1 or more in every part, found {layers_text(self.layers)}")

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {name: getattr(self, name) for name in _axis_names()}

    @cached_property
    def mesh(self) -> Mesh:
        """Mesh of the devices: the last axis of the table is innermost."""
        axes = self.axes
        return Mesh({name: axes[name] for name, axis in AXES.items() if name in axes and not axis.folded})

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @cached_property
    def replicas(self) -> int:
        """Ranks that have the same weights. ZeRO divides states over them."""
        return self.mesh.summed.size

    @cached_property
    def workers(self) -> int:
        """Groups of ranks with sequences of their own."""
        return self.mesh.samples.size

    @property
    def parts(self) -> int:
        """Parts of the model in pipeline order."""
        return self.pp * self.virtual

    def parts_of(self, stage: int) -> range:
        """Parts of the model on a pipeline stage."""
        return range(stage, self.parts, self.pp)

    @cached_property
    def replica_stride(self) -> int:
        """Distance in devices of neighbours among the ranks that have the same weights."""
        return min(stride for name, stride in self.strides().items() if AXES[name].sums_gradients)

    def strides(self) -> dict[str, int]:
        """Distance in devices of neighbours along each axis, from the outermost one."""
        found, distance = dict[str, int](), self.ranks
        for name, size in self.mesh.sizes.items():
            distance //= size
            found[name] = distance
        return found

    def __str__(self) -> str:
        numbers = [f"{name}={size}" for name, size in self.axes.items() if size > 1]
        words = [" ".join(numbers) or "dp=1", f"zero{self.zero}" * (self.zero > 0), "sp" * self.sequence]
        form = [self.schedule * (self.schedule != DEFAULT_SCHEDULE), f"v={self.virtual}" * (self.virtual > 1)]
        words += [" ".join(filter(None, form))]
        words += [f"layers {layers_text(self.layers)}" * bool(self.layers), f"micro-batch {self.micro_batch}"]
        words += [f"recompute {self.recompute}" * (self.recompute != "none")]
        words += [f"compress {self.compress}" * (self.compress != NO_COMPRESSION)]
        return ", ".join(word for word in words if word)

    def as_dict(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@cache
def _axis_names() -> tuple[str, ...]:
    return tuple(each.name for each in fields(ClusterLayout) if each.name in AXES)


def layers_text(layers: tuple[int, ...]) -> str:
    """Numbers of layers as text.

    >>> layers_text((8, 8, 8, 6))
    '3x8+6'
    """
    runs = [(number, len([*same])) for number, same in groupby(layers)]
    return "+".join(f"{count}x{number}" if count > 1 else str(number) for number, count in runs)


def layer_ranges(model: Transformer, layout: ClusterLayout) -> list[range]:
    """Layers of each part of the model."""
    parts = layout.parts
    ends = [*accumulate(layout.layers)] or [part * model.layers // parts for part in range(1, parts + 1)]
    return [range(start, stop) for start, stop in pairwise([0, *ends])]


def misfits(model: Transformer, layout: ClusterLayout, sequences: int) -> Iterator[str]:
    """Reasons why a layout does not divide a model, and batches of `sequences`: texts. None if it fits."""
    tp, cp, ep, experts = layout.tp, layout.cp, layout.ep, model.experts
    if model.heads % tp:
        yield f"tp={tp} does not divide {model.heads} heads"
    if model.kv_heads % tp and tp % model.kv_heads:
        yield f"tp={tp} and {model.kv_heads} kv heads do not divide each other"
    if model.ffn % tp or (experts and experts.width % tp):
        yield f"tp={tp} does not divide the FFN"
    if layout.sequence and (tp == 1 or model.context // cp % tp):
        yield f"sequence parallelism needs tp > 1 that divides {model.context // cp} positions"
    # zigzag division gives each rank an early and a late chunk: 2 cp of them
    if cp > 1 and model.context % (2 * cp):
        yield f"cp={cp}: {model.context} positions are no multiple of {2 * cp}"
    if layout.parts > model.layers:
        yield f"{layout.parts} pipeline parts of {model.layers} layers"
    if layout.layers and (len(layout.layers), sum(layout.layers)) != (layout.parts, model.layers):
        yield f"layers {layers_text(layout.layers)}: not {model.layers} in {layout.parts} parts"
    if ep > 1 and (experts is None or experts.count % ep):
        yield f"ep={ep} does not divide {experts.count if experts else 0} experts"
    if layout.replicas % ep:
        yield f"ep={ep} does not divide dp x cp = {layout.replicas}"
    if sequences % (layout.workers * layout.micro_batch):
        yield f"dp x micro-batch = {layout.workers * layout.micro_batch} does not divide {sequences} sequences"
    if layout.virtual > 1 and "virtual" not in SCHEDULES[layout.schedule].options:
        yield f"{layout.schedule} has no choice of virtual stages"


def accumulation(layout: ClusterLayout, sequences: int) -> int:
    """Micro-batches of a replica in a step: global batch = dp x accumulation x micro-batch."""
    return sequences // (layout.workers * layout.micro_batch)

"""Parts of a model's tensors on every rank of a mesh: for pictures."""

from __future__ import annotations

from typing import Any, NamedTuple

from parallel.mesh.device_mesh import MeshAxis
from parallel.mesh.mesh import Mesh
from parallel.nn.operator import Operator, name_all
from parallel.nn.placement import Ranges, logical_name
from parallel.tensor.cut_model import cut


class Holding(NamedTuple):
    """Logical tensor, and the part of it that every rank along ``tp`` has.

    `parts` are (dimension, ranges of indices) by rank, or None: the whole tensor is on every rank.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, Ranges], ...] | None

    def text(self, rank: int) -> str:
        """Indices of a rank, as in ``[:, 0:16 64:80]``."""
        if self.parts is None:
            return "all"
        dim, ranges = self.parts[rank]
        held = " ".join(f"{start}:{stop}" for start, stop in ranges if start < stop) or "none"
        return f"[{', '.join(held if axis == dim else ':' for axis in range(len(self.shape)))}]"


def holdings(model: Operator, loss: Any, ranks: int) -> list[Holding]:
    """Parts of all tensors of a model on `ranks` ranks along ``tp``, in the order of the model.

    Raises PlacementError if it cannot be cut so.
    """
    shapes = {parameter.name: parameter.shape for parameter in name_all(model)}
    parts: dict[str, list[tuple[int, Ranges]]] = {}
    for rank in range(ranks):
        ours, _ = cut(model, loss, MeshAxis("tp", rank, ranks, None))
        cuts = [(logical_name(one.name), one.cut) for one in ours.parameters() if one.cut is not None]
        for name in dict(cuts):
            here = [part for other, part in cuts if other == name]
            ranges = sorted(one for part in here for one in part.ranges)
            parts.setdefault(name, []).append((here[0].dim, tuple(ranges)))
    return [Holding(name, shape, tuple(parts[name]) if name in parts else None) for name, shape in shapes.items()]


def along_tensor_axis(mesh: Mesh, rank: int) -> int:
    """Position of a rank of a mesh along ``tp``."""
    return mesh.coordinates(rank).get("tp", 0)

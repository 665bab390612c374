"""Table of mesh axes. Another axis is a row in a module (or a folder, if it has operators) and a line in `AXES`."""

from parallel.sharding.axis import REPLICAS, STAGES, Axis
from parallel.sharding.context.context_axis import CONTEXT
from parallel.sharding.expert.expert_axis import EXPERTS
from parallel.sharding.tensor.tensor_axis import EXPERT_TENSOR, TENSOR

AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        STAGES,
        REPLICAS,
        CONTEXT,
        TENSOR,
        EXPERTS,
        EXPERT_TENSOR,
    )
}
"""All axes by name, from the least to the most traffic. The folded ones come last."""


def axis_of(name: str) -> Axis:
    """Row of an axis. Other names are replicas', named after the layout of their gradients, such as ``zero1``."""
    return AXES.get(name, REPLICAS)

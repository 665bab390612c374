"""Record of measurements on the ranks of a communicator: each is made once. A forecast can be repeated from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from collectives import Communicator
from parallel.planning.measured.core_sharing import CoreSharing, core_sharing, measured


@dataclass
class MeasurementRecord:
    """Measurements by key: a JSON value of each rank that measured.

    Attributes
    ----------
    nodes : tuple of int
        Node of every rank.
    comm : Communicator or None
        Ranks that measure what the record lacks. None for a record that was read.
    measures : bool
        True if this rank measures computation. At most one rank per core does.
    """

    nodes: tuple[int, ...]
    sharing: CoreSharing
    values: dict[str, list[Any]] = field(default_factory=dict)
    comm: Communicator | None = None
    measures: bool = False

    @classmethod
    def on(cls, comm: Communicator) -> Self:
        """Empty record of a communicator. Collective."""
        sharing, measures = core_sharing(comm)
        return cls(comm.nodes or (0,) * comm.Get_size(), sharing, comm=comm, measures=measures)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        return cls(tuple(found["nodes"]), CoreSharing(*found["sharing"]), dict(found["values"]))

    def as_dict(self) -> dict[str, Any]:
        return {"nodes": list(self.nodes), "sharing": list(self.sharing), "values": self.values}

    def results(self, key: Hashable, measure: Callable[[], Any], measures: bool | None = None) -> list[Any]:
        """Results of all ranks that measure, equal on all ranks. ValueError if a record that was read lacks the key.

        `measures`: this rank is among them. By default the ranks that measure computation. Collective.
        """
        name = repr(key)
        if name not in self.values:
            if self.comm is None:
                raise ValueError(f"expected a record with the measurement {name}, found none")
            self.values[name] = measured(self.comm, self.measures if measures is None else measures, measure)
        return self.values[name]

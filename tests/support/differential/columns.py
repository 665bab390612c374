"""Columns of the option table: layouts on meshes of 1 to 4 ranks (and one of 8)."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parallel.sharding.mesh import Mesh

SAMPLES = 8
"""Samples of a step."""


@dataclass(frozen=True)
class Column:
    """Layout on a mesh of ranks.

    Attributes
    ----------
    ranks : number of ranks
    settings : of the layout and the mesh
    threads : True if threads of one process can be its ranks
    samples : of a step: fewer where only one micro-batch makes the result independent of timing
    averaged : True if replicas make updates of their own, and average them after every step
    """

    ranks: int
    settings: dict[str, Any] = field(hash=False)
    threads: bool = True
    samples: int = SAMPLES
    averaged: bool = False

    def __str__(self) -> str:
        rest = [f"{name}={value}" for name, value in self.settings.items() if name not in ("layout", "mesh")]
        return " ".join(filter(None, [self.layout, self.settings.get("mesh", f"{self.ranks} ranks"), *rest]))

    @property
    def layout(self) -> str:
        return self.settings.get("layout", "dp")

    @property
    def kind(self) -> str:
        """Layout without its variant: a key of `parallel.trainer.strategies.STRATEGIES`."""
        return self.layout.partition(":")[0]

    @property
    def schedule(self) -> str:
        return self.layout.partition(":")[2]

    @property
    def replicas(self) -> str:
        """Layout of the gradients: of a pipeline that of its stages' replicas."""
        return self.mesh.replicas if self.kind == "pp" else self.kind

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.parse(self.settings["mesh"]) if "mesh" in self.settings else Mesh({"dp": self.ranks})

    def size(self, axis: str) -> int:
        """Number of ranks along an axis of the mesh."""
        return {"ep": self.mesh.ep, "etp": self.mesh.etp}.get(axis, self.mesh.sizes.get(axis, 1))

    @property
    def parts(self) -> int:
        """Parts of the model: stages of a pipeline, times their chunks (the two of DualPipe are copies)."""
        return self.size("pp") * (1 if self.schedule == "dualpipe" else self.chunks)

    @property
    def chunks(self) -> int:
        """Parts of the model on each stage."""
        return 2 if self.schedule in ("zb-v", "dualpipe", "dualpipe-v", "interleaved") else 1

    @property
    def expert_replicas(self) -> int:
        """Replicas that share the experts of mixtures."""
        return self.mesh.expert_replicas

    @property
    def teams(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        if self.kind == "ps":
            return self.ranks - self.settings.get("servers", 1)
        return self.mesh.samples.size


def _mesh(mesh: str, layout: str = "dp", **more: Any) -> Column:
    return Column(Mesh.parse(mesh).size, {"layout": layout, "mesh": mesh, **more})


DATA_PARALLEL = ("dp-naive", "dp-bucket", "dp", "zero1", "zero2", "zero3")

COLUMNS = (
    *(Column(1, {"layout": layout}) for layout in DATA_PARALLEL),
    *(Column(2, {"layout": layout}) for layout in DATA_PARALLEL),
    *(Column(3, {"layout": layout}) for layout in ("dp", "zero1", "zero2", "zero3")),
    *(Column(4, {"layout": layout}) for layout in ("dp-bucket", "dp", "zero2", "zero3")),
    *(_mesh(mesh) for mesh in ("tp=2", "cp=2", "tp=3", "cp=3", "tp=4", "cp=4", "dp=2,tp=2", "cp=2,tp=2")),
    _mesh("tp=2,dp=2", "zero1"),
    _mesh("dp=2,cp=2", "zero2"),
    _mesh("dp=2,tp=2", "zero3"),
    _mesh("dp=2,cp=2", "zero3"),
    _mesh("dp=2,cp=2,tp=2"),
    _mesh("dp=2,ep=2"),
    _mesh("dp=4,ep=2", "zero1"),
    _mesh("dp=2,tp=2,ep=4"),
    _mesh("cp=2,ep=2", "zero2"),
    _mesh("dp=2,tp=2,ep=2,etp=2"),
    *(_mesh("pp=1", f"pp:{name}") for name in ("1f1b",)),
    *(_mesh("pp=2", f"pp:{name}") for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")),
    _mesh("pp=2", "pp:interleaved", virtual=2),
    _mesh("pp=2", "pp:dualpipe"),
    _mesh("pp=3", "pp:1f1b"),
    _mesh("pp=4", "pp:zb-h1"),
    _mesh("pp=2,dp=2", "pp:1f1b"),
    _mesh("zero1=2,pp=2", "pp:gpipe"),
    _mesh("pp=2,zero2=2", "pp:zb-v"),
    _mesh("pp=2,zero3=2", "pp:1f1b"),
    _mesh("pp=2,tp=2", "pp:1f1b"),
    _mesh("pp=2,cp=2", "pp:zb-v"),
    *(Column(ranks, {"layout": "pp:pipedream", "mesh": f"pp={ranks}"}, samples=2) for ranks in (1, 2)),
    Column(2, {"layout": "pp:pipedream-2bw", "mesh": "pp=2"}, samples=2),
    *(Column(ranks, {"layout": "local", "tau": 1}, averaged=True) for ranks in (1, 2, 3)),
    *(Column(ranks, {"layout": "group", "tau": 1}, averaged=True) for ranks in (1, 2, 4)),
    *(Column(ranks, {"layout": "federated", "clients": 4}) for ranks in (1, 2, 3)),
    *(Column(ranks, {"layout": "sgp"}, threads=False, averaged=True) for ranks in (1, 2)),
    Column(1, {"layout": "hogwild"}, threads=False),
    Column(2, {"layout": "hogwild"}, threads=False, samples=2),
    *(Column(servers + 1, {"layout": "ps", "servers": servers}, threads=False) for servers in (1, 2)),
    Column(3, {"layout": "ps"}, threads=False),
    Column(4, {"layout": "ps", "servers": 2}, threads=False),
    Column(2, {"layout": "ps", "consistency": "async"}, threads=False, samples=2),
    Column(3, {"layout": "ps", "consistency": "ssp:1", "servers": 2}, threads=False, samples=2),
)

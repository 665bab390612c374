"""chorus draw mesh: text, picture, wrong requests."""

import pytest
from support.program_runs import call

from parallel.cli import draw_mesh
from parallel.cli.reports.tensor_parts import ABSENT, holdings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build, transformer
from parallel.sharding.mesh import Mesh


def script(*arguments):
    return call(draw_mesh.main, *arguments)


def test_as_text():
    done = script("--mesh", "dp=1,tp=2", "--classes", 7)
    assert done.returncode == 0 and done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1] == ["dp", "0", "tp", "0", "dp", "0", "tp", "1"]
    assert lines[2] == ["0.0.weight", "7", "x", "64", "[0:4,", ":]", "[4:7,", ":]"]
    assert lines[3] == ["0.1.weight", "32", "x", "64", "all", "all"]
    assert lines[6][4:8] == ["[:,", "0:32", "64:96", "128:160]"]


@pytest.mark.parametrize(
    "text", ["tp=1", "tp=2", "tp=3", "tp=5", "dp=2,tp=2", "pp=2,zero1=2,tp=2", "pp=3,cp=2", "pp=3,tp=3"]
)
def test_every_replica_has_every_tensor(text):
    """Also where the ranks do not divide heads or tokens, and where some have none."""
    mesh, model = Mesh.parse(text), transformer(7, 4, 1, 4, 12)
    every = holdings(model, SoftmaxCrossEntropy(), mesh)
    assert [(one.name, one.shape) for one in every] == [(one.name, one.shape) for one in model.parameters()]
    for one in every:
        for replica in mesh.groups(["pp", "tp"]):
            parts = [one.parts[rank] for rank in replica if one.parts[rank] != ABSENT]
            assert parts, one.name
            if None in parts:
                assert set(parts) == {None}
                continue
            (dim,) = {part.dim for part in parts}
            held = [index for part in parts for start, stop in part.ranges for index in range(start, stop)]
            copies = len(held) // one.shape[dim]  # a tied table on the first stage and on the last
            assert sorted(held) == sorted(list(range(one.shape[dim])) * copies)
            assert copies == 1 or one.name == "0.0.weight"


@pytest.mark.parametrize("text", ["dp=2,ep=2", "dp=2,tp=2,ep=4", "tp=2,etp=2", "pp=2,dp=2,tp=2,ep=2,etp=2"])
def test_every_expert_is_on_one_rank_of_a_team(text):
    mesh = Mesh.parse(text)
    model = build("gpt-moe:tiny", (32,), 256)
    experts = [one for one in holdings(model, SoftmaxCrossEntropy(), mesh) if ".experts." in one.name]
    assert experts
    for one in experts:
        for replicas in mesh.groups(["pp", "tp"]) if mesh.expert_replicas == 1 else mesh.groups(["pp", "dp", "tp"]):
            parts = [one.parts[rank] for rank in replicas if one.parts[rank] != ABSENT]
            assert len(parts) == (1 if mesh.etp == 1 or parts == [None] else mesh.etp), one.name


def test_stages():
    done = script("--mesh", "pp=2", "--parallel", "pp:zb-v", "--classes", 7)
    assert done.returncode == 0
    rows = {line.split()[0]: line.split()[-2:] for line in done.stdout.splitlines()[2:]}
    assert rows["0.0.weight"] == ["all", "-"]  # a V has the first part and the last on one stage
    assert rows["1.0.inner.0.gain"] == ["-", "all"]


def test_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "a.png"
    done = script("--mesh", "cp=2,tp=2", "-o", path)
    assert done.returncode == 0 and done.stderr == ""
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--mesh", "ep=2,tp=2"), "the experts of a model, and this one has none"),
        (("--mesh", "zero1=2,tp=2"), "mesh: expected axes of dp, cp, tp, ep, etp, found zero1"),
        (("--mesh", "pp=9"), "4 units cannot be cut in 9 parts"),
        (("--parallel", "pp:2f2b"), "expected pp: and one of"),
        (("--mesh", "tp=0"), "expected at least one rank along tp"),
        (("--mesh", "tp=2", "--model", "convnet"), "expected a model with a table `cuts`"),
        (("-o", "a.txt"), "expected a name that ends in"),
    ],
)
def test_wrong_requests(arguments, message):
    done = script(*arguments)
    assert done.returncode == 2 and message in done.stderr

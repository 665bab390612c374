"""chorus draw mesh: text, picture, wrong requests."""

import pytest
from support.program_runs import call

from parallel.cli import draw_mesh
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import transformer
from parallel.tensor.holdings import holdings


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_make_up_every_tensor(ranks):
    """Also where the ranks do not divide heads or tokens, and where some have none."""
    for one in holdings(transformer(7, 4, 1, 4, 12), SoftmaxCrossEntropy(), ranks):
        if ranks == 1 or one.parts is None:
            assert one.parts is None and one.text(0) == "all"
            continue
        (dim,) = {dim for dim, _ in one.parts}
        held = [index for _, ranges in one.parts for start, stop in ranges for index in range(start, stop)]
        assert sorted(held) == list(range(one.shape[dim]))


def test_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "a.png"
    done = script("--mesh", "cp=2,tp=2", "-o", path)
    assert done.returncode == 0 and done.stderr == ""
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--mesh", "ep=2,tp=2"), "mesh: expected axes of dp, cp, tp, found ep"),
        (("--mesh", "tp=0"), "expected at least one rank along tp"),
        (("--mesh", "tp=2", "--model", "convnet"), "expected a model with a table `cuts`"),
        (("-o", "a.txt"), "expected a name that ends in"),
    ],
)
def test_wrong_requests(arguments, message):
    done = script(*arguments)
    assert done.returncode == 2 and message in done.stderr

"""chorus draw dispatch: messages of tokens on their way to experts, as text and picture."""

import pytest
from support.program_runs import call

from parallel.cli import draw_dispatch

TEXT = """\
hierarchical dispatch of 4 tokens to 4 experts each

round  rank 0       rank 1      rank 2      rank 3
0      →2 [0]       →3 [1]      →0 [2]      →1 [3]
       ←2 [2]       ←3 [3]      ←0 [0]      ←1 [1]
1      →1 [0,2]     →0 [1,1,3]  →3 [0,0,2]  →2 [1,3]
       ←1 [1,1',3]  ←0 [0,2]    ←3 [1,3]    ←2 [0,0',2]

4 copies of 4 tokens between 2 nodes; predicted 34.8 ms for rows of 4 MiB
"""


def test_text():
    found = call(draw_dispatch.main, "--per-node", 2, "--choices", 4, "--route", "hierarchical")
    assert (found.returncode, found.stdout) == (0, TEXT)


def test_direct_route_has_more_copies_and_takes_longer():
    found = call(draw_dispatch.main, "--per-node", 2, "--choices", 4)
    assert found.stdout.splitlines()[-1].startswith("8 copies of 4 tokens between 2 nodes; predicted 101 ms")


@pytest.mark.parametrize(("route", "end"), [("direct", "8 copies"), ("hierarchical", "4 copies")])
def test_way_back(route, end):
    found = call(draw_dispatch.main, "--per-node", 2, "--choices", 4, "--combine", "--route", route)
    title, *_, last = found.stdout.splitlines()
    assert title == f"{route} combine of 4 tokens from 4 experts each" and last.startswith(end)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "dispatch.svg"
    found = call(draw_dispatch.main, "--ranks", 3, "--tokens", 2, "-o", path)
    assert found.returncode == 0 and "<svg" in path.read_text()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--route", "hierarchical"], "hierarchical needs nodes"),
        (["--choices", 9], "expected 1 of 1 nodes for a token, and as many of the experts of each, at most 8; found 9"),
        (["--per-node", 2, "--choices", 3], "expected 2 of 2 nodes"),
        (["--per-node", 2, "--token-nodes", 3, "--choices", 3], "expected 3 of 2 nodes"),
        (["--ranks", 0], "--ranks"),
    ],
)
def test_refusals(options, message):
    found = call(draw_dispatch.main, *options)
    assert found.returncode == 2 and message in found.stderr

"""chorus draw attention: text, picture, wrong requests."""

import pytest
from support.program_runs import call

from parallel.cli import draw_attention


def script(*arguments):
    return call(draw_attention.main, *arguments)


def test_as_text():
    done = script("--ranks", 2, "--length", 8, "--division", "contiguous", "--division", "zigzag")
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()[2:4]] == [["0", "10", "10"], ["1", "0", "16"]]
    assert "contiguous, 69% computing" in done.stdout and "zigzag, 100% computing" in done.stdout


def test_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "a.png"
    done = script("--ranks", 3, "--window", 5, "-o", path)
    assert done.returncode == 0 and done.stderr == ""
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--ranks", 0), "expected a whole number from 1 on"),
        (("--window", -1), "window: expected a whole number from 0 on, found '-1'"),
        (("-o", "a.txt"), "expected a name that ends in"),
    ],
)
def test_wrong_requests(arguments, message):
    done = script(*arguments)
    assert done.returncode == 2 and message in done.stderr

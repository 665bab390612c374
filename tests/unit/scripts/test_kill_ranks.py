"""The program that kills ranks: how it starts a training."""

import sys
from pathlib import Path

import kill_ranks


def test_oversubscription_is_requested():
    """Open MPI starts no more ranks than there are cores without the option."""
    words = kill_ranks.command(kill_ranks.parser().parse_args([]), "mpiexec", Path("FILE"))
    options = words[: words.index(sys.executable)]
    assert options[options.index("--map-by") + 1] == ":oversubscribe"

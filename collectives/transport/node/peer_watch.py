"""Detection of processes of the node that have ended while this one waits for them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mpi4py import MPI

from collectives.errors import PeerFailed

PERIOD = 0.25
"""Seconds between two checks of a wait."""


def has_ended(pid: int) -> bool:
    """True if no process has this number, or one that has ended and was not waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


class PeerWatch:
    """Checks, every `PERIOD` seconds of waits, whether processes live: `pids` by rank."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids, self._next = pids, 0.0

    @property
    def is_due(self) -> bool:
        """True if the last check was `PERIOD` seconds ago. The next one is then due again after as many."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PERIOD
        return True

    def check(self, ranks: Iterable[int]) -> None:
        """Raise PeerFailed if the process of one of the ranks has ended."""
        ended = [rank for rank in sorted(ranks) if has_ended(self._pids[rank])]
        if ended:
            raise PeerFailed(MPI.ERR_OTHER, f"the process of rank {ended[0]} has ended, and this one waits for it")

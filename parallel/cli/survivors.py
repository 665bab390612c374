"""Ranks of a training that go on at once after the death of another, where the MPI keeps them (ULFM).

They shrink to a communicator of their own (Bland et al., IJHPCA 2013), and resume from the state of the last step that
all of them have in memory. The samples of each step are divided over fewer ranks.
"""

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.errors import PeerFailed
from collectives.runtime.requests.program_end import open_communicators
from collectives.transport.waits import watchers
from parallel.cli.restarts import MEMORY

NOTICED = 2.0
"""Seconds in which all ranks learn of a death at most."""


class Survivors:
    """Communicator of the living ranks, `comm`. Waits end by PeerFailed when one of them dies.

    A context, whose end removes the states in `folder`, if made. Construction is collective.
    """

    def __init__(self) -> None:
        self._world = MPI.Intracomm(MPI.COMM_WORLD).Dup()
        self.comm = Communicator(self._world)
        self.folder: Path | None = None
        watchers.append(self._watch)
        launcher.print_when(lambda: self.comm.Get_rank() == 0)

    def make_folder(self) -> Path:
        """New folder in memory, of the same name on all ranks. Collective."""
        made = tempfile.mkdtemp(prefix="chorus-", dir=MEMORY) if self.comm.Get_rank() == 0 else None
        self.folder = Path(self.comm.bcast(made))
        return self.folder

    def _watch(self) -> None:
        """Raise PeerFailed if a rank has died. Called in waits."""
        try:
            self._world.Iprobe()
        except MPI.Exception as error:
            raise PeerFailed(error.Get_error_class(), "a rank has died") from None

    def shrink(self) -> bool:
        """Leave out the dead ranks. False if no rank has died. Collective of the living ones."""
        deadline = time.monotonic() + NOTICED
        while True:
            try:
                self._watch()
            except PeerFailed:
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        for comm in (*(made._planner.comm for made in open_communicators.values() if made._planner), self._world):
            with suppress(MPI.Exception):
                comm.Revoke()  # ends the waits of others in the MPI
        self._world = MPI.Intracomm(self._world.Shrink())
        self.comm = Communicator(self._world)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

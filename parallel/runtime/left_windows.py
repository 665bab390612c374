"""Windows of MPI that ranks have left after an exception: all ranks of a window can free it only together.

A rank that fails cannot wait for the others. It leaves its windows. They are freed when all of their ranks have left
them and meet again: when an engine is made or closed.
"""

from mpi4py import MPI

_left: dict[tuple[int, ...], dict[int, MPI.Win]] = {}
"""Windows by the ranks that share them, as numbered in COMM_WORLD, and by number."""

_count = 0


class SharedWindow:
    """Window, locked by this rank for all, and its number, the same on all ranks. Construction is collective."""

    def __init__(self, comm: MPI.Intracomm, window: MPI.Win):
        global _count
        _count = self._number = max(comm.allgather(_count)) + 1
        self._ranks = _ranks_of(comm)
        self.window: MPI.Win | None = window
        window.Lock_all()

    @property
    def is_open(self) -> bool:
        return self.window is not None

    def free(self) -> None:
        """Free the window. No-op if it was freed or left. Collective."""
        window, self.window = self.window, None
        if window is not None:
            _free(window)

    def leave(self) -> None:
        """Let `free_left` free the window. Not collective."""
        window, self.window = self.window, None
        if window is not None:
            _left.setdefault(self._ranks, {})[self._number] = window


def free_left(comm: MPI.Intracomm) -> None:
    """Free the windows of these ranks that all of them have left. Collective."""
    mine = _left.get(_ranks_of(comm), {}) if _left else {}
    every = comm.allgather(sorted(mine))
    for number in sorted(set(every[0]).intersection(*every[1:])):
        _free(mine.pop(number))


def _free(window: MPI.Win) -> None:
    window.Unlock_all()
    window.Free()


def _ranks_of(comm: MPI.Intracomm) -> tuple[int, ...]:
    plain = MPI.Intracomm(comm)
    if plain == MPI.COMM_NULL:  # threads as ranks
        return ()
    mine, world = plain.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = tuple(mine.Translate_ranks(None, world))
    mine.Free()
    world.Free()
    return ranks

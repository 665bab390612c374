"""Run a seed on all ranks, on the MPI's communicators and on ours, and find the first step whose results differ."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence

from mpi4py import MPI

from collectives import Communicator
from collectives.fuzzing.sequences import Step
from collectives.fuzzing.step_runner import Player


def run(
    world: MPI.Intracomm,
    seed: int,
    steps: Sequence[Step],
    begins: Callable[[Step], object] = lambda step: None,
    control: bool = False,
) -> tuple[int, str]:
    """Run the steps of one seed; collective over `world`.

    The threads run one after the other on the MPI's own communicators, and together on ours. `begins` is called with
    each step as it begins, in its thread. `control` puts the MPI's own in the place of ours. Returns the number of our
    calls on this rank, and the first difference or the traceback of our first error, empty if there is none.
    """
    threads = sorted({step.thread for step in steps})
    parts = [[step for step in steps if step.thread == thread] for thread in threads]
    wanted = {}
    for part in parts:
        plain = world.Dup()
        player = Player(plain, seed, begins)
        player.run(part)
        wanted.update(player.results)
        plain.Free()
    bases = [world.Dup() for _ in parts]
    ours = bases if control else [Communicator(base) for base in bases]
    players = [Player(comm, seed, begins) for comm in ours]
    faults: list[str] = []

    def play(player: Player, part: list[Step]) -> None:
        try:
            player.run(part)
        except BaseException:
            faults.append(f"at {player.now}\n{traceback.format_exc()}")

    others = [threading.Thread(target=play, args=both, daemon=True) for both in zip(players[1:], parts[1:])]
    for thread in others:
        thread.start()
    if players:
        play(players[0], parts[0])
    while any(thread.is_alive() for thread in others) and not faults:
        others[0].join(0.05)
        others = [thread for thread in others if thread.is_alive()]
    if not faults:
        found = {place: result for player in players for place, result in player.results.items()}
        for step in steps:
            one, other = wanted.get((step.thread, step.number)), found.get((step.thread, step.number))
            if one != other:
                faults.append(f"at {step}\n{difference(one, other)}")
                break
        for comm in ours:
            if isinstance(comm, Communicator):
                comm.close()
        for base in bases:
            base.Free()
    return sum(player.calls for player in players), "\n".join(faults)


def difference(wanted: list[bytes] | None, found: list[bytes] | None) -> str:
    """Positions at which two lists of arrays differ."""
    if wanted is None or found is None or len(wanted) != len(found):
        return f"the MPI's own gave {wanted and len(wanted)} arrays, ours {found and len(found)}"
    for number, (one, other) in enumerate(zip(wanted, found)):
        if one != other:
            first = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
            near = slice(first // 8 * 8, first // 8 * 8 + 24)
            return (
                f"array {number} of {len(wanted)}, {len(one)} and {len(other)} bytes, from byte {first} on: the MPI's "
                f"own gave {one[near]!r}, ours {other[near]!r}"
            )
    return "no difference"

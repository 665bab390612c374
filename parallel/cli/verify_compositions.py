"""Check that training on random meshes equals training on one rank: a fuzzer of compositions.

    chorus verify --compositions 100 --seed 0
    chorus verify -n 4 --compositions 100 --seed 0

A seed draws a model, a mesh (pp, dp, cp, tp, ep), a layout and settings. Losses, all gradients, norms, weights and
optimizer state of some steps are compared with those of one rank: bit for bit if the composition is reproducible, to
1e-6 otherwise. Half of them continue from a checkpoint on another mesh. A composition that fails is made as simple as
possible. On one rank, --ranks threads take the place of the ranks. First come compositions in which other systems had
published bugs. Exit status 1 if one fails.
"""

import faulthandler
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.cli.launcher import LauncherParser, at_least, say
from parallel.cli.conformance.composition import Composition
from parallel.cli.conformance.composition_run import Launch, difference, on_threads, shrink
from parallel.cli.conformance.published_bugs import CASES
from parallel.cli.conformance.random_composition import draw

MOST_FAILURES = 5
SECONDS = 600.0  # for one composition; then all stacks are shown and the program ends
STDERR = 2  # the file descriptor


def under_mpi(world: Communicator) -> Launch:
    """`Launch` on the first ranks of `world`; other ranks than 0 get None."""

    def launch(ranks: int, main: Callable[[Any], Any]) -> Any:
        here = world.Get_rank() < ranks
        part: Any = MPI.Intracomm(world).Split(int(here), world.Get_rank())
        with Communicator(part) as comm:
            found = main(comm) if here else None
        return found if world.Get_rank() == 0 else None

    return launch


def cases(args: Any, ranks: int) -> Iterator[tuple[str, Composition]]:
    """Names and compositions to check."""
    if args.seed == 0:
        yield from ((name, one) for name, one in CASES.items() if one.ranks <= ranks)
    for seed in range(args.seed, args.seed + args.compositions):
        yield f"seed {seed}", draw(seed, ranks)


def kind(text: str) -> str:
    """Kind of a failure: an error by the beginning of its text, or a difference; empty if there is none."""
    return text[:40] if text.partition(":")[0].endswith(("Error", "Failed", "Mismatch")) else "difference" * bool(text)


def main() -> int:
    """Verify compositions; exit status 1 if any fails."""
    parser = LauncherParser(__doc__, usage="%(prog)s [options]")
    add = parser.add_argument
    add("--compositions", type=at_least(1, int), default=100, metavar="N", help="default 100")
    add("--seed", type=at_least(0, int), default=0, metavar="S", help="the first one (default 0)")
    add("--ranks", type=at_least(1, int), default=4, metavar="P", help="most threads, on one rank (default 4)")
    args = parser.parse_args()
    world = Communicator(MPI.COMM_WORLD)
    mpi = world.Get_size() > 1
    launch, ranks = (under_mpi(world), world.Get_size()) if mpi else (on_threads, args.ranks)

    def check(composition: Composition) -> str:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=STDERR)
        found: str = world.bcast(difference(composition, launch))
        faulthandler.cancel_dump_traceback_later()
        return found

    def simplest(composition: Composition, wanted: str) -> Composition:
        return shrink(composition, lambda one: one.ranks <= ranks and kind(check(one)) == wanted)

    began, count, failures = time.perf_counter(), 0, 0
    for name, composition in cases(args, ranks):
        count += 1
        if text := check(composition):
            failures += 1
            say(f"{name} fails: {composition}\n  {text}")
            least = simplest(composition, kind(text))
            say(f"  as simple as possible: {least}\n  {check(least)}")
        if failures == MOST_FAILURES:
            break
    say(f"{count - failures} of {count} compositions equal one rank ({time.perf_counter() - began:.0f} s)")
    return int(failures > 0)

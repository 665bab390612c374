"""Fuzz Chorus's communicators: random sequences of calls must give the same bits as mpi4py's communicators.

    python scripts/fuzz.py --ranks 1,2,3,4 --seeds 0:30
    python scripts/fuzz.py --ranks 3 --seeds 17 --threads 2

A seed draws a sequence of steps for each of a few threads with communicators of their own: collectives on arrays in all
forms and spellings, often repeated until they are compiled, on objects, derived types and operations that are made and
freed, point-to-point messages, wrong arguments, communicators that are duplicated, split, copied and freed. The
sequence runs on mpi4py's communicators, then on ours. A seed that gives another result, an error, or no end within
--limit is run again with ever fewer steps, and the shortest sequence found is shown, with the stacks of a hang. Runs
under the MPI of this Python's environment; MPIEXEC names another. Ends with status 1 after a fault.
"""

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpi_launches import Launch, describe_end, find_mpiexec

from collectives.cli.arguments import numbers, rank_counts
from collectives.cli.launcher import ProgramParser
from fuzzing.sequences import Step, sequence

MOST_FAULTS = 5
"""Faults after which the program ends."""


class Fault(NamedTuple):
    """Seed of a sequence that failed, and the messages of the ranks and of mpiexec."""

    seed: int
    text: str


class Job(NamedTuple):
    """Parameters of the fuzzing launches with one number of ranks."""

    mpiexec: str
    ranks: int
    threads: int
    calls: int
    limit: float
    control: bool = False

    def run(self, seeds: list[int], only: Iterable[Step] = ()) -> tuple[int, Fault | None]:
        """Run seeds in one launch up to the first fault; return all ranks' number of calls, and the fault or None.

        `only`: for one seed, the only steps to run; all, if there are none.
        """
        steps = ",".join(f"{step.thread}.{step.number}" for step in only)
        words = [f"{seed}:{steps}" if steps else str(seed) for seed in seeds]
        with tempfile.TemporaryDirectory() as folder:
            options = [str(self.limit), str(self.calls), str(self.threads), "yes" if self.control else "no", *words]
            launch = Launch(self.mpiexec, self.ranks, "fuzzing.fuzz_rank", Path(folder))
            status, output = launch.run(options, 10 * self.limit + 60 * len(seeds))
            calls, latest = 0, 0
            texts: list[str] = []
            for rank in range(self.ranks):
                for line in launch.lines(rank):
                    calls += line.get("calls", 0)
                    latest = max(latest, seeds.index(line["seed"]))
                    if line.get("fault"):
                        texts.append(f"rank {rank} of {self.ranks}, {line['fault']}")
                if stack := launch.stack(rank):
                    texts.append(f"rank {rank} of {self.ranks} stood in\n{stack}")
            if status == 0 and not texts:
                return calls, None
            if not texts:
                texts.append(describe_end(status, output))
            return calls, Fault(seeds[latest], "\n".join(texts))

    def shrink(self, seed: int, seconds: float) -> tuple[list[Step], Fault | None]:
        """Search, for about `seconds`, for a short part of a seed's steps that still fails; return it and its fault.

        Parts are left out, first large ones, then smaller ones, as long as what remains fails. All steps and None if no
        shorter part fails.
        """
        until = time.monotonic() + seconds
        steps = sequence(seed, self.threads, self.calls)
        last: Fault | None = None
        part, start, shorter = max(1, len(steps) // 2), 0, False
        while time.monotonic() < until:
            if start >= len(steps):
                if part == 1 and not shorter:
                    break
                part, start, shorter = max(1, part // 2), 0, False
            fewer = steps[:start] + steps[start + part :]
            if fewer and (fault := self.run([seed], fewer)[1]):
                steps, last, shorter = fewer, fault, True
            else:
                start += part
        return steps, last


def main(argv: list[str] | None = None) -> int:
    """Run the seeds on all numbers of ranks, up to `MOST_FAULTS` faults; return 1 after a fault, else 0."""
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--ranks", type=rank_counts, default=[1, 2, 3, 4], metavar="LIST", help="numbers of ranks (default 1,2,3,4)")
    add("--seeds", type=numbers, default=numbers("0:30"), metavar="LIST", help="as in 3,5 or 0:30 (default 0:30)")
    add("--threads", type=int, default=2, metavar="N", help="threads of each rank (default 2)")
    add("--calls", type=int, default=40, metavar="N", help="steps of each thread (default 40)")
    add("--control", action="store_true", help="the MPI's own in the place of ours: are the faults its own?")
    add("--limit", type=float, default=60, metavar="SECONDS", help="for each step (default 60)")
    add("--shrink", type=float, default=120, metavar="SECONDS", help="to spend on each fault (default 120; 0: none)")
    args = parser.parse_args(argv)
    if (mpiexec := find_mpiexec()) is None:
        parser.error("there is no mpiexec: set MPIEXEC to one")
    total, faults, began = 0, 0, time.perf_counter()
    for ranks in args.ranks:
        job = Job(mpiexec, ranks, args.threads, args.calls, args.limit, args.control)
        seeds, here = list(args.seeds), 0
        while seeds and faults < MOST_FAULTS:
            calls, fault = job.run(seeds[:20])
            here += calls
            if fault is None:
                del seeds[:20]
                continue
            faults += 1
            del seeds[: seeds.index(fault.seed) + 1]
            print(f"\n{ranks} ranks, seed {fault.seed}: {fault.text}", flush=True)
            if args.shrink:
                steps, last = job.shrink(fault.seed, args.shrink)
                print(f"\n{ranks} ranks, seed {fault.seed}, shrunk to {len(steps)} steps:")
                print(*(f"    {step}" for step in steps), sep="\n")
                print(last.text if last else "no part of it fails", flush=True)
        total += here
        print(f"{ranks} ranks: {here} calls on {len(args.seeds) - len(seeds)} seeds", flush=True)
    print(f"{total} calls, {faults} faults ({time.perf_counter() - began:.0f} s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

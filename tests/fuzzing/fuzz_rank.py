"""Run the sequences of scripts/fuzz.py on one rank.

    python -m fuzzing.fuzz_rank FOLDER SECONDS CALLS THREADS CONTROL SEED[:THREAD.NUMBER,...] ...

Writes a line of JSON to FOLDER/rank-N when a seed begins and when it ends. SECONDS without a new step end
the process with the stacks of all threads in FOLDER/stack-N; an error ends it at once, as the other ranks may wait for
it.
"""

import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from mpi4py import MPI

from collectives import Communicator
from collectives.transport.memory import copy_speed
from fuzzing.sequences import CREATING, LENGTHS, Step, sequence
from fuzzing.step_runner import FUNCTIONS, StepRunner

LIBRARY = MPI.Get_library_version()


def hangs_natively(step: Step) -> bool:
    """True for steps with which two threads deadlock in the MPI library itself (``scripts/fuzz.py --control``).

    Communicators that two threads create, except under MPICH; under Intel MPI also Python functions as operations: it
    holds a lock while it calls them, for which a thread that has the interpreter's may wait.
    """
    if LIBRARY.startswith("MPICH"):
        return False
    creates = step.thread > 0 and step.kind in CREATING
    return creates or (LIBRARY.startswith("Intel") and (step.kind == "copied op" or step.op in FUNCTIONS))


def fails_natively(step: Step) -> bool:
    """True for steps at which the MPI library itself spoils memory or ends the process (``scripts/fuzz.py --control``).

    MPICH ends it in a long Reduce_scatter in place if a rank's block overlaps the start of the buffer. Intel MPI writes
    wrong data, also beside the buffer, in an Allgather with a derived datatype on one side.
    """
    if LIBRARY.startswith("Intel"):
        return step.method == "Allgather" and "derived on one side" in step.flags
    in_place = step.method == "Reduce_scatter" and {"in place", "other counts"} <= step.flags
    return in_place and step.n > max(LENGTHS) and LIBRARY.startswith("MPICH")


def run(
    world: MPI.Intracomm,
    seed: int,
    steps: Sequence[Step],
    begins: Callable[[Step], object] = lambda step: None,
    control: bool = False,
) -> tuple[int, str]:
    """Run one seed's steps on mpi4py's communicators and ours; return the number of calls on ours, and the first fault.

    Collective over `world`. The threads run one after the other on the MPI's own communicators, and together on ours.
    `begins` is called with each step as it begins, in its thread. `control` puts the MPI's own in the place of ours.
    The fault is the first difference or the traceback of our first error on this rank, empty if there is none.
    """
    steps = [step for step in steps if not fails_natively(step)]
    if any(step.thread for step in steps):
        steps = [step for step in steps if not hangs_natively(step)]
    if not steps:
        return 0, ""
    threads = sorted({step.thread for step in steps})
    parts = [[step for step in steps if step.thread == thread] for thread in threads]
    wanted = {}
    for part in parts:
        plain = world.Dup()
        runner = StepRunner(plain, seed, begins)
        runner.run(part)
        wanted.update(runner.results)
        plain.Free()
    bases = [world.Dup() for _ in parts]
    ours = bases if control else [Communicator(base) for base in bases]
    runners = [StepRunner(comm, seed, begins) for comm in ours]
    faults: list[str] = []

    def perform(runner: StepRunner, part: list[Step]) -> None:
        try:
            runner.run(part)
        except BaseException:
            faults.append(f"at {runner.now}\n{traceback.format_exc()}")

    others = [threading.Thread(target=perform, args=both, daemon=True) for both in zip(runners[1:], parts[1:])]
    for thread in others:
        thread.start()
    perform(runners[0], parts[0])
    while not faults and (others := [thread for thread in others if thread.is_alive()]):
        others[0].join(0.05)
    if not faults:
        found = {place: result for runner in runners for place, result in runner.results.items()}
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
    return sum(runner.calls for runner in runners), "\n".join(faults)


def difference(wanted: list[bytes] | None, found: list[bytes] | None) -> str:
    if wanted is None or found is None or len(wanted) != len(found):
        return f"the MPI's own gave {wanted and len(wanted)} arrays, ours {found and len(found)}"
    number = next(number for number, pair in enumerate(zip(wanted, found)) if pair[0] != pair[1])
    one, other = wanted[number], found[number]
    first = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
    near = slice(first // 8 * 8, first // 8 * 8 + 24)
    return (
        f"array {number} of {len(wanted)}, {len(one)} and {len(other)} bytes, from byte {first} on: the MPI's own gave "
        f"{one[near]!r}, ours {other[near]!r}"
    )


def main() -> None:
    """Run the seeds of the command line one after the other, until one of them shows a fault."""
    copy_speed.REPEATS = 1  # many communicators are created, which all measure it
    folder, seconds, calls, threads, control, *seeds = sys.argv[1:]
    rank = MPI.COMM_WORLD.Get_rank()
    with open(Path(folder, f"rank-{rank}"), "w") as lines, open(Path(folder, f"stack-{rank}"), "w") as stack:

        def write(**line: object) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        def watch(*_: object) -> None:
            faulthandler.dump_traceback_later(float(seconds), exit=True, file=stack)

        for word in seeds:
            seed, _, kept = word.partition(":")
            write(seed=int(seed))
            watch()
            steps = sequence(int(seed), int(threads), int(calls))
            if kept:
                steps = [step for step in steps if f"{step.thread}.{step.number}" in kept.split(",")]
            try:
                made, fault = run(MPI.COMM_WORLD, int(seed), steps, watch, control == "yes")
            except Exception:
                made, fault = 0, f"outside of our communicators:\n{traceback.format_exc()}"
            write(seed=int(seed), calls=made, fault=fault)
            if "Traceback" in fault or any(MPI.COMM_WORLD.allgather(bool(fault))):
                os._exit(3)
        faulthandler.dump_traceback_later(float(seconds), exit=True)  # the end of the process may hang, too


if __name__ == "__main__":
    main()

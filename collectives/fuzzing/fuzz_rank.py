"""One rank's side of scripts/fuzz.py.

    python -m collectives.fuzzing.fuzz_rank FOLDER SECONDS CALLS THREADS WITHOUT CONTROL SEED[:THREAD.NUMBER,...] ...

Writes a line of JSON to FOLDER/rank-N when a seed begins and when it ends. SECONDS without a new step end
the process with the stacks of all threads in FOLDER/stack-N; an error ends it at once, as the other ranks may wait for
it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

from mpi4py import MPI

from collectives.fuzzing.seed_runner import run
from collectives.fuzzing.sequences import sequence


def main() -> None:
    """Run the seeds one after the other, until one of them shows a fault."""
    folder, seconds, calls, threads, without, control, *seeds = sys.argv[1:]
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
            steps = sequence(int(seed), int(threads), int(calls), without.split(","))
            if kept:
                steps = [step for step in steps if f"{step.thread}.{step.number}" in kept.split(",")]
            try:
                made, fault = run(MPI.COMM_WORLD, int(seed), steps, watch, control == "yes")
            except Exception:
                made, fault = 0, f"outside of our communicators:\n{traceback.format_exc()}"
            write(seed=int(seed), calls=made, fault=fault)
            if fault.find("Traceback") >= 0:
                os._exit(3)
            if any(MPI.COMM_WORLD.allgather(bool(fault))):
                os._exit(3)
        faulthandler.dump_traceback_later(float(seconds), exit=True)  # the end of the process may hang, too


if __name__ == "__main__":
    main()

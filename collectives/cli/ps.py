"""Show the ranks of this user's programs on this machine: the call that each waits in, for which rank, since when.

    chorus ps                    # once
    chorus ps --watch 1          # again every second, until Ctrl-C
    chorus ps --calls 5          # with the last five calls of each rank
    chorus ps records            # of files that CHORUS_RECORD=records has left, also of ranks that were killed
    chorus ps --trace calls.json                  # the calls as a trace, which ui.perfetto.dev opens
    chorus ps --flight-recorder folder            # and for torch.distributed.flight_recorder.fr_trace

Every rank that has made a `Communicator` is shown. It needs no cooperation of the programs, which may hang or be
stopped. A rank that is not in a call is in its own program, or in a call of another library.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.cli import record_files
from collectives.cli.launcher import ProgramParser, at_least
from collectives.runtime.record.causes import report
from collectives.runtime.record.reader import in_folder, running


def parse(arguments: Sequence[str] | None = None) -> Any:
    parser = ProgramParser(__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="records that CHORUS_RECORD=FOLDER has kept"
    )
    parser.add_argument(
        "--calls", type=at_least(0, int, 512), default=0, metavar="N", help="show the last N calls of each rank"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last calls as a trace for Perfetto")
    parser.add_argument(
        "--flight-recorder", type=Path, metavar="FOLDER", help="write them as dumps of PyTorch's flight recorder"
    )
    parser.add_argument("--watch", type=at_least(0.1, float), metavar="SECONDS", help="show it again and again")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    while True:
        try:
            found = list(running()) if options.folder is None else in_folder(options.folder)
        except ValueError as error:
            raise SystemExit(f"chorus ps: {error}") from error
        lines, now = list(report(found, options.calls, time.monotonic_ns())), time.monotonic_ns()
        if options.trace is not None:
            options.trace.parent.mkdir(parents=True, exist_ok=True)
            record_files.trace(found, options.trace, now)
        if options.flight_recorder is not None:
            options.flight_recorder.mkdir(parents=True, exist_ok=True)
            record_files.flight_recorder(found, options.flight_recorder)
        clear = "\x1b[2J\x1b[H" if options.watch else ""
        print(
            clear + "\n".join(lines or ["no ranks: no program of this user here has made a Communicator"]), flush=True
        )
        if options.watch is None:
            return 0 if lines else 1
        time.sleep(options.watch)

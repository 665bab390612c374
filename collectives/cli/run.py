"""Run a program of mpi4py with communicators of Chorus in place of COMM_WORLD and COMM_SELF.

    chorus run -n 4 program.py arguments
    chorus run -n 4 -m package.module arguments
    chorus run -n 4 -c "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
    chorus run -n 4 --profile program.py          # and say where its collectives spend their time
    mpiexec -n 4 python -m collectives program.py

The program is not changed. All communicators that it makes of these two are of Chorus, too. An exception that ends the
program on one rank is printed, and ends all ranks.

A profile is a table of collectives by the line of the program that calls them:
  seconds     in these calls, and in waiting for the rank that came last: means over ranks
  late        rank that caused at least half of the waiting
  calls       sums over ranks; bytes: the same
  of native   time relative to the MPI's own collective, of a few calls that are repeated for that
It is written to PREFIX.json, too. PREFIX.trace.json is for ui.perfetto.dev.
"""

import os
import runpy
import signal
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mpi4py import MPI

from collectives.cli.arguments import expect_writable
from collectives.cli.faults import fault, inject
from collectives.cli.launcher import LauncherParser
from collectives.communicator import PREDEFINED, Communicator
from collectives.runtime.requests.program_end import note_end

FORMS = "program.py | -m module | -c text"


def program_at(words: Sequence[str]) -> int:
    """Position of the program in the words after ``chorus run``: a file, or the option -m or -c.

    >>> program_at(["--profile", "program.py", "-n", "7"])
    1
    """
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c"):
        at += 2 if words[at] in ("--profile-files", "--fault") else 1
    return min(at, len(words))


def parse(words: Sequence[str] | None = None) -> Namespace:
    words = list(sys.argv[1:] if words is None else words)
    parser = LauncherParser(
        __doc__, usage="chorus run [-n RANKS] [options] program.py | -m module | -c text [arguments]"
    )
    parser.add_argument("--profile", action="store_true", help="print a table of the program's collectives at its end")
    parser.add_argument(
        "--profile-files", type=Path, metavar="PREFIX", default=Path("out/profile"), help="default out/profile"
    )
    parser.add_argument("--fault", type=fault, metavar="KIND@RANK:CALL", help="inject a fault, as chorus drill does")
    parser.add_argument("program", nargs=REMAINDER, metavar=FORMS, help="and its arguments")
    at = program_at(words)
    if any(word.startswith("-n") for word in words[:at]):
        parser.error("-n: expected it first, as in chorus run -n 4 --profile program.py")
    options = parser.parse_args(words[:at])
    options.program = words[at:]
    if not options.program or (options.program[0] in ("-m", "-c") and len(options.program) == 1):
        parser.error(f"expected a program, as in {parser.usage}")
    if options.program[0] not in ("-m", "-c") and (problem := unreadable(Path(options.program[0]))):
        parser.error(f"{options.program[0]}: {problem}")
    if options.profile:  # before the run, not at its end
        for path in files_of(options.profile_files):
            expect_writable(parser, path)
    return options


def unreadable(path: Path) -> str | None:
    """Reason for which a program cannot be read, if any."""
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                file.read(1)
    except OSError as error:
        return error.strerror
    return None


def files_of(prefix: Path) -> tuple[Path, Path]:
    """Files of a profile: its numbers, and its trace."""
    return prefix.with_name(f"{prefix.name}.json"), prefix.with_name(f"{prefix.name}.trace.json")


def run_program(words: Sequence[str]) -> None:
    """Run ``program.py arguments``, ``-m module arguments`` or ``-c text arguments`` as Python does."""
    first, *rest = words
    if first == "-m":
        sys.argv[:] = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), vars(_main_module()))
    else:
        sys.argv[:] = words
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _main_module() -> object:
    """New `__main__`, as pickle finds functions of the program there."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    return module


def install() -> None:
    """Put communicators of Chorus in the place of mpi4py's constants. Collective."""
    for name, plain in PREDEFINED.items():
        setattr(MPI, name, Communicator(plain))


def of_program(traceback: TracebackType | None) -> TracebackType | None:
    """Part of a traceback that begins in the program."""
    own = {__file__, runpy.run_path.__code__.co_filename}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback


def main(words: Sequence[str] | None = None) -> int:
    """Run the program of the command line; exits with its status, and ends all ranks after an exception."""
    options = parse(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a program of its own
    if options.fault is not None:
        inject(options.fault)
    install()
    profile = None
    if options.profile:
        from collectives.cli.call_profile import CallProfile

        profile = CallProfile()
    status: object = 0
    try:
        run_program(options.program)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        error.__traceback__ = of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        note_end(error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        PREDEFINED["COMM_WORLD"].Abort(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    if profile is not None:
        from collectives.cli.profile_report import report

        report(profile, *files_of(options.profile_files))
    sys.exit(status)  # type: ignore[arg-type]  # a number, a text or None, as the program gave it

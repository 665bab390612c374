"""Helpers to start and end a program on many ranks: argument errors, exit status, progress and output of rank 0."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TextIO

from mpi4py import MPI
from tqdm import tqdm

from collectives.cli.messages import ALIKE, one_line, user_message

LAUNCHERS = ("mpiexec", "mpirun", "prte", "orte", "hydra")
OPEN_MPI = ("mpiexec", "mpirun", "prterun", "orterun")
"""Launchers of Open MPI that a user starts."""

RANKS = ("-N", "-np", "--n", "--np", "--nproc", "--ranks")
"""Options of MPI launchers in whose place `chorus` takes -n."""


class FullHelp(argparse._HelpAction):
    """Option that prints the help of all options."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any, **others: Any) -> None:
        assert isinstance(parser, ProgramParser)
        parser.usual = ()
        super().__call__(parser, *rest, **others)


class ProgramParser(argparse.ArgumentParser):
    """Argument parser of a program in one process. Its help text keeps the description's line breaks.

    Options are written in full, as an abbreviation could mean another option than intended. `selectors` are options of
    the same command that select other programs, with their help texts. `usual` are names of options. If there are any,
    --help describes these only, and --help-all all.
    """

    selectors: Mapping[str, str] = {}
    _words: Sequence[str] = ()

    def __init__(self, description: str | None, usual: Sequence[str] = (), **options: Any):
        options.setdefault("prog", os.path.basename(sys.argv[0]))
        look = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=look, allow_abbrev=False, **options)
        self.usual = usual
        self.add_argument(
            "--help-all", action=FullHelp, help="show all options and exit" if usual else argparse.SUPPRESS
        )

    def format_help(self) -> str:
        shown = {"help", "help_all", *self.usual}
        hidden = [action for action in self._actions if self.usual and action.dest not in shown]
        texts = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, kept in zip(hidden, texts):
            action.help = kept
        if self.selectors:
            width = max(map(len, self.selectors)) + 2
            rows = (f"  {option:<{width}}{summary}\n" for option, summary in self.selectors.items())
            text += f"\nother forms of this command, each with a --help of its own:\n{''.join(rows)}"
        return text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage, and exit with status 2. Names the option most like an unknown one."""
        known = [*self._option_string_actions, *self.selectors]
        for word in takewhile(lambda word: word != "--", self._words):
            name = word.partition("=")[0]
            if isinstance(self, LauncherParser) and name in RANKS and name not in known:
                message = f"unrecognized arguments: {name} (perhaps -n)"
                break
            is_option = name.startswith("--") and " " not in word
            if is_option and name not in known:
                begun = [option for option in known if option.startswith(name) or name.startswith(f"{option}-")]
                alike = get_close_matches(name[2:], [option[2:] for option in known], 1, ALIKE)
                if close := begun[:3] or [f"--{option}" for option in alike]:
                    message = f"unrecognized arguments: {name} (perhaps {' or '.join(close)})"
                elif described := self._described(name[2:].replace("-", " ")):
                    message = f"unrecognized arguments: {name} (perhaps {described[0]})"
                break
        for kind, expected in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f"invalid {kind} value: ", f"expected {expected}, found ")
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")

    def _described(self, words: str) -> list[str]:
        """Options whose help texts contain the words, such as --rate for "learning rate"."""
        found = re.compile(rf"(?<![\w.]){re.escape(words)}\b", re.IGNORECASE)  # no suffix of a file's name
        return [
            each.option_strings[0] for each in self._actions if each.option_strings and found.search(each.help or "")
        ]


class LauncherParser(ProgramParser):
    """Argument parser of a program on all ranks: rank 0 prints, and all ranks exit together."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if MPI.COMM_WORLD.Get_rank() == 0:
            super()._print_message(message, file)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        sys.stderr.flush()
        MPI.COMM_WORLD.Barrier()
        sys.exit(status)


MOST = (1 << 31) - 1
"""Largest number of an option without a limit of its own. A larger one is taken for a slip."""


def at_least(low: float, kind: type, most: float = MOST) -> Any:
    """Make an argument type: a number of type `kind` from `low` to `most`."""
    expected = "a whole number" if kind is int else "a number"

    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected {expected} from {low} on, found {text!r}")
        if value > most:
            raise argparse.ArgumentTypeError(f"expected {expected} of at most {most}, found {text!r}")
        return value

    return number


def world_size() -> int:
    return MPI.COMM_WORLD.Get_size()


PATIENCE = 2.0
"""Seconds in which all ranks meet an error of the user's. A rank that meets it alone then ends the others."""


def end_with(message: str) -> NoReturn:
    """Print one line, on rank 0 if all ranks call this, and end all ranks with status 2."""
    everyone, end = MPI.COMM_WORLD.Ibarrier(), time.monotonic() + PATIENCE
    while not (together := everyone.Test()) and time.monotonic() < end:
        time.sleep(0.01)
    sys.stdout.flush()
    if not together or MPI.COMM_WORLD.Get_rank() == 0:
        print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    if not together:
        MPI.COMM_WORLD.Abort(2)
        exit_now(2)  # an Abort may return
    sys.exit(2)


def run(main: Callable[[], int], before_exit: Callable[[], None] = lambda: None) -> NoReturn:
    """Run `main` as the whole program on every rank, then `before_exit` after a barrier. Exit with `main`'s result.

    Ctrl-C ends the process at once and without a traceback, even inside a blocking MPI call. A rank with an exception
    prints it and ends all ranks. An error that the user causes is one line (`user_message`), and the status is 2.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main()
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        os._exit(141)
    except Exception as error:
        message = user_message(error)
        if message is not None:
            end_with(message)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        exit_now(1)  # an Abort may return
    sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()
    before_exit()
    sys.exit(code)


def exit_now(code: int) -> NoReturn:
    """End this process without `MPI_Finalize`. That may wait forever once another rank has died."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def print_when(condition: Callable[[], bool]) -> None:
    """Let `say` print on the rank where `condition()` is true, instead of rank 0."""
    global _prints
    _prints = condition


def _prints() -> bool:
    return MPI.COMM_WORLD.Get_rank() == 0


def _ancestors() -> Iterator[tuple[Path, list[str]]]:
    """Yield each ancestor process: its folder in /proc, and the first two words of its command without folders."""
    pid = os.getppid()
    while pid > 1:
        folder = Path(f"/proc/{pid}")
        words = (folder / "cmdline").read_bytes().split(b"\0")[:2]
        yield folder, [os.path.basename(os.fsdecode(word)) for word in words]
        pid = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])


@cache
def on_terminal(descriptor: int = 2) -> bool:
    """True if standard error (2) or output (1), of this process or of its MPI launcher, is a terminal."""
    with suppress(OSError, IndexError, ValueError):
        for folder, names in _ancestors():
            if any(name.startswith(LAUNCHERS) for name in names):
                target = os.readlink(folder / f"fd/{descriptor}")
                if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
                    return True
    return os.isatty(descriptor)


def launcher_stream(descriptor: int) -> TextIO | None:
    """Standard output (1) or error (2) of Open MPI's launcher, opened for writing. None if not accessible.

    The launcher forwards nothing that a rank prints after the signal that ends the launcher, so open the stream
    before. None under other MPIs, on other hosts than the launcher's, and if it cannot be opened (a socket).
    """
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        with suppress(OSError, IndexError, ValueError):
            for folder, names in _ancestors():
                if names[0] in OPEN_MPI:
                    return open(folder / f"fd/{descriptor}", "a")
    return None


def progress(total: int, description: str, unit: str = "it", prints: bool = False) -> tqdm[Any] | ProgressLines:
    """Progress display on rank 0's standard error: a bar, or, without a terminal, a line every tenth.

    With `prints` the program itself prints lines, such as rows of a table. There are then none without a terminal.
    """
    root = MPI.COMM_WORLD.Get_rank() == 0
    if root and not on_terminal() and not prints:
        return ProgressLines(total, description, unit)
    look: dict[str, Any] = {"file": sys.stderr, "dynamic_ncols": True, "leave": False}
    return tqdm(total=total, desc=description, unit=unit, disable=not root or not on_terminal(), **look)


def followed(items: Sequence[Any], description: str, unit: str) -> Iterator[Any]:
    """Yield the items, with a progress display."""
    with progress(len(items), description, unit) as bar:
        for item in items:
            yield item
            bar.update()


PLAIN = 1.0  # least seconds between two lines of progress without a terminal


class ProgressLines(AbstractContextManager["ProgressLines"]):
    """Progress display of whole lines, for a file or a pipe, with the methods of a tqdm bar."""

    def __init__(self, total: int, description: str, unit: str, clock: Callable[[], float] = time.monotonic):
        self.n, self._total, self._title, self._clock = 0, total, f"{description}: {unit}", clock
        self._postfix = ""
        self._last = self._began = clock()
        self._shown = -1

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self._postfix = s and f", {s}"

    def update(self, n: int = 1) -> None:
        """Advance by `n`. Print a line at every tenth of the total, at most one in `PLAIN` seconds."""
        before, self.n = self.n, self.n + n
        parts = max(1, self._total)
        if self.n * 10 // parts > before * 10 // parts and self._clock() - self._last >= PLAIN:
            self.refresh()

    def refresh(self) -> None:
        """Print a line, unless there is one for this position."""
        if self.n == self._shown:
            return
        self._last, self._shown = self._clock(), self.n
        share = f" ({self.n / self._total:.0%})" if self._total else ""
        took = tqdm.format_interval(self._last - self._began)
        text = f"{self._title} {self.n} of {self._total}{share}{self._postfix}, {took}"
        print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        """No-op."""


def say(text: str = "") -> None:
    """Print a text on rank 0, or where `print_when` chooses, above a progress bar if there is one.

    To standard output, or to standard error if both are terminals.
    """
    if _prints():
        # A launcher forwards output and errors over two pipes and interleaves them: on a terminal, use one only.
        stream = sys.stderr if on_terminal(1) and on_terminal(2) else sys.stdout
        tqdm.write(text, file=stream)
        stream.flush()

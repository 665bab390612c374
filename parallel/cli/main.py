"""Entry point of the command `chorus`: finds the subcommand, starts MPI ranks for it, runs it.

Imports no MPI before it has to: a process that has initialised MPI cannot become an mpiexec, and `watchdog` must watch
while MPI starts.
"""

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from parallel.cli import batch_job, launched_ranks, restarts, start_up, watchdog
from parallel.cli.programs import PROGRAMS, CommandEntry, group_usage, members, usage
from parallel.planning.analytic.checked import suggestion

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID", "FLUX_TASK_RANK")
"""Environment variables that a launcher sets for each rank."""

EXPECTED = "CHORUS_RANKS"  # environment variable with the number of ranks that -n started

LAUNCH_DEFAULTS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4; the next line is for 5
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",  # the ucx component prints a false error whenever a window is created
}
ONE_BLAS_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


COMPILED = (
    "collectives.engine._engine",
    "quant.kernels._codecs",
    "parallel.nn.kernels._operators",
    "parallel.optim.kernels._updates",
)
"""Modules in C, in whose place Python runs where they were not compiled, or cannot be loaded."""

HELP = ("-h", "--help", "help")

GROUPS = ("bench", "draw", "prove", "plan")
"""Words that list their programs where nothing follows."""


class UsageError(Exception):
    """Error in the command line: unknown subcommand, or one that cannot run with this number of ranks."""


def find(words: list[str]) -> tuple[str, list[str]]:
    """Split command-line words into the name of a program in `PROGRAMS` and its arguments; UsageError if unknown."""
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    for name in PROGRAMS:  # a word, and an option that selects another program; the first in the table
        if options and name.startswith(f"{words[0]} --") and name.split()[1] in options:
            return name, words[1:]
    for length in (2, 1):  # a group and a name, or one word
        name = " ".join(words[:length])
        if name in PROGRAMS:
            return name, words[length:]
    if not words:
        raise UsageError("expected a command; chorus --help lists them")
    if group := members(words[0]):
        known, where = [name.split()[1] for name in group], f"chorus {words[0]}: expected one of "
    else:
        known, where = list(dict.fromkeys(name.split()[0] for name in PROGRAMS)), "expected a command, one of "
    word = "".join(words[1:2]) if group else words[0]
    raise UsageError(f"{where}{', '.join(known)}; found {word!r}{suggestion(word, known)}")


def own_words(words: list[str]) -> int:
    """Number of words that are for `chorus`: all, but of ``run`` an option -n at most, as others may be the program's.

    ``drill`` starts ranks again and again, and takes -n itself.

    >>> own_words(["run", "-n", "4", "program.py", "-n", "7"]), own_words(["train", "-n", "4"])
    (3, 3)
    """
    if words[0] == "drill":
        return 1
    if words[0] != "run":
        return len(words)
    return min(len(words), 3 if words[1:2] == ["-n"] else 2)


def take_ranks(words: list[str]) -> tuple[int | None, list[str]]:
    """Take the option -n out of the words: (number of ranks or None, other words)."""
    for position, word in enumerate(words):
        if word == "-n" or (word.startswith("-n") and word[2:].isdigit()):
            text = word[2:] or "".join(words[position + 1 : position + 2])  # a slice, as -n may be the last word
            # isdigit admits superscripts, which int() refuses
            if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
                raise UsageError(f"-n: expected a number of ranks, 1 or more, found {text!r}")
            return int(text), words[:position] + words[position + (1 if word[2:] else 2) :]
    return None, words


def rank_of_launcher() -> int | None:
    """Rank of this process from environment variables of the MPI launcher; None if not started by one."""
    # the shell of a Slurm allocation has variables of a PMI, but it is no rank until a launcher has started it
    is_shell = not batch_job.in_step(os.environ) and "SLURM_STEP_ID" in os.environ
    for name in RANK_VARIABLES if not is_shell or "MPI_LOCALRANKID" in os.environ else ("OMPI_COMM_WORLD_RANK",):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    if batch_job.in_step(os.environ):  # srun with an MPI that finds its ranks without variables
        return int(os.environ.get("SLURM_PROCID", "0"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ.get("RANK", "0"))
    return None


def launch(program: CommandEntry, name: str, ranks: int, words: list[str]) -> NoReturn:
    """Run the program `name` with arguments `words` on `ranks` ranks, under an mpiexec.

    It replaces this process (exec), or is its child if the program stops at SIGUSR1. It is the mpiexec of the variable
    MPIEXEC, of this Python's environment, or of PATH.
    """
    mpiexec = os.environ.get("MPIEXEC") or "mpiexec"
    environment = LAUNCH_DEFAULTS | ({} if program.blas_threads else ONE_BLAS_THREAD) | os.environ
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    name = name.partition(" --")[0]  # an option that selects a program is one of `words`
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "parallel.cli.main", *name.split(), *words]
    environment |= {EXPECTED: str(ranks), "PATH": path}
    try:
        if program.stops:
            most = restarts.restarts_in(words) if name == "train" else None
            start = launched_ranks.run if most is None else partial(restarts.run, ranks=ranks, restarts=most)
            sys.exit(start(command, environment))
        os.execvpe(mpiexec, command, environment)
    except ValueError as error:  # another training has the folder of kept states
        raise UsageError(str(error)) from error
    except OSError as error:
        advice = "pip install 'chorus-mpi[mpich]', or set MPIEXEC to one"
        raise UsageError(f"-n: cannot start {mpiexec} ({error.strerror}); {advice}") from error


def run(
    module: str, *, mpi: bool = True, guarded: bool = False, least: int = 1, selectors: Mapping[str, str] | None = None
) -> NoReturn:
    """Run the `main()` of a module in this process, and exit with the status that it returns.

    With `mpi` all ranks, at least `least`, run it, and an exception on one ends all. With `guarded` the watchdog starts
    before MPI, and rank 0 prints for which ranks it waits until all have started. `selectors` are options by which the
    same command selects other programs, with their help texts.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the slow imports: Ctrl-C ends the process without a traceback
    if guarded:
        watchdog.start()
        nodes = start_up.start_mpi(rank_of_launcher())
    entry = import_module(module).main
    if guarded:
        start_up.wait_for_all(nodes)
    from collectives.cli import launcher
    from collectives.cli.messages import user_message

    launcher.ProgramParser.selectors = selectors or {}
    if not mpi:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end when the reader of the output, such as head, has ended
        try:
            sys.exit(entry())
        except Exception as error:
            if (message := user_message(error)) is None:
                raise
            raise UsageError(message) from error
    check_ranks(launcher.world_size(), least)
    launcher.run(entry, before_exit=watchdog.stop)


def check_ranks(size: int, least: int) -> None:
    """Raise UsageError if `size`, the ranks that MPI has, is not the number given by -n, or below `least`."""
    text = os.environ.get(EXPECTED, str(size))
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{EXPECTED}: expected the number of ranks that -n started, found {text!r}")
    wanted = int(text)
    if size != wanted:
        raise UsageError(
            f"mpiexec started {wanted} processes, and MPI has {size} rank{'s' * (size != 1)}: it belongs to another "
            "MPI than the one that mpi4py loads; set MPIEXEC, or set MPI4PY_LIBMPI to the library of this mpiexec"
        )
    if problem := batch_job.launch_error(size, os.environ):
        raise UsageError(problem)
    if size < least:
        raise UsageError(f"expected {least} ranks or more, found {size}: -n {least} starts them")


def start(words: list[str]) -> None:
    """Run the subcommand in `words` and exit; with -n, or a default number of ranks, under a new mpiexec."""
    own = own_words(words)
    ranks, known = take_ranks(words[:own])
    name, rest = find(known)
    program, rank = PROGRAMS[name], rank_of_launcher()
    if ranks is not None and not program.mpi:
        raise UsageError(f"-n: chorus {name} runs in one process")
    if ranks is not None and rank is not None:
        shell = f"srun (srun --overlap -n {ranks} starts ranks in its shell)"
        where = shell if batch_job.in_step(os.environ) else "mpiexec"
        raise UsageError(f"-n: this already runs under {where}; give the number of ranks there, or here, not twice")
    if helps := [word for word in rest if word in ("-h", "--help", "--help-all")]:
        rest = helps[-1:]  # beside an option that selects a program and lacks its value
    for word in rest:
        if word.startswith("--") and word.endswith("=--"):  # argparse would drop the value
            raise UsageError(f"argument {word.removesuffix('=--')}: expected a value, found '--'")
    rest += words[own:]
    if program.mpi and rank is None and not helps:
        if ranks or program.start:
            launch(program, name, ranks or program.start, rest)
        if program.least > 1:
            raise UsageError(
                f"chorus {name} needs {program.least} ranks and was not started under mpiexec: "
                f"add -n {program.least}, or start it with mpiexec -n {program.least} chorus {name}"
            )
        print(f"chorus {name}: one rank, since no mpiexec has started it; -n 4 starts four", file=sys.stderr)
    sys.argv = [f"chorus {name}", *rest]
    forms = members(name.split()[0]).items()
    others = {option: each.summary for other, each in forms if (option := other.split()[-1]).startswith("--")}
    least = 1 if helps else program.least
    run(program.module, mpi=program.mpi, guarded=program.guarded, least=least, selectors=others)


def _loads(name: str) -> bool:
    """True if a module can be imported."""
    try:
        import_module(name)
    except ImportError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Entry point of `chorus`; exit status 2 for an invalid command line, else that of the subcommand."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["help"] and words[1:]:
        words = [*words[1:], "--help"]
    if not words or words[0] in HELP:
        print(usage(), end="")
        return 0 if words else 2
    if (group := words[0]) in GROUPS and (words == [group] or (group not in PROGRAMS and words[1] in HELP)):
        if not rank_of_launcher():
            print(group_usage(group), end="")
        return 0 if words[1:] else 2
    if words[0] == "--version":
        from collectives import __version__

        missing = [name for name in COMPILED if not _loads(name)]
        text = f"in Python instead of C: {', '.join(missing)}" if missing else "compiled engine and kernels"
        print(f"chorus {__version__}, {text}")
        return 0
    try:
        start(words)
    except UsageError as error:
        if not rank_of_launcher():  # one line, not one a rank
            print(f"chorus: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

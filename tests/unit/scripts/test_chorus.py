"""The command `chorus`: it finds programs, starts ranks, and refuses wrong command lines."""

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.launches import needs_mpiexec
from support.wrong_command_lines import parser_of

from parallel.cli import main as chorus
from parallel.cli.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = ("OMPI_", "PMI", "PMIX_", "MPI_", "HYDRA", "SLURM_", "CHORUS_RANKS")


def run(*words, output=subprocess.PIPE, **variables):
    environment = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | variables
    command = [sys.executable, "-m", "parallel.cli.main", *words]
    return subprocess.run(
        command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def in_process(monkeypatch):
    """`chorus.main` may run a program in this process: it leaves signals, arguments and the parser as they are."""
    for name in chorus.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("collectives.cli.launcher.ProgramParser.selectors", ())
    monkeypatch.setattr(sys, "argv", [])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_a_main_and_shows_its_examples(name):
    module = import_module(PROGRAMS[name].module)
    assert callable(module.main)
    assert f"chorus {name}" in module.__doc__


@pytest.mark.parametrize(
    "words, ranks, rest",
    [
        (["train", "--steps", "3"], None, ["train", "--steps", "3"]),
        (["train", "-n", "4", "--steps", "3"], 4, ["train", "--steps", "3"]),
        (["-n4", "train"], 4, ["train"]),
        (["draw", "-nodes"], None, ["draw", "-nodes"]),
    ],
)
def test_number_of_ranks(words, ranks, rest):
    assert chorus.take_ranks(words) == (ranks, rest)


@pytest.mark.parametrize(
    "words, message",
    [
        (["bogus"], "expected a command, one of demo, bench, "),
        (["trian"], "found 'trian' (perhaps train)"),
        (["bench", "foo"], "chorus bench: expected one of collectives, "),
        (["bench", "colectives"], "found 'colectives' (perhaps collectives)"),
        (["bench", "-n", "2"], "found ''"),
        (["-n", "2"], "expected a command"),
        (["train", "-n"], "-n: expected a number of ranks, 1 or more, found ''"),
        (["train", "-n", "0"], "-n: expected a number of ranks, 1 or more, found '0'"),
        (["draw", "pipeline", "--stages=--"], "argument --stages: expected a value, found '--'"),
        (["prove", "pipelines", "-n", "2"], "chorus prove pipelines runs in one process"),
        (["bench", "servers"], "chorus bench servers needs 2 ranks and was not started under mpiexec: add -n 2"),
    ],
)
def test_wrong_command_lines(words, message, capsys, monkeypatch):
    for name in chorus.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert chorus.main(words) == 2
    assert message in capsys.readouterr().err


def test_ranks_in_a_shell_of_srun(capsys, monkeypatch):
    monkeypatch.setattr("os.environ", {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"})
    assert chorus.main(["train", "-n", "2"]) == 2
    assert "already runs under srun (srun --overlap -n 2 " in capsys.readouterr().err


def test_ranks_are_given_once(capsys, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    assert chorus.main(["train", "-n", "2"]) == 2
    assert "already runs under mpiexec" in capsys.readouterr().err
    monkeypatch.setenv("PMI_RANK", "1")
    assert chorus.main(["train", "-n", "2"]) == 2
    assert capsys.readouterr().err == ""  # rank 0 prints


def test_an_mpiexec_of_another_mpi_is_reported(monkeypatch):
    monkeypatch.setenv(chorus.EXPECTED, "4")
    with pytest.raises(chorus.UsageError, match="started 4 processes, and MPI has 1 rank"):
        chorus.check_ranks(1, 1)


@pytest.mark.parametrize("words", [["bench"], ["bench", "--help"], ["draw", "-h"], ["prove"], ["plan"]])
def test_help_of_groups(words, capsys):
    assert chorus.main(words) == (0 if words[1:] else 2)
    lines = capsys.readouterr().out.splitlines()
    for name, program in PROGRAMS.items():
        assert any(line.split()[: len(name.split())] == name.split() and program.summary in line for line in lines) == (
            name.split()[0] == words[0]
        )


def test_short_and_full_help(in_process, capsys):
    def shown(*words):
        with pytest.raises(SystemExit, match="0"):
            chorus.main(list(words))
        return capsys.readouterr().out

    short = shown("plan", "--cluster", "--help")
    assert "--batch SIZE" in short and "--help-all" in short and "  --fix" not in short
    assert all(f"  {option} " in short for option in ("--graph", "--scaling", "--search", "--run"))
    assert "  --fix" in shown("plan", "--cluster", "--help-all")
    assert "--max-size" in shown("help", "prove", "collectives")


@pytest.mark.parametrize(
    "message, added",
    [
        ("argument --m: invalid choice: 'gtpq' (choose from 'rtn', 'gptq', 'awq')", "gptq"),
        ("argument --m: invalid choice: 'gtpq' (choose from rtn, gptq, awq)", "gptq"),
        ("layout: expected pp: and one of gpipe, 1f1b; found 'pp:1f1'", "1f1b"),
        ("unknown form 'blockng'; known: blocking, persistent, all", "blocking"),
        ("invalid choice: 'gpu' (choose from 'cpu', 'cuda')", None),
        ("expected one of mlp, gpt; found 'mpl'", "mlp"),
        ("expected a whole number from 1 on, found '-4'", None),
        ("expected one of ring, tree; found 'xyz'", None),
        ("expected one of ring, tree; found 'rin' (perhaps ring)", None),
        ("loss: expected one of mse, bce for teacher, found bec", "bce"),
        ("mesh: expected axes of dp, tp, found tpp in tpp=2", "tp"),
        ("argument --specs: expected some of int8_g32, Q8_0, found 'int8_32'", "int8_g32"),
    ],
)
def test_the_listed_name_like_a_wrong_one_is_added(message, added):
    from collectives.cli.messages import one_line

    assert one_line(message) == message + f" (perhaps {added})" * (added is not None)


def test_a_list_of_one_name_is_the_name():
    from collectives.cli.messages import one_line

    text = "loss: expected one of cross_entropy for digits, found bec"
    assert one_line(text) == "loss: expected cross_entropy for digits, found bec"


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_option_is_abbreviated(name, in_process, capsys):
    """Every option without its last letter is refused, and the error suggests the whole one."""
    sys.argv = [name]
    parser = parser_of(name)
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    for option in options:
        if (short := option[:-1]) in options:
            continue
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([short, "1"])
        error = capsys.readouterr().err
        assert f"unrecognized arguments: {short} (perhaps " in error and option in error, error


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["draw", "collective", "--colective", "allreduce"],
            "unrecognized arguments: --colective (perhaps --collective)",
        ),
        (["plan", "--clustr=h100:8"], "unrecognized arguments: --clustr (perhaps --cluster)"),
        (["plan", "--cluster", "h100:8", "--layouts", "8"], "unrecognized arguments: --layouts (perhaps --top)"),
        (["bench", "collectives", "--zzzz", "1"], "unrecognized arguments: --zzzz 1"),
        (["train", "--micro", "3"], "unrecognized arguments: --micro (perhaps --micro-batch or --microbatches)"),
        (["train", "--batch-size", "8"], "unrecognized arguments: --batch-size (perhaps --batch)"),
        (["train", "-np", "4"], "unrecognized arguments: -np (perhaps -n)"),
        (["bench", "collectives", "--ranks=4"], "unrecognized arguments: --ranks (perhaps -n)"),
        (["train", "--steps", "abc"], "argument --steps: expected a whole number, found 'abc'"),
        (["plan", "--graph", "two-layer", "--cluster", "a100:2"], "; found 'two-layer' (perhaps two-layers)"),
    ],
)
def test_mistyped_options(words, message, in_process, capsys):
    with pytest.raises(SystemExit, match="2"):
        chorus.main(words)
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_help_and_version(capsys):
    assert chorus.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in PROGRAMS)
    assert chorus.main(["--version"]) == 0 and capsys.readouterr().out.startswith("chorus 0.")


@pytest.mark.skipif(not os.environ.get("CI"), reason="an installation may lack a compiler")
def test_continuous_integration_has_every_compiled_module(capsys):
    """Tests of these modules are skipped where they are missing."""
    assert chorus.main(["--version"]) == 0 and capsys.readouterr().out.endswith("compiled engine and kernels\n")


def test_the_version_names_what_is_not_compiled(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "quant.kernels._codecs", None)  # an import of it raises ImportError
    assert chorus.main(["--version"]) == 0
    assert "in Python instead of C: " in (line := capsys.readouterr().out) and "quant.kernels._codecs" in line


@pytest.mark.parametrize("words", [["draw", "pipeline", "--help"], ["plan", "--cluster", "--help"]])
def test_help_of_programs(words, in_process, capsys):
    """Also beside an option without its value."""
    with pytest.raises(SystemExit, match="0"):
        chorus.main(words)
    assert capsys.readouterr().out.startswith(f"usage: chorus {' '.join(words[:2])}")


def test_one_process():
    done = run("draw", "collective", "--collective", "allreduce", "--algorithm", "ring", "--ranks", "3")
    assert done.returncode == 0 and "3 ranks" in done.stdout


def test_a_closed_output_ends_a_program_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = run("draw", "collective", "--collective", "allreduce", "--algorithm", "ring", "--ranks", "3", output=writer)
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE and done.stderr == ""


def test_a_missing_mpiexec_is_reported():
    done = run("tune", "-n", "2", MPIEXEC="/nonexistent/mpiexec")
    assert done.returncode == 2 and "cannot start /nonexistent/mpiexec (No such file" in done.stderr


@needs_mpiexec
def test_ranks_are_started():
    done = run("tune", "--show", "--table", "/nonexistent/table.json", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert "; 2 ranks; " in done.stdout
    assert "one rank, since no mpiexec has started it" in run("tune", "--show", "--table", "/nonexistent/t.json").stderr


@needs_mpiexec
def test_an_option_that_selects_a_program_is_given_once():
    done = run("plan", "-n", "2", "--measure-scaling", "unwritten.json", "--replicas", "nosuch", "--pipelines", "none")
    assert done.returncode == 2 and "expected" in done.stderr and "nosuch" in done.stderr, done.stderr


@needs_mpiexec
def test_a_program_with_too_few_ranks():
    done = run("bench", "servers", "-n", "1")
    assert done.returncode != 0 and "expected 2 ranks or more, found 1" in done.stderr

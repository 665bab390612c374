"""``chorus drill``: faults injected into programs are reported, with their rank, and no program hangs."""

import argparse
import sys

import pytest
from fault_campaign import EVEN, PROGRAMS
from fault_reports import wrong
from support.launches import launch_environment, needs_mpiexec
from support.tiers import default

from collectives.cli import drill
from collectives.cli.faults import KINDS, Fault, fault
from collectives.runtime.record.reader import in_folder

pytestmark = [needs_mpiexec, pytest.mark.timeout(900)]


def drilled(tmp_path, monkeypatch, program, ranks, kinds, **options):
    """Faults and outcomes of a drill, and the calls of each rank in the first run."""
    path, runs, calls = tmp_path / "program.py", [], {}
    path.write_text(PROGRAMS[program])
    for name, value in launch_environment().items():
        monkeypatch.setenv(name, value)
    launch = drill.launch

    def noting(*arguments):
        runs.append((arguments[4] if len(arguments) > 4 else None, launch(*arguments)))
        if len(runs) == 1:
            calls.update((one.rank, one.calls) for one in in_folder(arguments[2]))
        return runs[-1][1]

    monkeypatch.setattr(drill, "launch", noting)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert drill.main(["-n", str(ranks), "--kinds", ",".join(kinds), *words, str(path)]) == 0
    return runs[1:], calls


@pytest.mark.parametrize("ranks", default([2, 3, 4], 3))
@pytest.mark.parametrize("program", default(PROGRAMS, "collectives"))
@pytest.mark.parametrize("kind", default(KINDS, "stop", "exit"))
def test_faults_are_reported(tmp_path, monkeypatch, capsys, program, ranks, kind):
    ranks += ranks % 2 if program in EVEN else 0
    seed = sum(map(ord, program + kind)) + ranks
    runs, calls = drilled(tmp_path, monkeypatch, program, ranks, [kind], seed=seed)
    for planned, found in runs:
        print(planned, found.status, f"{found.ended:.1f} s", found.report, file=sys.stderr)
        assert not (problem := wrong(planned, found, calls, PROGRAMS[program])), (problem, found.text)
    assert f"{kind}@" in capsys.readouterr().out


def test_the_table():
    runs = [
        (Fault("stop", 1, 17), drill.Outcome(1, "cause: rank 1 is stopped", 2.04, 4.0, "")),
        (Fault("delay", 0, 3), drill.Outcome(0, "", 0.0, 2.0, "")),
        (Fault("skip", 0, 3), drill.Outcome(None, "", 0.0, 20.0, "")),
    ]
    assert drill.table(runs) == [
        "fault      reported after  ended after  status  report",
        "stop@1:17  2.0 s           4.0 s        1       cause: rank 1 is stopped",
        "delay@0:3  -               2.0 s        0       none",
        "skip@0:3   -               20.0 s       hangs   none",
    ]


def test_names_of_faults():
    assert all(fault(f"{kind}@2:17") == (kind, 2, 17) for kind in KINDS)
    for text in ("", "stop", "stop@1", "stop@1:0", "stop@x:1", "nosuch@1:1", "stop@1:-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected KIND@RANK:CALL"):
            fault(text)


@pytest.mark.parametrize("words", [[], ["-n", "2"], ["-n", "0", "x.py"], ["-n", "2", "--kinds", "nosuch", "x.py"]])
def test_wrong_command_lines(words, capsys):
    with pytest.raises(SystemExit):
        drill.main(words)
    assert "error:" in capsys.readouterr().err

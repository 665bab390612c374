"""Write the report of scripts/gpu_check from the output of its steps, and print what failed.

    python scripts/gpu_report.py DIRECTORY

The directory has steps.tsv, with a step's name, ranks, exit status and seconds on each line, and the files of steps.
Exit status 1 if a step failed or had no time.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.cli.gpu_probe import cause_of, line
from collectives.cli.launcher import ProgramParser

FAILURE = re.compile(r"^(?:FAILED|ERROR) .*|^\S*Error: .*", re.MULTILINE)
"""Lines of a step's output that name what failed."""

GOAL = re.compile(r"^below the goal: .*", re.MULTILINE)
"""Lines that name what is slower than it should be."""

MOST_FAILURES = 20


def step(folder: Path, row: str) -> dict[str, Any]:
    """A step: its line in steps.tsv, the results of its probes, and the lines that name failures."""
    name, ranks, status, seconds = row.split("\t")
    made: dict[str, Any] = {"step": name, "ranks": int(ranks), "status": status, "seconds": int(seconds)}
    output, probes = folder / f"{name}-{ranks}.log", folder / f"{name}-{ranks}.json"
    text = output.read_text(errors="replace") if output.exists() else ""
    if probes.exists():
        made["probes"] = json.loads(probes.read_text())["probes"]
    made["failures"] = [] if status == "0" else FAILURE.findall(text)[:MOST_FAILURES]
    made["goals"] = GOAL.findall(text)
    made["cause"] = cause_of(text) if made["failures"] else ""
    made["output"] = [row for row in text.splitlines() if row.strip()][-MOST_FAILURES:]
    return made


def page(steps: Sequence[dict[str, Any]]) -> str:
    """The report as Markdown."""
    rows = ["# GPU check", "", "| step | ranks | exit status | seconds |", "|---|---|---|---|"]
    rows += [f"| {one['step']} | {one['ranks']} | {one['status']} | {one['seconds']} |" for one in steps]
    for one in steps:
        rows += ["", f"## {one['step']}, ranks: {one['ranks']}", "", "```text"]
        rows += [line(result) for result in one["probes"]] if "probes" in one else one["output"]
        rows += ["```", *(f"- {text}" for text in (*one["failures"], *one["goals"]))]
        rows += [f"- likely cause: {one['cause']}"] if one["cause"] else []
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write report.json and report.md; return 1 if a step failed, else 0."""
    parser = ProgramParser(__doc__)
    parser.add_argument("folder", type=Path, help="the directory of scripts/gpu_check")
    folder = parser.parse_args(arguments).folder
    steps = [step(folder, row) for row in (folder / "steps.tsv").read_text().splitlines()]
    (folder / "report.json").write_text(json.dumps(steps, indent=1) + "\n")
    (folder / "report.md").write_text(page(steps))
    print(f"\nreport: {folder / 'report.md'}")
    for one in steps:
        for goal in one["goals"]:
            print(f"{one['step']} on {one['ranks']} ranks: {goal}")
    failed = [one for one in steps if one["status"] != "0"]
    for one in failed:
        print(f"{one['step']} on {one['ranks']} ranks: exit status {one['status']}", *one["failures"], sep="\n    ")
        if one["cause"]:
            print(f"    likely cause: {one['cause']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the report of scripts/gpu_check from the output of its steps, and print what failed.

    python tests/studies/gpu_report.py DIRECTORY

The directory has steps.tsv, with a step's name, ranks, exit status and seconds on each line, and the files of steps:
the output, and results as JSON. A status is also "no time", "stopped" (at the end of a step's time), or "left out" and
a reason. Ends with what failed, and the likely cause. Exit status 1 if a step failed, was stopped or had no time.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_probe import cause_of, line

from collectives.cli.launcher import ProgramParser

FAILURE = re.compile(r"^(?:FAILED|ERROR) .*|^\S*Error: .*", re.MULTILINE)
"""Lines of a step's output that name what failed."""

GOAL = re.compile(r"^below the goal: .*", re.MULTILINE)
"""Lines that name what is slower than it should be."""

MOST_FAILURES, MOST_LINES = 20, 40


STOPPED = {"124": "stopped", "137": "stopped"}
"""Exit statuses of `timeout`."""


def step(folder: Path, row: str) -> dict[str, Any]:
    """A step: its line in steps.tsv, its results, and the lines of its output that name failures."""
    name, ranks, status, seconds = row.split("\t")
    status = STOPPED.get(status, status)
    made: dict[str, Any] = {"step": name, "ranks": int(ranks), "status": status, "seconds": int(seconds)}
    output, results = folder / f"{name}-{ranks}.log", folder / f"{name}-{ranks}.json"
    text = output.read_text(errors="replace") if output.exists() else ""
    if results.exists():
        made["results"] = json.loads(results.read_text())
    made["failures"] = [] if is_good(made) else FAILURE.findall(text)[:MOST_FAILURES]
    made["goals"] = GOAL.findall(text)
    made["cause"] = "" if is_good(made) else cause_of(text)
    made["output"] = [row for row in text.splitlines() if row.strip()][-MOST_LINES:]
    return made


def probes_of(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of a step's probes."""
    found: list[dict[str, Any]] = one.get("results", {}).get("probes", [])
    return found


def is_good(one: dict[str, Any]) -> bool:
    """True if a step succeeded, or was left out for a reason."""
    status: str = one["status"]
    return status == "0" or status.startswith("left out")


def page(steps: Sequence[dict[str, Any]]) -> str:
    """The report as Markdown."""
    rows = ["# GPU check", "", "| step | ranks | exit status | seconds |", "|---|---|---|---|"]
    rows += [f"| {one['step']} | {one['ranks']} | {one['status']} | {one['seconds']} |" for one in steps]
    for one in steps:
        rows += ["", f"## {one['step']}, ranks: {one['ranks']}", "", "```text"]
        probes = probes_of(one)
        rows += [line(result) for result in probes] if probes else one["output"]
        rows += ["```", *(f"- {text}" for text in (*one["failures"], *one["goals"]))]
        rows += [f"- likely cause: {one['cause']}"] if one["cause"] else []
    return "\n".join([*rows, "", "## Summary", "", *(f"- {text}" for text in summary(steps)), ""])


def summary(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about what was left out, what is below its goal, what CUDA refused, and what failed, with likely causes."""
    texts = []
    for one in steps:
        where = f"{one['step']} on {one['ranks']} ranks"
        texts += [f"{where}: {one['status']}"] if one["status"].startswith("left out") else []
        texts += [f"{where}: {goal}" for goal in one["goals"]]
        texts += [f"{where}: {line(result)}" for result in probes_of(one) if "error" in result]
    for one in steps:
        if not is_good(one):
            texts.append(f"{one['step']} on {one['ranks']} ranks: exit status {one['status']}")
            texts += [f"    {failure}" for failure in one["failures"] or one["output"][-3:]]
            texts += [f"    likely cause: {one['cause']}"] if one["cause"] else []
    return texts or ["nothing failed, and all goals were reached"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write report.json and report.md; return 1 if a step failed, else 0."""
    parser = ProgramParser(__doc__)
    parser.add_argument("folder", type=Path, help="the directory of scripts/gpu_check")
    folder = parser.parse_args(arguments).folder
    steps = [step(folder, row) for row in (folder / "steps.tsv").read_text().splitlines()]
    (folder / "report.json").write_text(json.dumps(steps, indent=1) + "\n")
    (folder / "report.md").write_text(page(steps))
    print(f"\nreport: {folder / 'report.md'}", *summary(steps), sep="\n")
    return 0 if all(map(is_good, steps)) else 1


if __name__ == "__main__":
    sys.exit(main())

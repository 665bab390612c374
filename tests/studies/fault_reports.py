"""Check of reports on faults: each names the rank, the call and the line of the program.

The truth is a run of the same program without a fault, whose records have the calls of each rank, and the line that is
printed with the fault. What a report has to name depends on the kind:

- stop, exit: the rank and its last call, or that it has made none; a call that others wait for it in, which it has not
  made or, if it is non-blocking, not ended; and the line of that call.
- raise: the rank, its last call, and in the traceback the line of the fault.
- kill: the rank and its last call. If others had time to notice: the call and the line that they wait in.
- skip, more, diverge: the rank, and the first call that differs; or the call that comes last on either, if none does;
  and a line where a rank has noticed it. Wrong data may lead to an error of the program itself before, at its line.
- delay: nothing. It is shorter than the time without progress after which ranks report.
- corrupt: nothing, or an error of the program itself: no rank has made another call, none is missing.

Other ranks may end as a consequence, and are named too, but no report says that calls differ if they do not.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.cli.drill import TIMEOUT, Outcome
from collectives.cli.faults import MARK, Fault
from collectives.runtime.record.causes import facts
from collectives.runtime.record.conditions import describe_call
from collectives.runtime.record.layout import OUTSIDE

ENDS = 10.0
"""Seconds at most from a fault to the end."""

CONDITIONS = {
    "stop": "is stopped",
    "exit": "has left (the program|a call in the middle: SystemExit)",
    "raise": "has (ended by|left a call in the middle:) InjectedFault",
    "kill": "has (died|ended)",
}

WRONG_CALLS = "skip", "more", "diverge"

CONSEQUENCE = r"has (ended by|left the program|died|ended)"
"""Condition of other ranks that a fault may have ended."""

OTHER_CALLS = r"make different calls|Mismatch"

METHODS = {
    "broadcast": "Bcast", "allreduce": "Allreduce|allreduce", "allgather": "[Aa]llgather", "alltoall": "Alltoall",
    "barrier": "Barrier|barrier", "gather": "Gather", "scatter": "Scatter",
}  # fmt: skip
"""Methods by collective, for programs of calls. Each line there makes one call, starts several or waits for one."""


class Truth(NamedTuple):
    """Fault as it was made, with the calls of its rank in a run without it, by their number in the record from 1."""

    fault: Fault
    line: str
    calls: np.ndarray
    text: str
    """Source of the program, in a file ``program.py``."""

    @property
    def before(self) -> str:
        """Pattern of the text on the last call of the rank."""
        earlier = self.calls[self.calls["number"] < self.fault.call]
        return rf", after {named(earlier[-1])}" if len(earlier) else ", before its first call"

    @property
    def missing(self) -> list[Any]:
        """Calls that the rank has not made, or not ended."""
        number, form = self.calls["number"], self.calls["form"]
        started = (form > 0) & (number >= self.fault.call - UNDER_WAY)
        return list(self.calls[(number >= self.fault.call) | started])

    def first_difference(self) -> Iterator[int]:
        """Number on its channel of the first call that differs from those of other ranks, or of the last one."""
        (made,) = self.calls[self.calls["number"] == self.fault.call]
        channel = [call for call in self.calls if all(call[name] == made[name] for name in ("communicator", "channel"))]
        right = [facts(call) for call in channel]
        at, kind = int(made["turn"]) - int(channel[0]["turn"]), self.fault.kind
        wrong: list[Any] = list(right)
        wrong[at:at] = [right[at]] if kind == "more" else [None]  # a broadcast differs from all calls but its like
        if kind == "skip":
            wrong = right[:at] + right[at + 1 :]
        differing = [turn for turn, (one, other) in enumerate(zip(right, wrong)) if one != other]
        yield int(channel[0]["turn"]) + (differing[0] if differing else min(len(right), len(wrong)))

    def is_line_of(self, number: int, call: str) -> bool:
        """True if a line of the program makes a call of this collective, or waits for one, or is not known to."""
        code = self.text.splitlines()[number - 1]
        return "Wait" in code or "engine" in code.lower() or re.search(METHODS.get(call, "$^"), code) is not None


UNDER_WAY = 3
"""Non-blocking calls that the programs have under way."""


def named(call: Any) -> str:
    """Pattern of the text on a call, or on a wait outside of collectives, which has no number."""
    if call["channel"] == OUTSIDE:
        return re.escape(describe_call(call))
    return rf"{call['collective'].decode()}\b[^#;]*#{call['turn']}\b"


def truth(planned: Fault, found: Outcome, calls: Mapping[int, np.ndarray], text: str) -> Truth | None:
    """Truth on a fault that was made. None if it was not."""
    made = re.search(rf"{MARK} {planned.kind}@(\d+):(\d+) in \w+, at (\S+:\d+) ", found.text)
    if made is None:
        return None
    fault = Fault(planned.kind, int(made[1]), int(made[2]))
    return Truth(fault, made[3], calls[fault.rank], text)


def wrong(planned: Fault, found: Outcome, calls: Mapping[int, np.ndarray], text: str) -> str:
    """Text on what is wrong with the report of a fault, or with its time. Empty if nothing is."""
    known = truth(planned, found, calls, text)
    if found.status is None or found.ended > ENDS:
        return f"ended after {found.ended:.1f} s"
    if known is None:
        return "no fault"
    lines = said(found)
    if planned.kind == "delay":
        return f"status {found.status}" if found.status else "a false alarm" if lines or found.report else ""
    if planned.kind not in WRONG_CALLS and re.search(OTHER_CALLS, found.text):
        return "calls that do not differ"
    if planned.kind == "corrupt":
        false = [one for one in lines if not re.search(r"rank \d+ has ended by|has left .* before its end", one)]
        return f"a false cause: {false[0]}" if false else "" if is_own_error(found) or not found.status else "no error"
    if not found.status:  # the last call, or one whose data other ranks do not need; a program may not look at its data
        return "" if planned.kind in WRONG_CALLS and not lines else "no report"
    if found.reported > TIMEOUT + 2:
        return f"reported after {found.reported:.1f} s"
    return wrong_calls(known, found, lines) if planned.kind in WRONG_CALLS else wrong_end(known, found, lines)


def said(found: Outcome) -> list[str]:
    """Causes that this package has found: in the output of a run, or else in its records."""
    causes = re.findall(r"^ *(?:chorus:|cause:|.*RankLeft: nothing was updated;) (.*)", found.text, re.M)
    causes = [one for one in causes if not one.startswith(("fault ", "nothing has moved"))]
    return causes or [found.report.removeprefix("records: ")] * found.report.startswith("records: ")


def wrong_end(known: Truth, found: Outcome, lines: Sequence[str]) -> str:
    """The same of a rank that makes no more calls."""
    rank, kind = known.fault.rank, known.fault.kind
    right = [one for one in lines if re.match(rf"rank {rank} {CONDITIONS[kind]}", one)]
    if not right:
        return "not its rank"
    accepted = rf"rank {rank} |rank \d+ {CONSEQUENCE}|.*, and rank {rank} has not$"
    if others := [one for one in lines if not re.match(accepted, one)]:
        return f"another cause: {others[0]}"
    if not all(re.search(known.before, one) for one in right):
        return "not its last call"
    if kind == "raise":
        file, _, number = known.line.rpartition(":")
        return "" if re.search(rf'File "{re.escape(file)}", line {number}\b', found.text) else "not its line"
    if found.report.startswith("records: "):
        return ""  # all were killed at once
    if any("a call in the middle" in one for one in right) and re.search(r'program\.py", line \d+', found.text):
        return ""  # the traceback is that of the call
    awaited = [one for one in right if any(re.search(rf"for it in {named(call)}", one) for call in known.missing)]
    return wrong_line(known, found, awaited) if awaited else "not the call that others wait in"


def wrong_line(known: Truth, found: Outcome, awaited: Sequence[str]) -> str:
    """The same of the lines at which others wait."""
    for one in awaited:
        call = re.search(r"for it in (\w+)", one)
        at = re.search(r"for it in .*, at \S*?(\w+\.py):(\d+) ", one)
        if call is not None and at is not None and (at[1] != "program.py" or known.is_line_of(int(at[2]), call[1])):
            return ""
    return "not the line"


def wrong_calls(known: Truth, found: Outcome, lines: Sequence[str]) -> str:
    """The same of a rank that makes other calls."""
    if is_own_error(found):
        return ""
    rank, (first,) = known.fault.rank, known.first_difference()
    right = [one for one in lines if re.search(rf"\brank {rank}\b", one)]
    if not right:
        return "not its rank"
    if not any(re.search(rf"#{first}\b", one) for one in right):
        return f"not the first call that differs, #{first}"
    at = re.findall(r'program\.py", line (\d+)', found.text)
    return "" if at else "no line"


def is_own_error(found: Outcome) -> bool:
    """True if wrong data have led to an error of the program itself, or of its engine, at a line of it."""
    return re.search(
        r'program\.py", line \d+.*\n(.*\n)*?(\w*Error|StepFailed|RankMismatch): ', found.text
    ) is not None and (re.search(r"^collectives\.", found.text, re.M) is None)

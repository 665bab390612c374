"""pytest under mpiexec: all ranks run the same tests in step, agree on every outcome, and rank 0 reports.

After each phase of a test (setup, call, teardown) the ranks exchange outcomes on a communicator of their own: a
failure on any rank is a failure on all, and rank 0 reports the failing ranks. A test without fixtures of its own has
one exchange, after the call. The job ends with the stacks of all ranks instead of a hang:

- a rank that failed waits `PATIENCE` seconds for the others, which may be stuck in a collective that it left;
- a test that exceeds its limit (`timeout` in pyproject.toml, or `@pytest.mark.timeout(seconds)`) is stopped.

A plugin of pytest, inactive without ``--with-mpi``.
"""

import contextlib
import faulthandler
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PATIENCE = 5.0


def pytest_addoption(parser):
    parser.addoption("--tally", metavar="FILE", help="write the counts 'passed failed skipped' to this file")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False):
        config.pluginmanager.register(Ranks(config), "ranks")


def pytest_terminal_summary(terminalreporter, config):
    ranks = config.pluginmanager.getplugin("ranks")
    if config.getoption("--tally") and (ranks is None or ranks.rank == 0):
        kinds = (("passed", "xpassed"), ("failed", "error"), ("skipped", "xfailed"))
        counts = [sum(len(terminalreporter.stats.get(kind, ())) for kind in group) for group in kinds]
        Path(config.getoption("--tally")).write_text(" ".join(map(str, counts)) + "\n")


class RankFailures:
    """What a failed report shows: every rank that failed, ranks with the same story together."""

    def __init__(self, failures, size):
        together = {}
        for rank, (text, _) in failures.items():
            together.setdefault(re.sub(r"0x[0-9a-f]+", "0x...", text), []).append(rank)
        self.parts = [(f"{named(ranks)} of {size}", failures[ranks[0]][0]) for ranks in together.values()]
        first = min(failures)
        self.reprcrash = SimpleNamespace(message=f"{named(list(failures))}: {failures[first][1]}")

    def toterminal(self, tw):
        for who, text in self.parts:
            tw.sep("-", f"failed on {who}", red=True)
            tw.line(text)

    def __str__(self):
        return "\n".join(f"--- failed on {who}\n{text}" for who, text in self.parts)


def named(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def story(report):
    """A report as (text, first line of the message), so that another rank can show it."""
    skipped = isinstance(report.longrepr, tuple)
    text = f"{report.outcome}: {report.longrepr[2]}" if skipped else report.longreprtext
    for title, content in report.sections:
        text += f"\n----- {title} -----\n{content.rstrip()}"
    crash = getattr(report.longrepr, "reprcrash", None)
    message = getattr(crash, "message", None) or text or report.outcome
    return text or report.outcome, message.splitlines()[0]


def outcome(report):
    return f"x{report.outcome}" if hasattr(report, "wasxfail") else report.outcome


def has_shared_fixtures(item):
    """True if all fixtures of a test live as long as the session: its setup and teardown do nothing."""
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return all(
        one.scope == "session" or one.func.__name__ == "get_direct_param_fixture_func"
        for same in definitions
        for one in same
    )


def readable(stack):
    """A stack dump without pytest's own frames, and without the threads of this harness."""
    frames = re.compile(r"/(_pytest|pluggy|pytest)/|/pytest_timeout.py|<frozen runpy>")
    threads = [
        "\n".join(line for line in thread.splitlines() if not frames.search(line))
        for thread in stack.strip().split("\n\n")
    ]
    own = re.compile(r".*(\n\s+File \".*/(threading|harness)\.py\".*)*")
    return "\n".join(thread for thread in threads if not own.fullmatch(thread)) or stack


class Ranks:
    """The hooks that keep the ranks in step, and what they share: a communicator, a directory per node."""

    def __init__(self, config):
        from mpi4py import MPI

        self.abort = MPI.COMM_WORLD.Abort
        self.library = " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))])
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.config = config
        self.problem = None  # why the collected tests cannot be run
        self.collect_errors = []
        self.test = "the start"
        self.last = False  # no test follows
        self.timer = None

        scratch = tempfile.mkdtemp(prefix="chorus-tests-") if self.rank == 0 else None
        self.scratch = Path(self.comm.bcast(scratch))
        self.scratch.mkdir(exist_ok=True)
        config.option.basetemp = config.option.basetemp or str(self.scratch / f"tmp-{self.rank}")
        if self.rank:
            config.option.xmlpath = None  # --junitxml is for the rank that reports

        # Every rank writes its stack to a file of its own when it gets SIGUSR1, wherever it is stuck.
        self.stderr = os.dup(2)
        self.stack = open(self.scratch / f"stack-{self.rank}", "w")  # noqa: SIM115 (it lives as long as we do)
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True, chain=False)
        here = socket.gethostname()
        everyone = self.comm.allgather((here, os.getpid()))
        self.neighbours = {rank: pid for rank, (host, pid) in enumerate(everyone) if host == here}

        with contextlib.suppress(ImportError):
            from hypothesis import HealthCheck, settings

            # The same examples everywhere: nothing random, remembered, or dependent on the clock.
            settings.register_profile(
                "mpi", derandomize=True, database=None, deadline=None, print_blob=False,
                report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow],
            )  # fmt: skip
            settings.load_profile("mpi")

    # Meeting and stopping.

    def meet(self, place, code=0, failure=None):
        """Wait until every rank has come to this place, and return their codes."""
        if failure:
            (self.scratch / f"failure-{self.rank}").write_text(failure)
        mine = np.array([zlib.crc32(place.encode()), code], dtype=np.int64)
        all_of_them = np.empty((self.size, 2), dtype=np.int64)
        request = self.comm.Iallgather(mine, all_of_them)
        deadline = time.monotonic() + (PATIENCE if failure else math.inf)
        polls = 0
        while not request.Test():
            polls += 1
            if polls < 100:
                os.sched_yield()  # on shared cores the others run at once; a nap lasts longer than most tests
            else:
                time.sleep(min(2e-7 * polls, 5e-4))
            if time.monotonic() > deadline:
                self.stop(f"{place}: rank {self.rank} failed, {PATIENCE:g} s later others are still inside")
        if (all_of_them[:, 0] != mine[0]).any():
            places = self.comm.allgather(place)
            where = ", ".join(f"rank {rank} at {place}" for rank, place in enumerate(places))
            self.stop(f"the ranks are not in step: {where}")
        if failure:
            (self.scratch / f"failure-{self.rank}").unlink()
        return all_of_them[:, 1].tolist()

    def stop(self, why):
        """Say why, what failed, and where every rank of this node stands; then end the job.

        The first rank that gets here speaks for all; the others wait for their end.
        """
        try:
            (self.scratch / "stopped").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(30)
            os._exit(1)
        for pid in self.neighbours.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        stacks = [self.scratch / f"stack-{rank}" for rank in self.neighbours]
        patience = time.monotonic() + 10
        while time.monotonic() < patience and not all(stack.stat().st_size for stack in stacks):
            time.sleep(0.05)
        time.sleep(0.1)  # the last one may still be writing
        lines = ["", f"=== STOPPED: {why}"]
        if (self.scratch / "earlier").exists():
            lines += ["=== failures before this", (self.scratch / "earlier").read_text()]
        for rank in self.neighbours:
            if (self.scratch / f"failure-{rank}").exists():
                lines += [f"=== rank {rank} failed", (self.scratch / f"failure-{rank}").read_text()]
        for rank, stack in zip(self.neighbours, stacks):
            lines += [f"=== rank {rank} stands at", readable(stack.read_text())]
        with open(self.stderr, "w", closefd=False) as err:
            err.write("\n".join([*lines, "=== end of stacks", ""]))
        shutil.rmtree(self.scratch, ignore_errors=True)
        time.sleep(0.5)  # until mpiexec has passed it on
        last_resort = threading.Timer(5, os._exit, [1])
        last_resort.daemon = True
        last_resort.start()
        self.abort(1)

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item, settings):
        why = f"{item.nodeid} outlasted its limit of {settings.timeout:g} s"
        self.timer = threading.Timer(settings.timeout, self.stop, [why])
        self.timer.daemon = True
        self.timer.start()
        # Where a C function keeps the interpreter lock, no thread can speak.
        faulthandler.dump_traceback_later(settings.timeout + 15, exit=True, file=self.stderr)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item):
        return True  # not yet: pytest-timeout lets go at the first exception, but a teardown may hang too

    def pytest_internalerror(self, excrepr):
        self.stop(f"internal error on rank {self.rank} at {self.test}\n{excrepr}")

    # The session, in the order of its events.

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self):
        manager = self.config.pluginmanager
        if self.rank:
            silent = open(os.devnull, "w")  # noqa: SIM115 (the reporter's, to the end)
            reporter = manager.getplugin("terminalreporter")
            reporter._tw = type(reporter._tw)(silent)
            if hasattr(self.config, "cache"):
                self.config.cache.set = lambda key, value: None
        elif self.config.get_verbosity() <= 0:
            for plugin in manager.get_plugins():
                if type(plugin).__name__ == "MPIPlugin":
                    plugin._is_testing_mpi = False  # no closing page about the MPI: the header has a line

    def pytest_report_header(self):
        return f"mpi: {self.size} rank{'s' if self.size > 1 else ''} under {self.library}; rank 0 reports"

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """All ranks run the tests of rank 0 in its order; other tests somewhere are an error."""
        self.meet("the end of the collection")
        names = self.comm.allgather([item.nodeid for item in items])
        errors = self.comm.allgather("\n".join(self.collect_errors))
        position = {name: index for index, name in enumerate(names[0])}
        if any(errors) and not all(errors):
            who = [rank for rank in range(self.size) if errors[rank]]
            self.problem = f"{named(who)} of {self.size} could not collect the tests\n{errors[who[0]]}"
        elif other := [rank for rank in range(self.size) if set(names[rank]) != set(position)]:
            odd = sorted(set(names[other[0]]) ^ set(position))
            self.problem = f"{named(other)} collected other tests than rank 0: {', '.join(odd[:5])}"
        else:
            items.sort(key=lambda item: position[item.nodeid])
        for item in items:
            self.in_step(item)

    def in_step(self, item):
        """Let the ranks meet after every example of hypothesis, so that all see and shrink one failure."""
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is None or hasattr(handle.inner_test, "alone"):
            return
        from hypothesis.errors import HypothesisException

        alone = handle.inner_test

        def together(*args, **kwargs):
            text = ""
            try:
                alone(*args, **kwargs)
            except HypothesisException:  # assume(): the same on all ranks, as the data are
                raise
            except (Exception, pytest.fail.Exception) as error:
                inside = error.__traceback__.tb_next or error.__traceback__
                text = "".join(traceback.format_exception(type(error), error, inside)).rstrip()
            if any(self.meet(f"{self.test} (an example)", bool(text), text)):
                texts = self.comm.allgather(text)
                told = [f"on rank {rank} of {self.size}:\n{text}" for rank, text in enumerate(texts) if text]
                raise AssertionError("\n".join(told))

        together.alone = alone
        handle.inner_test = together

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if self.problem:
            session.shouldfail = self.problem
            raise session.Failed(self.problem)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.test = item.nodeid
        self.last = nextitem is None
        try:
            return (yield)
        finally:
            if self.timer:
                self.timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        kinds = ["passed", "failed", "skipped", "xpassed", "xfailed", "xskipped"]
        mine = outcome(report)
        when = report.when
        if has_shared_fixtures(item) and not self.last:
            if when != "call" and mine == "passed":
                return report
            if when == "setup":
                when = "call"  # a rank that skips or fails before its call meets the others after theirs
        place = f"{item.nodeid} ({when})"
        failure = story(report)[0] if report.failed else None
        theirs = [kinds[code] for code in self.meet(place, kinds.index(mine), failure)]
        if report.failed or len(set(theirs)) > 1:
            failed = [rank for rank in range(self.size) if theirs[rank] == "failed"]
            speaks = mine == "failed" or not failed
            stories = self.comm.gather(story(report) if speaks else None)
            report.outcome = "failed"
            vars(report).pop("wasxfail", None)
            if self.rank:
                report.longrepr = "see the report of rank 0"
            elif failed:
                report.longrepr = RankFailures({rank: stories[rank] for rank in failed}, self.size)
            else:
                odd = "; ".join(f"rank {rank}: {stories[rank][0]}" for rank in range(self.size))
                report.longrepr = f"the ranks disagree about the outcome\n{odd}"
            if self.rank == 0:
                with open(self.scratch / "earlier", "a") as earlier:
                    earlier.write(f"--- {place}\n{report.longreprtext}\n")
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        """One exit status for all ranks, so that mpiexec has nothing to remark."""
        session.exitstatus = max(self.meet("the end of the session", int(exitstatus)))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        self.meet("the end")
        faulthandler.unregister(signal.SIGUSR1)
        self.stack.close()
        os.close(self.stderr)
        if self.neighbours and self.rank == min(self.neighbours):
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.comm.Free()
        sys.stdout.flush()

"""Run packages' own tests of their use of MPI, natively and on Chorus, and compare the outcomes.

    python tests/studies/package_tests.py --ranks 2,3
    python tests/studies/package_tests.py --ranks 3 pylops-mpi schwimmbad

pip installs the packages of the table `SUITES`, and extracts their test files from source distributions, in a folder of
the user's cache. They run under the MPI of this Python's environment; MPIEXEC names another. A package that pip cannot
install is left out, with pip's reason. Tests that pass on mpi4py's communicators must pass on those that
``python -m collectives`` puts in their place. The last lines are a table of the passed tests. Ends with status 1 if a
test passes natively only. For mpi4py's own tests see mpi4py_tests.py.
"""

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from mpi4py_files import cache_folder, download
from mpi4py_tests import Outcome, collected
from mpi_launches import Launch, describe_end, find_mpiexec, run_ranks

from collectives.cli.arguments import rank_counts
from collectives.cli.launcher import ProgramParser


class Suite(NamedTuple):
    """Tests of one package."""

    release: str
    files: Sequence[str]
    """Paths in the source distribution: folders or files of pytest."""
    programs: Sequence[str] = ()
    """Paths of programs there, or beside this file: each is one test, which passes if it ends with status 0."""
    smallest: int = 1
    """Smallest number of ranks."""
    others: Sequence[str] = ()
    """Other requirements of the tests."""
    module: Sequence[str] = ()
    """Options of Python with which ranks other than 0 wait for work."""
    options: str = ""
    """Options of pytest."""
    package: str = ""
    """Name of the package, if it is not that of the suite."""


MPI4PY = version("mpi4py")

SUITES = {
    "mpi4py-fft": Suite("2.0.6", [f"tests/test_{name}.py" for name in ("pencil", "darray", "mpifft")]),
    "pylops-mpi": Suite("0.8.0", ["tests"], others=["mpi4py-fft==2.0.6"], options="--noconftest"),
    "mpiarray": Suite("0.2.1", ["src/mpiarray/tests/unit"], options="-k 'not (examples or guides or petsc)'"),
    "schwimmbad": Suite(
        "0.4.2", [], ["tests/test_mpi.py", "tests/test_mpi_with_dill.py"],
        smallest=2, others=["dill"],
    ),
    "emcee": Suite("3.1.6", [], ["emcee_pool.py"], smallest=2, others=["schwimmbad==0.4.2"]),
    "mpi4py": Suite(MPI4PY, ["demo/futures/test_futures.py"], smallest=2, module=["-m", "mpi4py.futures"]),
    "mpi4py-demo": Suite(
        MPI4PY, ["demo/reductions/test_reductions.py", "demo/sequential/test_seq.py"], [f"demo/{name}.py" for name in (
            "compute-pi/cpi-cco", "compute-pi/cpi-rma", "mandelbrot/mandelbrot", "threads/sendrecv", *(
                f"mpi-ref-v1/ex-{number}" for number in (
                    "2.01", "2.08", "2.16", "2.29", "2.32", "2.34", "2.35", "3.01", "3.02", "3.03", "3.04", "3.05",
                    "3.06", "3.07", "3.08", "3.09", "3.11", "3.12", "3.13")),
            "nxtval/nxtval-threads", "nxtval/nxtval-onesided", "nxtval/nxtval-scalable", "nxtval/nxtval-mpi3")],
        package="mpi4py",
    ),
    "mpi4py-osu": Suite(
        MPI4PY, [], [f"demo/osu_{name}.py" for name in (
            "allgather", "alltoall", "alltoallv", "barrier", "bcast", "gather", "scatter", "bibw", "bw", "latency",
            "multi_lat")],
        smallest=2, package="mpi4py",
    ),
    "pshmem": Suite("1.3.5", ["pshmem.test"], options="--pyargs"),
    "pyske": Suite("0.1.1", ["pyske/test"]),
    "shift-fft": Suite("1.1.1", ["tests/mpi_tests"]),
    "mpi-list": Suite("0.4.0", ["tests"], options="-c /dev/null"),
    "mpiparticles": Suite("0.1.0", [], ["src/mpiparticles/tests/_mpi_job.py"], smallest=2),
    "shenfun": Suite("4.3.0", [f"tests/test_{name}.py" for name in ("tensorproductspace", "fourier", "curl", "io")]),
    "libensemble": Suite(
        "1.6.1", [], [f"libensemble/tests/functionality_tests/test_{name}.py" for name in (
            "mpi_comms", "uniform_sampling", "1d_uniform_sampling_with_comm_dup", "1d_splitcomm", "worker_exceptions")],
        smallest=3,
    ),
    "mpi-sppy": Suite(
        "0.14.0", [f"mpisppy.tests.test_{name}" for name in ("with_cylinders", "comm_lor_check", "flex_xhat_assembly")],
        smallest=2, others=["highspy", "scipy", "pandas"], options="--pyargs",
    ),
    "distwq": Suite("1.3.3", [], ["examples/example_distwq.py"], smallest=2, others=["scipy"]),
}  # fmt: skip
"""Tests by package. The conftest.py of pylops-mpi needs an older pytest; it adds ranks to the names of tests only."""

TESTS = {"tests", "test", "testdata", "docs", "demo", "examples"}
"""Names of folders of tests in source distributions."""


def installed(package: str, suite: Suite) -> Path:
    """Folder with the package and its requirements, and its tests in ``source``; RuntimeError if pip fails.

    Of the source distribution only folders of tests are extracted, so that the installed package is imported.
    """
    package = suite.package or package
    folder = cache_folder() / f"package-{package}-{suite.release}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target = Path(temporary, "target")
        requirements = [f"{package}=={suite.release}", *suite.others]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--target", str(target), *requirements], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=3600, check=False,
        )  # fmt: skip
        if done.returncode:
            errors = [line.strip() for line in done.stdout.splitlines() if "rror" in line] or ["pip install failed"]
            raise RuntimeError("; ".join(dict.fromkeys(errors))[-300:])
        Path(target, "source").mkdir()
        with tarfile.open(download(package, suite.release, Path(temporary))) as archive:
            for member in archive.getmembers():
                member.name = member.name.partition("/")[2]
                if TESTS.intersection(Path(member.name).parts):
                    archive.extract(member, target / "source", filter="data")
        target.rename(folder)
    return folder


def run(mpiexec: str, ranks: int, suite: Suite, folder: Path, limit: float, native: bool) -> dict[str, Outcome]:
    """Run a suite on `ranks` ranks; return outcomes by test, and the launch's if that failed.

    A test that ends the ranks costs the launch; the tests after it run in another one.
    """
    outcomes: dict[str, Outcome] = {}
    here = Path(__file__).parent
    programs = [str(here / name) if (here / name).exists() else name for name in suite.programs]
    options = ["--programs", *programs, "--tests", *suite.files, f"--pytest={suite.options}"]
    words = [*([] if native else ["-m", "collectives"]), *suite.module]
    words += [str(here / "package_rank.py")] if suite.module else ["-m", "package_rank"]
    while True:
        with tempfile.TemporaryDirectory() as results:
            Path(results, "known").write_text("\n".join(outcomes))
            launch = Launch(mpiexec, 1 if suite.module else ranks, "package_rank", Path(results))
            with chdir(folder / "source"):
                status, output = run_ranks(mpiexec, ranks, [*words, results, str(limit), *options], 10 * limit)
            found, ended = collected(launch)
        outcomes |= found
        if status == 0 and ended:
            return outcomes
        if ended or not found or status is None:
            outcomes["the launch"] = Outcome("failed", describe_end(status, output))
            return outcomes


def main(argv: list[str] | None = None) -> int:
    """Run the suites and print the table; return 1 if a test passes on mpi4py's communicators only."""
    parser = ProgramParser(__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"(default: {', '.join(SUITES)})")
    parser.add_argument("--ranks", type=rank_counts, default="2,3", metavar="LIST", help="(default 2,3)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for each test (default 300)")
    args = parser.parse_args(argv)
    if (mpiexec := find_mpiexec()) is None:
        parser.error("there is no mpiexec: set MPIEXEC to one")
    if unknown := set(args.packages) - SUITES.keys():
        parser.error(f"no tests of {', '.join(sorted(unknown))} are known")
    rows, failures = [f"{'package':18}  ranks  native  Chorus  skipped"], 0
    for package in args.packages or SUITES:
        suite = SUITES[package]
        try:
            folder = installed(package, suite)
        except RuntimeError as error:
            print(f"left out: {package} {suite.release}: {error}", flush=True)
            continue
        before = list(sys.path)
        sys.path.append(str(folder))
        for ranks in [ranks for ranks in args.ranks if ranks >= suite.smallest]:
            natively = run(mpiexec, ranks, suite, folder, args.limit, native=True)
            passed = {name for name, outcome in natively.items() if outcome.kind == "passed"}
            ours = run(mpiexec, ranks, suite, folder, args.limit, native=False)
            both = {name for name, outcome in ours.items() if outcome.kind == "passed"} & passed
            skipped = sum(outcome.kind == "skipped" for outcome in natively.values())
            name = f"{package} {suite.release}"
            rows.append(f"{name:18}  {ranks:5}  {len(passed):6}  {len(both):6}  {skipped:7}")
            print(rows[-1], flush=True)
            for test, outcome in natively.items():
                if outcome.kind == "failed":
                    print(f"    fails natively: {test}", flush=True)
            for test in sorted(passed - both):
                failures += 1
                print(f"    {test}: {ours.get(test, ours.get('the launch', Outcome('failed', 'not run'))).text}")
        sys.path[:] = before
    print("\n" + "\n".join(rows))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Check that training gives bitwise the same parameters in all layouts.

python scripts/verify_layouts.py
python scripts/verify_layouts.py --model gpt --ranks 1,2,4 --layouts dp,zero3,pp:1f1b,pp:zb-h1

Each line of the table is a training of its own (`chorus train --reproducible`) under an mpiexec of its own, with the
same micro-batches and global batch; its last checkpoint, weights and optimiser state, is compared with that of the
model's first line. Where they differ, the first different tensor is named. Exit status 1 if any differs or fails.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives.cli.arguments import names_of, rank_counts
from collectives.cli.launcher import ProgramParser, at_least
from collectives.conformance.launches import find_mpiexec, run_ranks
from parallel.checkpoint.checkpoint_files import all_in, tensors_in
from parallel.data_parallel.layouts import LAYOUTS
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.schedules import SCHEDULES

LIMIT = 120.0  # seconds for each training

MODELS = {
    "mlp": "--data teacher_classes --model mlp:tiny --batch 40 --micro-batch 10",
    "gpt": "--data copy --model gpt:tiny --length 16 --batch 16 --micro-batch 4",
}
"""Options of `chorus train` by model."""

UNITS = {"mlp": 2, "gpt": 4}  # units by model: the most parts of a pipeline

PIPELINES = [f"pp:{name}" for name, entry in SCHEDULES.items() if entry.version is None]
"""Pipeline layouts whose gradients equal those of one rank: schedules without stale weights."""

VARIANTS = (("--recompute",), ("--bucket-bytes", "16384"))
"""Options that must not change the result. With small buckets there are several, which can overlap."""


class LayoutRun(NamedTuple):
    """Training run to compare: number of ranks, layout, and additional options of `chorus train`."""

    ranks: int
    layout: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.ranks:2} rank{'s' if self.ranks > 1 else ' '}"
        return f"{self.layout:14} {ranks}  {' '.join(self.options)}".rstrip()


def table(model: str, ranks: list[int], layouts: list[str]) -> list[LayoutRun]:
    """Runs to compare: every layout on every number of ranks, with recomputation and small buckets on the largest.

    Pipelines have as many stages as ranks, and half as many with two replicas. Accumulation needs no row of its own:
    with fewer ranks than micro-batches each rank has several.
    """
    rows = [LayoutRun(1, "dp")]
    for size in ranks:
        rows += [row for name in layouts for row in _rows(model, size, name) if row not in rows]
    for name in layouts:
        longest = _rows(model, max(ranks), name)[-1:]
        rows += [row._replace(options=row.options + more) for row in longest for more in VARIANTS]
    return rows


def _rows(model: str, size: int, name: str) -> list[LayoutRun]:
    if name not in PIPELINES:
        return [LayoutRun(size, name)]
    meshes = [(f"pp={size}", size)]
    if size > 2 and size % 2 == 0:
        meshes += [(f"{replicas}=2,pp={size // 2}", size // 2) for replicas in ("dp", "zero1")]
    schedule = name.removeprefix("pp:")
    fit = [mesh for mesh, stages in meshes if build(schedule, stages, 1).placement.parts <= UNITS[model]]
    return [LayoutRun(size, name, ("--mesh", mesh)) for mesh in fit]


def run(row: LayoutRun, model: str, steps: int, folder: Path, mpiexec: str) -> Path | str:
    """Train one row under mpiexec; returns the path of its last checkpoint, or a text that describes the failure."""
    words = f"-m parallel.cli.main train {MODELS[model]} --dropout 0.1 --clip 1 --reproducible --parallel {row.layout}"
    options = ["--steps", str(steps), "--checkpoint", str(folder), "--every", str(steps), *row.options]
    status, output = run_ranks(mpiexec, row.ranks, [*words.split(), *options], LIMIT)
    if status is None:
        return f"did not end within {LIMIT:g} s"
    if status:
        last = [text for text in output.splitlines() if text.strip()][-3:]
        return f"ended with status {status}: {' / '.join(last)}"
    found = all_in(folder)
    return found[-1] if found else "left no checkpoint"


def first_difference(one: Path, other: Path) -> str | None:
    """Compare two checkpoints bit by bit: text about the first tensor that differs, or None if all are equal."""
    mine, theirs = tensors_in(one), tensors_in(other)
    for (name, a), (other_name, b) in zip(mine, theirs, strict=True):
        if name != other_name or a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {other_name} there"
        bits = (a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)).reshape(a.size, -1).any(1)
        if bits.any():
            apart = np.abs(a.astype(np.float64) - b).max()
            return f"{name}: {bits.sum()} of {a.size} elements differ, by at most {apart:.1e}"
    return None


def verify(mpiexec: str, model: str, rows: list[LayoutRun], steps: int) -> Iterator[bool]:
    """Train all rows and print a table; yields per row: True if its checkpoint equals the first row's bit by bit."""
    reference: Path | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            began = time.perf_counter()
            found = run(row, model, steps, Path(folder, str(number)), mpiexec)
            if isinstance(found, str):
                verdict, good = found, False
            elif reference is None:
                reference, verdict, good = found, "the reference", number == 0
            else:
                difference = first_difference(reference, found)
                verdict, good = difference or "the same bits", difference is None
                shutil.rmtree(found)
            print(f"{model:5} {row!s:56} {time.perf_counter() - began:6.1f} s  {verdict}", flush=True)
            yield good


def main() -> int:
    """Verify the layouts of each model; exit status 1 if a run fails or its parameters differ."""
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--model", choices=[*MODELS, "all"], default="all", help="default all")
    add("--ranks", type=rank_counts, default=[1, 2, 4], metavar="LIST", help="numbers of ranks (default 1,2,4)")
    layouts = [*LAYOUTS, *PIPELINES]
    named = names_of("layout", layouts)
    add("--layouts", type=named, default=layouts, metavar="LIST", help=f"default all: {','.join(layouts)}")
    add("--steps", type=at_least(1, int), default=50, metavar="N", help="default 50")
    args, mpiexec = parser.parse_args(), find_mpiexec()
    if mpiexec is None:
        parser.error("there is no mpiexec: set MPIEXEC to one")
    verdicts: list[bool] = []
    for model in MODELS if args.model == "all" else [args.model]:
        verdicts += verify(mpiexec, model, table(model, args.ranks, args.layouts), args.steps)
    print(f"{sum(verdicts)} of {len(verdicts)} trainings of {args.steps} steps are as they should be")
    return 0 if all(verdicts) else 1

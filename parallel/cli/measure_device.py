"""Measure the device of this machine for `chorus plan --cluster`: products by size, and memory, as a presets file.

    chorus plan --measure-device here --output out/here.toml
    chorus plan --cluster here:1 --presets out/here.toml --precision fp32 --recipe fp32 --model gpt2 --batch 8

Takes some seconds on an idle machine. Links of the cluster in the file are assumptions: edit them.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives.cli.launcher import ProgramParser
from parallel.cli.plan_arguments import check_files
from parallel.planning.analytic.presets import parse
from parallel.runtime.resources import node_memory

PRECISIONS = {"fp32": np.float32, "fp64": np.float64}
"""NumPy's types of the measured precisions. Efficiency is measured in the first one."""

WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
COPIED = 1 << 28
"""Widths of square products, and bytes of a copy, beyond all caches."""

SECONDS = 0.2
"""Seconds of a measurement. Its fastest repetition counts."""


class MeasuredDevice(NamedTuple):
    """Dense peak in FLOP/s by precision, share of it by FLOPs of a product, bytes and bytes per second of memory."""

    peak: dict[str, float]
    efficiency: dict[int, float]
    memory: int
    bandwidth: float

    def as_toml(self, name: str) -> str:
        """Tables of the device, and of a cluster of one such device on a node, whose links are assumptions."""
        peak = ", ".join(f"{precision} = {flops:.4g}" for precision, flops in self.peak.items())
        shares = ", ".join(f"{flops} = {share:.4f}" for flops, share in self.efficiency.items())
        return (
            f"[devices.{name}]\npeak = {{ {peak} }}\nmemory = {self.memory}\nbandwidth = {self.bandwidth:.4g}\n"
            f'attainable = 1.0\nefficiency = {{ {shares} }}\nsource = "measured"\n\n'
            f'[clusters.{name}]\ndevice = "{name}"\nper_node = 1\n'
            f"inside = {{ alpha = 1e-6, rate = {self.bandwidth:.4g} }}\n"
            f'between = {{ alpha = 20e-6, rate = 1.25e9 }}\nsource = "measured device, assumed links"\n'
        )


def measure_device(memory: int, widths: tuple[int, ...] = WIDTHS, copied: int = COPIED) -> MeasuredDevice:
    """Measure square products of the widths, and copies, with the BLAS threads of this process."""
    speeds = {
        precision: {width: _product_speed(width, dtype) for width in widths} for precision, dtype in PRECISIONS.items()
    }
    peak = {precision: max(by_width.values()) for precision, by_width in speeds.items()}
    first = next(iter(PRECISIONS))
    efficiency = {2 * width**3: speed / peak[first] for width, speed in speeds[first].items()}
    source, target = np.ones(copied // 8), np.empty(copied // 8)
    return MeasuredDevice(peak, efficiency, memory, 2 * copied / _fastest(lambda: np.copyto(target, source)))


def _product_speed(width: int, dtype: type) -> float:
    """FLOP/s of a square product."""
    left: np.ndarray = np.ones((width, width), dtype)
    right, out = left.copy(), left.copy()
    return 2 * width**3 / _fastest(lambda: np.matmul(left, right, out=out))


def _fastest(run: Callable[[], object]) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < end or best == float("inf"):
        run()
        best = min(best, time.perf_counter() - began)
    return best


def main(argv: list[str] | None = None) -> int:
    """Print the tables, or write them to a file. Exit status 2 for wrong arguments."""
    command = ProgramParser(__doc__)
    add = command.add_argument
    add("--measure-device", required=True, metavar="NAME", help="name of the device and of its cluster")
    add("--output", type=Path, metavar="FILE", help="TOML for --presets (default: the standard output)")
    arguments = command.parse_args(argv)
    name = arguments.measure_device
    if not re.fullmatch(r"[\w-]+", name, re.ASCII):
        command.error(f"--measure-device: expected letters, digits, - and _; found {name!r}")
    try:
        check_files(arguments, "output")
    except ValueError as error:
        command.error(str(error))
    text = measure_device(node_memory()).as_toml(name)
    parse(text, name)
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text, end="")
    return 0

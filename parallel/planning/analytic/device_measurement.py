"""Measured device: speed of matrix products by their size, and of copies, as tables of a presets file."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

PRECISIONS = {"fp32": np.float32, "fp64": np.float64}
"""NumPy's types of the precisions that are measured; efficiency is that of the first one."""

WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
COPIED = 1 << 28
"""Widths of square products, and bytes of a copy, beyond all caches."""

SECONDS = 0.2
"""Seconds of a measurement; its fastest repetition counts."""


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

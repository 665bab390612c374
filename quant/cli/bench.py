"""Measure the speed of quantising and dequantising on one core, beside memcpy and gguf's quantiser in NumPy.

chorus bench quant --size 64M

All contestants take turns in random order, and every result is checked. Speeds are bytes of float32 per second in all
rows. The ratio to memcpy is the ratio of the medians.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy starts any threads

import platform
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from collectives.benchmark.size_arguments import parse_size
from collectives.cli.launcher import ProgramParser, at_least
from collectives.units import format_bytes
from quant import Q4_0, Q8_0, QuantizedArray, QuantSpec, grouped, kernels, quantize
from quant.io import ggml_blocks

SPECS = {
    "int8_g128": grouped(8, 128),
    "int8_g32": grouped(8, 32),
    "int8_g128_stochastic": grouped(8, 128, rounding="stochastic"),
    "int4_g128": grouped(4, 128),
    "int4_g32": grouped(4, 32),
    "Q8_0": Q8_0,
    "Q4_0": Q4_0,
}
FORMS = {"c": ("compiled",), "numpy": ()}


class QuantContestant(NamedTuple):
    """A function to time, and a check of its result."""

    name: str
    run: Callable[[], Any]
    right: Callable[[], bool]


def specs_of(text: str) -> dict[str, QuantSpec]:
    """Parse names of `SPECS` with commas in between: an argparse type."""
    names = text.split(",")
    unknown = [name for name in names if name not in SPECS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(SPECS)}, found {unknown[0]!r}")
    return {name: SPECS[name] for name in names}


def chorus_side(name: str, spec: QuantSpec, x: np.ndarray) -> Iterator[QuantContestant]:
    """Benchmark entries of a spec: quantise, dequantise, dequantise and add, each in C (if built) and with NumPy."""
    with kernels.forms():
        expected = quantize(x, spec, seed=1)
        numbers = expected.dequantize()
    q, back, total = QuantizedArray(spec, x.shape), np.empty_like(x), np.zeros_like(x)
    operations: dict[str, tuple[Callable[[], Any], Callable[[], bool]]] = {
        "quantize": (lambda: quantize(x, spec, seed=1, out=q), lambda: np.array_equal(q.buffer, expected.buffer)),
        "dequantize": (lambda: expected.dequantize(out=back), lambda: np.array_equal(back, numbers)),
        "add": (
            lambda: expected.add_to(total),
            lambda: np.array_equal(expected.add_to(np.ones_like(x)), numbers + np.float32(1)),
        ),
    }
    for form, names in FORMS.items():
        if not all(map(kernels.available, names)):
            continue
        for operation, functions in operations.items():
            yield QuantContestant(f"{name} {operation} {form}", *map(kernels.forms(*names), functions))


def peers(x: np.ndarray) -> list[QuantContestant]:
    """Benchmark entries of gguf's Q8_0 and Q4_0 quantisers. None if gguf is not installed."""
    try:
        import gguf
    except ImportError:
        return []
    rows = x.reshape(-1, 4096) if x.size % 4096 == 0 else x.reshape(-1, 32)
    results: dict[str, np.ndarray] = {}

    def peer(name: str, spec: QuantSpec) -> QuantContestant:
        kind = getattr(gguf.GGMLQuantizationType, name)
        return QuantContestant(
            f"{name} quantize gguf",
            lambda: results.update({name: gguf.quantize(rows, kind)}),
            lambda: np.array_equal(results[name], ggml_blocks.to_blocks(quantize(rows, spec))),
        )

    return [peer("Q8_0", Q8_0), peer("Q4_0", Q4_0)]


def race(contestants: list[QuantContestant], turns: int) -> dict[str, list[float]]:
    """Time all contestants in each turn. Return the seconds of each turn by name. SystemExit if a result is wrong."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(turns + 1):
        for number in rng.permutation(len(contestants)):
            one = contestants[number]
            start = time.perf_counter()
            one.run()
            taken = time.perf_counter() - start
            if turn:
                seconds[one.name].append(taken)
            if turn in (0, turns) and not one.right():
                raise SystemExit(f"{one.name}: wrong result")
    return seconds


def main() -> None:
    """Run the benchmark and print a line of speeds per contestant."""
    parser, specs = ProgramParser(__doc__), ",".join(SPECS)
    parser.add_argument("--size", type=parse_size, default="64M", help="bytes of the float32 array (default 64M)")
    parser.add_argument("--specs", type=specs_of, default=specs, help=f"with commas (default {specs})")
    turns = "of each, after one to warm up (default 9)"
    parser.add_argument("--turns", type=at_least(1, int), default=9, help=turns)
    options = parser.parse_args()
    x = np.random.default_rng(1).standard_normal(max(options.size // 128, 1) * 32).astype(np.float32)
    copy = np.empty_like(x)
    contestants = [QuantContestant("memcpy", lambda: np.copyto(copy, x), lambda: np.array_equal(copy, x)), *peers(x)]
    for name, spec in options.specs.items():
        contestants += chorus_side(name, spec, x)
    seconds = race(contestants, options.turns)
    where = f"one core of {platform.node()}, NumPy {np.__version__}"
    print(f"# {format_bytes(x.nbytes)} of float32, {where}, {options.turns} turns")
    print(f"# {'what':<34} {'GB/s':>7} {'least':>7} {'most':>7} {'of memcpy':>10}")
    memcpy = float(np.median(seconds["memcpy"]))
    for name, taken in seconds.items():
        median, least, most = (x.nbytes / s / 1e9 for s in (float(np.median(taken)), max(taken), min(taken)))
        print(f"{name:<36} {median:7.2f} {least:7.2f} {most:7.2f} {memcpy / float(np.median(taken)):10.2f}")


if __name__ == "__main__":
    main()

"""Measure the errors of allreduces of quantised vectors on simulated ranks, and compare them with theory.

python tests/studies/verify_errors.py
python tests/studies/verify_errors.py --ranks 2,4,8,16,32,64 --specs int8_g128,int4_g128 --elements 1M

eps is the relative error of encoding a vector of normal noise once. The error of a sum of p of them is given in eps;
theory predicts sqrt(2) in two shots and, while p eps^2 is small, sqrt((p+1)/2) around a ring. The error of integers of
one scale is given in steps of the shared scale: each of p terms is wrong by step/sqrt(12). Every rank runs the code of
a real run; only messages are copies. The exit code is 1 if a sum is more than a tenth off its law.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from in_process import run_in_lockstep, simulated_comms

from collectives.benchmark.size_arguments import parse_size
from collectives.cli.arguments import rank_counts, shareable, specs
from collectives.cli.launcher import ProgramParser
from collectives.compressed import Codec, FlatAllreduce, QuantCodec, RingAllreduce, SharedScale, TwoShotAllreduce


def in_two_shots(ranks: int, eps: float) -> float:
    """Theoretical error, in units of `eps`, of a two-shot allreduce, which quantises every input and the sum."""
    return math.sqrt(2) if ranks > 1 else 1.0


def around_a_ring(ranks: int, eps: float) -> float:
    """Theoretical error, in units of `eps`, of a ring allreduce, which quantises the sums of 1, 2 ... p inputs."""
    wrong = 0.0
    for terms in range(1, ranks + 1):
        wrong += eps**2 * (terms + wrong)
    return math.sqrt(wrong / ranks) / eps


LAWS: dict[str, tuple[type[FlatAllreduce], Callable[[int, float], float]]] = {
    "two_shot": (TwoShotAllreduce, in_two_shots),
    "ring": (RingAllreduce, around_a_ring),
}
"""Algorithm, and its law: the error of a sum of so many terms, in eps."""

TOLERANCE = 0.1


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def noise(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def once(codec: Codec, x: np.ndarray) -> float:
    """Relative error (eps) of encoding and decoding `x` once."""
    wire, out = np.empty(codec.nbytes(len(x)), np.uint8), np.empty_like(x)
    codec.encode(x, wire)
    codec.decode(wire, out)
    return relative(out, x)


def simulated_sum(allreduces: Sequence[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum noise by `allreduces`, one allreduce object per rank; return the results of all ranks, and the exact sum."""
    terms = np.array([noise(rank, count) for rank in range(len(allreduces))])
    total = np.asarray(np.sum(terms, axis=0, dtype=np.float64))
    run_in_lockstep([each.allreduce(x, x) for each, x in zip(allreduces, terms)])
    return terms, total


def error(way: type[FlatAllreduce], ranks: int, codec: Callable[[int], Codec], count: int) -> float:
    """Relative error of a simulated allreduce by class `way`, on the worst rank; `codec(rank)` makes a codec."""
    made = [way(comm, count, codec(comm.Get_rank())) for comm in simulated_comms(ranks)]
    found, total = simulated_sum(made, count)
    return float(np.max([relative(one, total) for one in found]))


def in_steps(ranks: int, bits: int, group: int, count: int) -> float:
    """Root-mean-square error of a simulated shared-scale integer allreduce, in quantisation steps."""
    made = [SharedScale(comm, count, bits, group) for comm in simulated_comms(ranks)]
    found, total = simulated_sum(made, count)
    peaks = np.max([np.abs(noise(rank, count)) for rank in range(ranks)], axis=0)
    steps = np.maximum.reduceat(peaks, np.arange(0, count, group)) / made[0].largest
    return float(np.sqrt(np.mean(np.square((found[0] - total) / np.repeat(steps, group)[:count]))))


def of_integers(ranks: int) -> float:
    """Theoretical value of `in_steps`: p errors uniform in -1/2 .. 1/2 steps, which holds from 3 bits on."""
    return math.sqrt(ranks / 12)


def main(argv: list[str] | None = None) -> int:
    """Print the tables and return the exit code."""
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--ranks", type=rank_counts, default="2,3,4,8,16,32,64", metavar="NUMBERS", help="default 2,3,4,8,16,32,64")
    add("--specs", type=specs, default="int8_g128,int4_g128", metavar="NAMES", help="default int8_g128,int4_g128")
    add("--elements", type=parse_size, default="64K", metavar="N", help="of a vector (default 64K)")
    args = parser.parse_args(argv)
    if not args.elements:
        parser.error("argument --elements: expected an element or more, found 0")
    off = []
    for name, spec in args.specs.items():
        codec = partial(QuantCodec, spec, None)
        eps = once(codec(0), noise(0, args.elements))
        shared = shareable(spec) and spec.bits > 2
        titles = [*(f"{way}, eps | law" for way in LAWS), *["shared_scale, steps | law"] * shared]
        print(f"{name}: eps = {eps:.4f}\n\n| ranks | {' | '.join(titles)} |")
        print(f"| --- |{' --- | --- |' * len(titles)}")
        for ranks in args.ranks:
            pairs = [(error(way, ranks, codec, args.elements) / eps, law(ranks, eps)) for way, law in LAWS.values()]
            if shared:
                group = getattr(spec.granularity, "size", args.elements)
                pairs.append((in_steps(ranks, spec.bits, group, args.elements), of_integers(ranks)))
            off += [abs(found / wanted - 1) for found, wanted in pairs]
            print(f"| {ranks} | {' | '.join(f'{number:.3f}' for pair in pairs for number in pair)} |", flush=True)
        print()
    worst = np.max(off)  # NaN if one is
    print(f"at most {worst:.1%} off")
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

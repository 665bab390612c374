"""The model's costs on a command line: times, rates, ranks on a node."""

from __future__ import annotations

import argparse
import re

from collectives.analysis.cost_functions import LinearCost
from collectives.benchmark.predictions import CostPrediction
from collectives.cli.launcher import at_least
from collectives.selection.timing_file import TableError, default_path, read
from collectives.selection.timing_table import TimingTable

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
RATES = {"GB/s": 1e9, "MB/s": 1e6, "Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8}


def _quantity(text: str, units: dict[str, float], expected: str) -> tuple[float, float | None]:
    match = re.fullmatch(rf"([\d.]+(?:e[+-]?\d+)?)\s*({'|'.join(units)}|)", text.strip())
    if not match or not (float(match[1]) or units is TIMES):
        raise argparse.ArgumentTypeError(f"{text!r} is no {expected}")
    return float(match[1]), units.get(match[2])


def seconds(text: str) -> float:
    """A time such as 5us, 0.2ms or 2e-6 (seconds)."""
    number, unit = _quantity(text, TIMES, "time; write it as 5us, 0.2ms or 2e-6 (seconds)")
    return number * (unit or 1.0)


def per_byte(text: str) -> float:
    """Seconds a byte, from a rate such as 12.5GB/s or 10Gbit/s, or as a number of seconds."""
    number, unit = _quantity(text, RATES, "rate; write it as 12.5GB/s, 10Gbit/s or 8e-11 (seconds a byte)")
    return 1 / (number * unit) if unit else number


def table(path: str) -> TimingTable:
    try:
        return read(path)
    except (OSError, TableError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--per-node", type=at_least(1, int), default=1, metavar="K", help="ranks on each node (default 1)")
    add("--table", type=table, metavar="FILE", help="costs from chorus tune (default: your own, if there is one)")
    add("--alpha", type=seconds, metavar="TIME", help="a message between nodes")
    add("--beta", type=per_byte, metavar="RATE", help="of a node's card")
    add("--node-alpha", type=seconds, metavar="TIME", help="a message within a node")
    add("--node-beta", type=per_byte, metavar="RATE", help="of messages within a node")
    add("--gamma", type=per_byte, metavar="RATE", help="of combining two vectors")


def model(arguments: argparse.Namespace) -> CostPrediction:
    """Cost model from the options; missing values come from the tuned table, else from the defaults."""
    path = default_path()
    known = (arguments.table or (read(path) if path.exists() else TimingTable())).costs
    given = arguments.node_alpha, arguments.node_beta, arguments.alpha, arguments.beta, arguments.gamma
    default = *known.shared[:2], *known.network[:2], known.shared.gamma
    node_alpha, node_beta, alpha, beta, gamma = (d if g is None else g for g, d in zip(given, default, strict=True))
    return CostPrediction(arguments.per_node, LinearCost(node_alpha, node_beta), LinearCost(alpha, beta), gamma)


def describe(model: CostPrediction) -> str:
    """The costs as text."""

    def rate(per_byte: float) -> str:
        return f"{1e-9 / per_byte:.3g} GB/s" if per_byte else "any rate"

    wires = (("within nodes", model.node), ("a node's card", model.network))
    parts = [f"{where}: {time(wire.alpha)} a message, {rate(wire.beta)}" for where, wire in wires]
    return "; ".join([*parts, f"combining: {rate(model.gamma)}"])


def time(value: float) -> str:
    unit = next((unit for unit in ("s", "ms") if value >= TIMES[unit]), "us")
    return f"{value / TIMES[unit]:.4g} {unit}"

"""The model's costs on a command line: times, rates, ranks on a node."""

from __future__ import annotations

import argparse
import re

from collectives.analysis.cost_functions import LinearCost
from collectives.benchmark.predictions import CostPrediction
from collectives.selection.cost_model import BUILT_IN
from collectives.selection.timing_file import TableError, default_path, read
from collectives.selection.timing_table import TimingTable

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
RATES = {"GB/s": 1e9, "MB/s": 1e6, "Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8}


def seconds(text: str) -> float:
    """A time such as 5us, 0.2ms or 2e-6 (seconds)."""
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*(s|ms|us|ns|)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 5us, 0.2ms or 2e-6 (seconds)")
    return float(match[1]) * TIMES[match[2] or "s"]


def per_byte(text: str) -> float:
    """Seconds a byte, from a rate such as 12.5GB/s or 10Gbit/s, or as a number of seconds."""
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*(GB/s|MB/s|Gbit/s|Mbit/s|)", text.strip())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no rate; write it as 12.5GB/s, 10Gbit/s or 8e-11 (seconds a byte)"
        )
    return float(match[1]) if not match[2] else 1 / (float(match[1]) * RATES[match[2]])


def ranks(text: str) -> int:
    """A number of ranks."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of ranks, at least 1")
    return int(text)


def table(path: str) -> TimingTable:
    """A table of `chorus tune`, from its file."""
    try:
        return read(path)
    except (OSError, TableError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for message costs and placement."""
    add = parser.add_argument
    add("--per-node", type=ranks, default=1, metavar="K", help="ranks on each node (default 1)")
    add("--table", type=table, metavar="FILE", help="costs from chorus tune (default: your own, if there is one)")
    add("--alpha", type=seconds, metavar="TIME", help="a message between nodes")
    add("--beta", type=per_byte, metavar="RATE", help="of a node's card")
    add("--node-alpha", type=seconds, metavar="TIME", help="a message within a node")
    add("--node-beta", type=per_byte, metavar="RATE", help="of messages within a node")
    add("--gamma", type=per_byte, metavar="RATE", help="of combining two vectors")


def model(arguments: argparse.Namespace) -> CostPrediction:
    """Cost model from the options; missing values come from the tuned table, else from the defaults."""
    tuned = arguments.table
    if tuned is None and default_path().exists():
        tuned = read(default_path())
    known = BUILT_IN if tuned is None else tuned.costs
    said = arguments.node_alpha, arguments.node_beta, arguments.alpha, arguments.beta, arguments.gamma
    default = *known.shared[:2], *known.network[:2], known.shared.gamma
    node_alpha, node_beta, alpha, beta, gamma = (d if s is None else s for s, d in zip(said, default, strict=True))
    return CostPrediction(arguments.per_node, LinearCost(node_alpha, node_beta), LinearCost(alpha, beta), gamma)


def tell(model: CostPrediction) -> str:
    """The costs for people."""

    def rate(per_byte: float) -> str:
        return f"{1e-9 / per_byte:.3g} GB/s" if per_byte else "any rate"

    wires = (("within nodes", model.node), ("a node's card", model.network))
    told = [f"{where}: {time(wire.alpha)} a message, {rate(wire.beta)}" for where, wire in wires]
    return "; ".join([*told, f"combining: {rate(model.gamma)}"])


def time(value: float) -> str:
    """Seconds for people."""
    unit = next((unit for unit in ("s", "ms") if value >= TIMES[unit]), "us")
    return f"{value / TIMES[unit]:.4g} {unit}"

"""Time the exchange of tokens between experts on different ranks, by each route and format, in turns.

chorus bench dispatch -n 4 --dispatch direct,direct:int8
scripts/cluster --hosts 4 --per-host 2 -- chorus bench dispatch

A turn sends every token to its experts and back, then a gradient the same way. Tokens have experts on
--token-nodes nodes. Printed: milliseconds of a turn relative to the first dispatch; copies of a token that cross
between nodes in one direction; megabytes that all hosts sent, counted by their network cards (Linux); and the error of
encoded rows, as predicted for normal numbers and as found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import quartiles
from collectives.cli import launcher
from collectives.cli.arguments import words
from collectives.cli.launcher import at_least, say
from parallel.cli.reports.token_choices import token_choices
from parallel.nn.expert_group import Assignments
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.sharding.device_mesh import MeshAxis
from parallel.sharding.expert.dispatch import Dispatch, TokenRoute
from parallel.sharding.expert.row_codec import RowCodec, predicted_error

EVERY = "direct,hierarchical,direct:int8,hierarchical:int8,direct:fp8"


def dispatches(text: str) -> dict[str, Dispatch]:
    """Dispatch of each name."""
    try:
        return {name: Dispatch.parse(name) for name in words(text)}
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add, count = parser.add_argument, at_least(1, int)
    add("--tokens", type=count, default=1024, metavar="N", help="tokens of each rank (default 1024)")
    add("--width", type=count, default=1024, metavar="H", help="float32 numbers of a token (default 1024)")
    add("--experts", type=count, default=2, metavar="E", help="experts of each rank (default 2)")
    add("--choices", type=count, default=4, metavar="K", help="experts of a token (default 4)")
    add("--token-nodes", type=count, metavar="M", help="nodes of a token's experts (default 2, if there are)")
    add("--dispatch", type=dispatches, default=EVERY, metavar="NAMES", help=f"with commas (default {EVERY})")
    add("--turns", type=count, default=10, metavar="N", help="turns after one to warm up (default 10)")
    return parser.parse_args(argv)


def exchange(route: TokenRoute, x: np.ndarray) -> None:
    """Exchange tokens whose experts return them, and gradients that go the same way. Collective."""
    route.send(x)
    y, dx = np.zeros_like(x), np.zeros_like(x)
    results = route.combine(route.receive(), y)
    route.send_gradients(x, results, x.dtype)
    route.combine_gradients(route.receive(), dx)


def bytes_on_wire() -> int:
    """Bytes that this host's network cards have sent. 0 where they are not counted (one process's loopback)."""
    cards = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(card.read_text()) for card in cards if card.parts[-3] != "lo")


def copies_between(
    comm: Communicator, dispatch: Dispatch, axis: MeshAxis, owners: list[int], chosen: Assignments
) -> int:
    """Copies of tokens that leave a node on their way to experts, over all ranks. Collective."""
    nodes = comm.nodes or (0,) * axis.size
    sends = dispatch.plan(axis, owners, chosen).sends
    mine = sum(count for count, node in zip(sends, nodes) if node != nodes[axis.rank])
    return int(comm.allreduce(mine))


def main(argv: list[str] | None = None) -> int:
    """Time every dispatch and print a row for each."""
    options = parse(argv)
    keep_freed_memory()  # as engines do: otherwise new pages take longer than the exchange
    comm = Communicator(MPI.COMM_WORLD)
    rank, size = comm.Get_rank(), comm.Get_size()
    axis, owners = MeshAxis("ep", rank, size, comm), [options.experts] * size
    nodes = comm.nodes or (0,) * size
    limit = options.token_nodes or min(2, max(nodes) + 1)
    choices = token_choices(options.tokens, options.choices, np.repeat(nodes, owners).tolist(), limit, seed=rank)
    weights = np.zeros((options.tokens, sum(owners)), np.float32)
    np.put_along_axis(weights, choices, np.float32(1 / options.choices), axis=1)
    chosen = Assignments.from_weights(weights)
    x = np.random.default_rng(rank).standard_normal((options.tokens, options.width), dtype=np.float32)
    on_node = comm.Split(nodes[rank], rank)
    local = MeshAxis("ep", on_node.Get_rank(), on_node.Get_size(), on_node)
    leads = rank == nodes.index(nodes[rank])  # one rank of each node counts its network cards
    seconds: dict[str, list[float]] = {name: [] for name in options.dispatch}
    sent = dict.fromkeys(options.dispatch, 0)
    for _ in range(options.turns + 1):
        for name, dispatch in options.dispatch.items():
            before = bytes_on_wire()
            comm.Barrier()
            began = MPI.Wtime()
            exchange(dispatch.plan(axis, owners, chosen, local), x)
            comm.Barrier()
            seconds[name].append(MPI.Wtime() - began)
            sent[name] = comm.allreduce(leads * (bytes_on_wire() - before))
    say(f"{size} ranks on {max(nodes) + 1} nodes, {options.tokens} tokens of {4 * options.width} bytes on each,")
    say(f"{options.choices} experts for each token, on {limit} nodes; medians of {options.turns} turns")
    say(
        f"{'':20}{'ms':>9}  {'quartiles':>17}{'ratio':>8}{'copies':>8}{'MB sent':>9}{'error predicted':>17}{'found':>8}"
    )
    first = np.median(next(iter(seconds.values()))[1:])
    for name, dispatch in options.dispatch.items():
        ms = quartiles(1e3 * np.array(seconds[name][1:]))
        copies = copies_between(comm, dispatch, axis, owners, chosen) / (options.tokens * size)
        text = f"{name:20}{ms['median']:9.2f}  {ms['q1']:7.2f} - {ms['q3']:7.2f}{ms['median'] / first / 1e3:8.2f}"
        text += f"{copies:8.2f}{1e-6 * sent[name]:9.1f}"
        if dispatch.code:
            codec = RowCodec(dispatch.code, options.width, x.dtype)
            lost = codec.decode(codec.encode(x)) - x
            text += f"{predicted_error(dispatch.code):17.4f}{np.sqrt((lost**2).mean() / (x**2).mean()):8.4f}"
        say(text)
    return 0

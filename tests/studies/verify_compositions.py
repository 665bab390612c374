"""Check that training on random meshes equals training on one rank: a fuzzer of compositions.

    python tests/studies/verify_compositions.py --compositions 100 --seed 0
    mpiexec -n 4 python tests/studies/verify_compositions.py --compositions 100 --seed 0

A seed draws a model, a mesh (pp, dp, cp, tp, ep), a layout and settings. Losses, all gradients, norms, weights and
optimizer state of some steps are compared with those of one rank: bit for bit if the composition is reproducible, to
1e-6 otherwise. Half of them continue from a checkpoint on another mesh. A composition that fails is made as simple as
possible. On one rank, --ranks threads take the place of the ranks. First come compositions in which other systems had
published bugs. Exit status 1 if one fails.
"""

import faulthandler
import time
from collections.abc import Callable, Iterator
from typing import Any

from conformance.composition import Composition
from conformance.composition_run import Launch, difference, on_threads, shrink
from conformance.random_composition import draw
from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import LauncherParser, at_least, say

FOUR, CP, TP, BOTH, EP = "dp=2,tp=2", "cp=2", "tp=2", "cp=2,tp=2", "dp=2,ep=2"

CASES: dict[str, Composition] = {
    "losses divided by the tokens of one rank": Composition(
        mesh="dp=2,cp=2", length=8, ignored=True, microbatches=3, samples=2
    ),
    "token counts multiplied by the ranks that share sequences": Composition(mesh=CP, length=6, microbatches=2),
    "unequal numbers of targets on the ranks": Composition(mesh="cp=4", length=9, ignored=True, samples=2),
    "a vocabulary that the ranks do not divide": Composition(mesh="tp=3", heads=3, vocabulary=7),
    "labels smoothed over the classes of one rank": Composition(mesh="tp=3", heads=3, vocabulary=7, smoothing=True),
    "heads that the ranks do not divide": Composition(mesh=TP, heads=3),
    "queries, keys and values cut as one block": Composition(mesh=TP, heads=4, layers=2),
    "sharded parameters left out of the norm": Composition(mesh=TP, heads=2, clip=True, layout="zero1"),
    "copies counted by every rank in the norm": Composition(mesh=FOUR, heads=2, clip=True),
    "copies left out of the norm or counted twice over stages": Composition(
        mesh="pp=2,dp=2,tp=2", layout="pp:1f1b", heads=2, layers=2, microbatches=4, clip=True
    ),
    "gradients of a final norm that differ along tp": Composition(mesh="tp=4", heads=4, layers=2, steps=2),
    "gradients of norms that see a part of the sequence": Composition(
        mesh="tp=4", heads=4, layers=2, length=8, sequence=True, steps=2, clip=True, optimizer="adamw"
    ),
    "parts of the sequence scattered over the ranks of another axis": Composition(
        mesh="tp=2,cp=2,dp=2", heads=2, length=8, sequence=True, dropout=True, microbatches=3, samples=2
    ),
    "dropout masks that depend on the part of the sequence along tp": Composition(
        mesh=TP, heads=2, length=6, sequence=True, dropout=True, recompute="selective", samples=2
    ),
    "masks of one sample applied to the others": Composition(
        family="gated", mesh=BOTH, heads=4, kv_heads=2, length=6, samples=3, ignored=True
    ),
    "dropout masks that depend on the shard": Composition(
        family="mlp", mesh=TP, layers=2, heads=2, head_width=3, dropout=True, microbatches=2
    ),
    "dropout masks that depend on the part of the sequence": Composition(
        mesh="cp=3", length=7, dropout=True, context="ring", samples=2
    ),
    "ring attention that uses the first keys again": Composition(mesh="cp=3", length=8, context="ring"),
    "an all-to-all of heads for batches of more than one": Composition(
        mesh=CP, heads=4, length=5, samples=3, context="ulysses"
    ),
    "a norm divided by the ranks that share sequences": Composition(
        mesh="dp=2,cp=2", heads=2, length=6, context="ulysses", clip=True, microbatches=2
    ),
    "a sequence divided along its heads": Composition(mesh="cp=4", heads=4, length=4, samples=2, context="allgather"),
    "recomputed blocks with exchanges": Composition(mesh=BOTH, heads=2, layers=2, recompute="full", length=5),
    "fewer micro-batches than replicas": Composition(mesh="dp=3", microbatches=1, layout="zero2"),
    "a scale of one bucket applied to the others": Composition(
        mesh="dp=3", layers=2, layout="zero2", bucket_bytes=100, microbatches=4, ignored=True, clip=True
    ),
    "sums of stages started in an order that depends on the rank": Composition(
        mesh="pp=2,zero2=2,tp=2", layout="pp:zb-h1", heads=2, layers=2, bucket_bytes=1, microbatches=4
    ),
    "gradients divided by the micro-batches at every stage": Composition(
        mesh="pp=3", layout="pp:interleaved", layers=4, microbatches=6, ignored=True, clip=True
    ),
    "sums in an order that depends on the rank": Composition(
        mesh=BOTH, heads=4, shards=4, parts=4, length=8, reproducible=True, precision="fp32", microbatches=3
    ),
    "loss scales that the ranks do not agree on": Composition(
        mesh=FOUR, heads=2, shards=2, reproducible=True, precision="fp16", steps=2
    ),
    "checkpoints with the layout of the shards": Composition(
        mesh="tp=4", heads=4, shards=4, next_mesh="cp=2,dp=2", parts=2, next_layout="zero3", reproducible=True, length=5
    ),
    "layers numbered from the first of a stage in checkpoints": Composition(
        mesh="pp=3",
        layout="pp:1f1b",
        layers=4,
        microbatches=3,
        optimizer="adamw",
        next_mesh="dp=3",
        next_layout="zero1",
    ),
    "gates and values side by side in checkpoints": Composition(
        family="gated", mesh="tp=3", heads=3, head_width=4, optimizer="adamw", next_mesh="dp=3", next_layout="zero3"
    ),
    "a tied table of two stages whose sequences are divided": Composition(
        mesh="pp=2,cp=2",
        layout="pp:zb-h1",
        parts=4,
        length=8,
        heads=2,
        reproducible=True,
        precision="fp32",
        microbatches=2,
    ),
    "more ranks than key/value heads": Composition(family="gated", mesh="tp=4", heads=4, kv_heads=2, layers=2, steps=2),
    "key/value heads whose copies differ": Composition(
        family="gated",
        mesh="cp=2,tp=4",
        heads=4,
        kv_heads=2,
        shards=4,
        parts=2,
        length=6,
        reproducible=True,
        precision="bf16",
        optimizer="adamw",
        clip=True,
        next_mesh="dp=4,tp=2",
        next_layout="zero3",
    ),
    "key/value heads with unequal numbers of copies": Composition(
        family="gated", mesh="tp=3", heads=4, kv_heads=2, layout="zero1", clip=True, steps=2
    ),
    "a tied table cut along tp and summed over cp": Composition(
        mesh=BOTH, heads=2, shards=2, parts=2, reproducible=True, precision="bf16", optimizer="adamw", length=6
    ),
    "gradients of experts divided by the ranks that share them": Composition(
        mesh=EP, experts=4, choices=2, head_width=4, microbatches=2
    ),
    "gradients of routers summed over some of their copies": Composition(
        mesh="dp=4,ep=2", experts=3, choices=2, router="losses", head_width=4, microbatches=4
    ),
    "experts left out of the norm": Composition(
        mesh="dp=4,ep=2", layout="zero1", experts=4, choices=2, head_width=4, microbatches=4, clip=True
    ),
    "tokens returned in the order of another micro-batch": Composition(
        mesh=EP, experts=4, choices=2, head_width=4, length=8, microbatches=4
    ),
    "experts' gradients in the order of turns where micro-batches enter at both ends": Composition(
        mesh="pp=1,dp=2,ep=2", layout="pp:dualpipe", experts=2, microbatches=6, reproducible=True
    ),
    "capacity for the tokens of a rank": Composition(
        mesh="dp=3,ep=3", experts=2, choices=1, router="capacity", length=5, microbatches=4, samples=2, layout="zero3"
    ),
    "biases of experts from the tokens of a rank": Composition(
        mesh="dp=2,tp=2,ep=2",
        heads=2,
        shards=2,
        experts=5,
        choices=2,
        router="biases",
        length=8,
        microbatches=3,
        reproducible=True,
        precision="bf16",
        steps=2,
        next_mesh="dp=4,ep=4",
        next_layout="zero1",
    ),
    "gradients of experts on the ranks of an axis that shares tokens": Composition(
        mesh="dp=2,tp=2,ep=4", heads=2, experts=5, choices=2, router="losses", head_width=4, microbatches=2, clip=True
    ),
    "expert groups that are not those of other operators": Composition(
        mesh="tp=2,etp=2", heads=2, experts=3, choices=2, head_width=4, microbatches=2, clip=True, layout="zero1"
    ),
    "combine indices with sequence parallelism": Composition(
        mesh="tp=2,ep=2", heads=2, sequence=True, experts=4, choices=2, head_width=4, length=6, samples=3
    ),
    "experts and their parts in checkpoints": Composition(
        mesh="dp=2,tp=2,ep=2,etp=2",
        heads=2,
        shards=2,
        slices=2,
        experts=4,
        choices=2,
        head_width=4,
        length=6,
        microbatches=2,
        reproducible=True,
        next_mesh="dp=4,ep=4",
        next_layout="zero3",
    ),
    "a stage without experts": Composition(
        mesh="pp=2,dp=2,ep=2",
        layout="pp:1f1b",
        layers=2,
        every=2,
        experts=4,
        choices=2,
        microbatches=4,
        length=5,
        clip=True,
    ),
    "gradients of balance losses that depend on the stages": Composition(
        mesh="pp=2,tp=2", layout="pp:zb-h1", layers=2, heads=2, experts=4, choices=2, router="losses", microbatches=3
    ),
    "gradients of balance losses divided by the ranks that share sequences": Composition(
        mesh=BOTH, heads=2, experts=4, choices=2, router="losses", head_width=4, length=8, microbatches=2, samples=2
    ),
    "gradients of routers of experts that are cut": Composition(
        mesh="tp=4", heads=4, experts=4, choices=2, head_width=4, length=5, microbatches=2, clip=True
    ),
    "biases of experts that count ignored targets on some ranks": Composition(
        mesh="dp=2,cp=2", experts=4, choices=2, router="biases", length=8, microbatches=3, ignored=True, steps=2
    ),
    "all tokens for one expert": Composition(
        mesh="dp=2,ep=2", experts=4, router="one expert", length=8, microbatches=1, steps=2, reproducible=True
    ),
}
"""By the mistake that each would show (issues of Megatron-LM, torchtitan, DeepSpeed, diffusers, fairseq2)."""


MOST_FAILURES = 5
SECONDS = 600.0  # for one composition; then all stacks are shown and the program ends
STDERR = 2  # the file descriptor


def under_mpi(world: Communicator) -> Launch:
    """`Launch` on the first ranks of `world`; other ranks than 0 get None."""

    def launch(ranks: int, main: Callable[[Any], Any]) -> Any:
        here = world.Get_rank() < ranks
        part: Any = MPI.Intracomm(world).Split(int(here), world.Get_rank())
        with Communicator(part) as comm:
            found = main(comm) if here else None
        return found if world.Get_rank() == 0 else None

    return launch


def cases(args: Any, ranks: int) -> Iterator[tuple[str, Composition]]:
    """Names and compositions to check."""
    if args.seed == 0:
        yield from ((name, one) for name, one in CASES.items() if one.ranks <= ranks)
    for seed in range(args.seed, args.seed + args.compositions):
        yield f"seed {seed}", draw(seed, ranks)


def kind(text: str) -> str:
    """Kind of a failure: an error by the beginning of its text, or a difference; empty if there is none."""
    return text[:40] if text.partition(":")[0].endswith(("Error", "Failed", "Mismatch")) else "difference" * bool(text)


def main() -> int:
    """Verify compositions; exit status 1 if any fails."""
    parser = LauncherParser(__doc__, usage="%(prog)s [options]")
    add = parser.add_argument
    add("--compositions", type=at_least(1, int), default=100, metavar="N", help="default 100")
    add("--seed", type=at_least(0, int), default=0, metavar="S", help="the first one (default 0)")
    add("--ranks", type=at_least(1, int), default=4, metavar="P", help="most threads, on one rank (default 4)")
    args = parser.parse_args()
    world = Communicator(MPI.COMM_WORLD)
    mpi = world.Get_size() > 1
    launch, ranks = (under_mpi(world), world.Get_size()) if mpi else (on_threads, args.ranks)

    def check(composition: Composition) -> str:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=STDERR)
        found: str = world.bcast(difference(composition, launch))
        faulthandler.cancel_dump_traceback_later()
        return found

    def simplest(composition: Composition, wanted: str) -> Composition:
        return shrink(composition, lambda one: one.ranks <= ranks and kind(check(one)) == wanted)

    began, count, failures = time.perf_counter(), 0, 0
    for name, composition in cases(args, ranks):
        count += 1
        if text := check(composition):
            failures += 1
            say(f"{name} fails: {composition}\n  {text}")
            least = simplest(composition, kind(text))
            say(f"  as simple as possible: {least}\n  {check(least)}")
        if failures == MOST_FAILURES:
            break
    say(f"{count - failures} of {count} compositions equal one rank ({time.perf_counter() - began:.0f} s)")
    return int(failures > 0)


if __name__ == "__main__":
    launcher.run(main)

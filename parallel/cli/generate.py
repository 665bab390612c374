"""Write text with a trained model: it continues a prompt, and the text is printed as it is made.

chorus generate --checkpoint out/gpt --prompt "The function returns" --length 300
chorus generate -n 2 --checkpoint out/gpt --temperature 0.7 --top-k 40 --seed 1

Any checkpoint of `chorus train` with a gpt or gpt-moe model will do, whatever layout wrote it. Several ranks cut the
model's operators among them (as --mesh tp=N), so that each has a part of the weights in use.
"""

import argparse
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.cli import launcher
from collectives.cli.launcher import at_least
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.data.text import text_form
from parallel.nn.generation import generate
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import MODELS
from parallel.nn.operator import Operator
from parallel.nn.parameter import ParameterShard
from parallel.ptq.load_model import model_alone
from parallel.runtime.collective_errors import collective_call
from parallel.sharding.device_mesh import MeshAxis
from parallel.sharding.tensor.cut_model import cut
from parallel.sharding.tensor.mixture_shards import ExpertCut
from parallel.sharding.tensor.tensor_axis import TENSOR


def parser() -> launcher.LauncherParser:
    result = launcher.LauncherParser(__doc__, usage="%(prog)s --checkpoint DIR [options]")
    add = result.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint of chorus train, or a folder: newest")
    add("--prompt", default="\n", metavar="TEXT", help="text to continue (default: a new line)")
    add("--length", type=at_least(0, int), default=400, metavar="N", help="bytes or tokens to write (default 400)")
    add("--temperature", type=at_least(0, float), default=0.8, metavar="T", help="0: the most probable (default 0.8)")
    add("--top-k", type=at_least(1, int), metavar="K", help="draw from the K most probable (default: from all)")
    add("--seed", type=at_least(0, int), default=0, metavar="S", help="of the drawing (default 0)")
    return result


def cut_over(comm: Communicator, model: Operator) -> tuple[Operator, Callable[[Any], Any]]:
    """Model with its operators cut over the ranks, and a function that gathers its scores. Collective."""
    if comm.Get_size() == 1:
        return model, lambda scores: scores
    axis = MeshAxis(TENSOR.name, comm.Get_rank(), comm.Get_size(), comm)
    experts = ExpertCut(axis.size, spread=True)
    made, loss = collective_call(
        comm, lambda: cut(model, SoftmaxCrossEntropy(), axis, experts=experts), "-n: the model cannot be cut"
    )
    for shard in made.parameters():
        if isinstance(shard, ParameterShard):
            shard.data = shard.cut.take(shard.logical.data)
    for whole in {shard.logical for shard in made.parameters() if isinstance(shard, ParameterShard)}:
        whole.data = None
    return made, getattr(loss, "whole", lambda scores: scores)


def write(comm: Communicator, args: argparse.Namespace) -> None:
    """Load the model, and print the prompt and its continuation on rank 0. Collective."""
    settings, model = model_alone(comm, args.checkpoint)
    family = settings.model.partition(":")[0]
    if not MODELS[family].is_text:
        fits = " or ".join(name for name, one in MODELS.items() if one.is_text)
        raise ValueError(f"{args.checkpoint}: expected a model {fits}, found {settings.model}")
    form = collective_call(comm, lambda: text_form(settings.tokenizer), "--checkpoint")
    prompt = collective_call(comm, lambda: form.encode(args.prompt.encode()).tolist(), "--prompt")
    model, whole = cut_over(comm, model)
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    made = generate(model, prompt, args.length, whole=whole, **options)
    for text in chain([args.prompt], form.stream(made), ["\n"]):
        if comm.Get_rank() == 0:
            print(text, end="", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Write text; exit status 2 if the model cannot be used."""
    made = parser()
    args = made.parse_args(argv)
    try:
        write(Communicator(MPI.COMM_WORLD), args)
    except (CheckpointError, ValueError) as error:
        made.error(str(error))
    return 0

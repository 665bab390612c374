"""Options, settings and first weights that studies of training share."""

import argparse
from functools import partial

import numpy as np

from collectives import Communicator
from parallel.cli.bench_layouts import COUNT
from parallel.engine.settings import DEFAULTS, Settings
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams
from parallel.nn.models import build
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.resources import cores_per_rank, limit_threads
from parallel.trainer.recipes import complete


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the options --data, --model and --steps to a parser, for a training with otherwise default settings."""
    parser.add_argument("--data", default="digits", metavar="NAME", help="default digits")
    parser.add_argument("--model", default="mlp", metavar="NAME", help="default mlp")
    parser.add_argument("--steps", type=COUNT, metavar="N", help="default: those of the recipe")


def recipe_settings(options: argparse.Namespace, comm: Communicator) -> Settings:
    """Training settings from the options of `add_recipe`; also sets the number of BLAS threads. Collective."""
    collective_call(comm, partial(limit_threads, cores_per_rank(comm)), "BLAS threads")
    return complete({"data": options.data, "model": options.model, "steps": options.steps})


def first_model(name: str, shape: tuple[int, ...], classes: int) -> Sequential:
    """Model by name, as of `parallel.nn.models.build`, with the first weights of an engine with default settings."""
    flat = FlatParams(model := build(name, shape, classes))
    vector = np.empty(flat.length, np.float32)
    flat.initialise(vector, DEFAULTS.seed)
    flat.bind(vector)
    return model

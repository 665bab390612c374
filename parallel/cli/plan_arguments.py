"""Arguments that programs of `chorus plan --cluster` share: cluster, precision, recipe, software, files."""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collectives.benchmark.reports import check_writable
from parallel.planning.analytic.checked import lookup
from parallel.planning.analytic.presets import Presets, load
from parallel.planning.analytic.states import RECIPES
from parallel.planning.analytic.step_time import Setup

MOST_DEVICES, MOST_TOKENS = 1 << 20, 1 << 40
"""Devices of a cluster, and tokens of a step, above which a number is taken for a mistake."""


def cluster_size(text: str) -> tuple[str, int]:
    """Argument type: name of a cluster and number of devices, such as h100:64."""
    name, _, count = text.partition(":")
    if not name or not positive(count):
        raise argparse.ArgumentTypeError(f"expected a cluster and a number of devices, as h100:64; found {text!r}")
    if positive(count) > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_DEVICES} devices, found {count}")
    return name, positive(count)


def positive(text: str) -> int:
    """Whole number of at most 40 decimal digits. 0 for another text."""
    return int(text) if re.fullmatch("[0-9]{1,40}", text) else 0


def expect_tokens(sequences: int, length: int) -> None:
    """Raise ValueError for a batch of more than `MOST_TOKENS`."""
    if sequences * length > MOST_TOKENS:
        most = MOST_TOKENS // length
        raise ValueError(f"--batch: expected at most {most} sequences of {length} tokens, found {sequences}")


def json_target(text: str) -> str:
    """Argument type: a file's name, or - for the standard output."""
    if not text:
        raise argparse.ArgumentTypeError("expected a file's name, or - for the standard output; found ''")
    return text


def add_setup(parser: argparse.ArgumentParser, *, stack: str | None = None) -> None:
    """Add the options that `setup_of` reads. `stack` is the default of --stack. None leaves --stack out."""
    add = parser.add_argument
    add("--cluster", type=cluster_size, required=True, metavar="NAME:DEVICES", help="as in h100:64")
    add("--presets", type=Path, action="append", default=[], metavar="FILE", help="TOML with your own; may be repeated")
    add("--precision", default="bf16", metavar="NAME", help="of products, for the device's peak (default bf16)")
    add("--recipe", choices=list(RECIPES), default="bf16", help="bytes of weights, gradients, optimizer (default bf16)")
    if stack:
        add("--stack", default=stack, metavar="NAME", help=f"software that times are of (default {stack})")


def add_json(parser: argparse.ArgumentParser) -> None:
    text = "result for programs; - for the standard output instead of text"
    parser.add_argument("--json", type=json_target, metavar="FILE", help=text)


def presets_of(arguments: argparse.Namespace) -> Presets:
    """Built-in presets and the presets of --presets. ValueError for files that cannot be used."""
    try:
        return load(arguments.presets)
    except ValueError as error:
        raise ValueError(f"--presets: {error}") from None


def setup_of(arguments: argparse.Namespace, presets: Presets) -> Setup:
    """Cluster, device, precision, recipe and software of the arguments. ValueError for unknown names."""
    cluster = lookup("--cluster", arguments.cluster[0], presets.clusters)
    setup = Setup(cluster, presets.device_of(cluster), arguments.precision, RECIPES[arguments.recipe])
    lookup("--precision", arguments.precision, setup.device.peak)
    if "stack" in arguments:
        setup = setup._replace(stack=lookup("--stack", arguments.stack, presets.stacks))
    return setup


def expect_writable(path: Path) -> None:
    """Raise ValueError if a file cannot be written at `path`."""
    try:
        check_writable(path)
    except OSError as error:
        raise ValueError(
            f"expected a file that can be written, found {str(path)!r}: {error.strerror or error}"
        ) from None


def check_files(arguments: argparse.Namespace, *options: str) -> None:
    """Raise ValueError if a file that one of the given `options` names cannot be written, or two name the same."""
    named: dict[Path, str] = {}
    for name in options:
        option, path = f"--{name.replace('_', '-')}", getattr(arguments, name)
        if path is None or path == "-":
            continue
        try:
            expect_writable(Path(path))
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None
        if other := named.get(Path(path)):
            raise ValueError(f"{option}: expected another file than that of {other}, found {str(path)!r}")
        named[Path(path)] = option


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write a result to the file of --json, or to the standard output. Nothing without the option."""
    text = json.dumps(result, indent=1)
    if path == "-":
        print(text)
    elif path:
        Path(path).write_text(text + "\n")

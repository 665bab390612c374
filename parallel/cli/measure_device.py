"""Measure the device of this machine for `chorus plan --cluster`: products by size, and memory, as a presets file.

    chorus plan --measure-device here --output out/here.toml
    chorus plan --cluster here:1 --presets out/here.toml --precision fp32 --recipe fp32 --model gpt2 --batch 8

Takes some seconds on an idle machine. Links of the cluster in the file are assumptions: edit them.
"""

import re
from pathlib import Path

from collectives.cli.launcher import ProgramParser
from parallel.cli.plan_arguments import check_files
from parallel.planning.analytic.device_measurement import measure_device
from parallel.planning.analytic.presets import parse
from parallel.runtime.resources import node_memory


def main(argv: list[str] | None = None) -> int:
    """Print the tables, or write them to a file; exit status 2 for wrong arguments."""
    command = ProgramParser(__doc__)
    add = command.add_argument
    add("--measure-device", required=True, metavar="NAME", help="name of the device and of its cluster")
    add("--output", type=Path, metavar="FILE", help="TOML for --presets (default: the standard output)")
    arguments = command.parse_args(argv)
    name = arguments.measure_device
    if not re.fullmatch(r"[\w-]+", name, re.ASCII):
        command.error(f"--measure-device: expected letters, digits, - and _; found {name!r}")
    try:
        check_files(arguments, "output")
    except ValueError as error:
        command.error(str(error))
    text = measure_device(node_memory()).as_toml(name)
    parse(text, name)
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text, end="")
    return 0

"""Wrong command lines of all programs of `chorus`, made from the programs' own parsers, run on all ranks of a launch.

Run by `test_wrong_command_lines` with a folder, the number of cases of each program, and names of programs. Each rank
writes how each case ended as a line of JSON to ``rank-N`` (`mpi_launches.Launch`).
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

MEMORY = 6 << 30  # bytes of address space: huge sizes fail at once

NUMBERS = ["", "x", "-1", "0", "1.5", "1e30", "nan", "-inf", "2147483648", "9" * 30, "9" * 5000, "²", "0x10", "1,,2"]
NAMES = ["nosuch", "\udcff", "é,ü", ",", ":", "=", "a=1,a=1", "..", "a" * 5000, "%s{}", "-", "--", "int8:", "dp=0"]
PLACES = ["/dev/full", "/proc/1/mem", "/", ".", "files/empty/below", "files/missing/below", "n" * 300]

NESTED = b"[" * 500 + b"]" * 500
CONTENTS = {
    "empty": b"",
    "garbage": random.Random(0).randbytes(3000),
    "zeros": bytes(64),
    "text": b"one two\n",
    "list.json": b"[]",
    "object.json": b"{}",
    "number.json": b"3",
    "null.json": b"null",
    "objects.json": b'[{"a": null}, 3]',
    "infinite.json": b'{"ranks": NaN, "rows": [1e999]}',
    "cut.json": b'{"ranks": 2, "rows": [',
    "nested.json": NESTED,
    "deep.json": b"[" * 100_000,
    "nested_rows.json": b'{"rows": ' + NESTED + b"}",
    "long.json": b'{"ranks": ' + b"9" * 5000 + b"}",
    "surrogate.json": b'{"ranks": "\\ud800"}',
    "cut.toml": b"a = [1\n",
    "other.toml": b"[devices.x]\npeak = 3\n",
    "cut.npz": b"PK\x03\x04" + bytes(20),
    "list.safetensors": (2).to_bytes(8, "little") + b"[]",
    "long.safetensors": (1 << 40).to_bytes(8, "little") + b"{}",
    "shards/index.json": NESTED,
    "step-000000010/state.json": b"{}",
}
"""Files that no program can use."""

SHORT = {
    "demo": "--epochs 1 --no-race",
    "bench collectives": "--sizes 8 --iterations 1 --warmup 2 --seconds 0 --no-model",
    "bench compressed": "--sizes 1K --turns 1",
    "bench layouts": "--model mlp:tiny --micro-batch 2 --turn 1 --turns 1",
    "bench meshes": "--model gpt:tiny --length 4 --batch 1 --steps 1 --turns 1",
    "bench pipeline": "--schedules 1f1b --milliseconds 1",
    "bench servers": "--mbytes 1",
    "bench dispatch": "--tokens 2 --width 4 --turns 1",
    "bench quant": "--size 1K --turns 1",
    "tune": "--sizes 8 --iterations 1 --seconds 0",
    "train": "--model mlp:tiny --steps 1 --batch 8",
    "plan": "--model mlp:tiny --steps 1 --batch 8",
    "plan --graph": "--graph two-layers --cluster h100:2",
    "plan --scaling": "--scaling --cluster h100:8",
    "plan --measure-device": "--measure-device here",
    "plan --cluster": "--cluster h100:8 --model llama-3-8b --batch 8",
    "plan --search": "--search --model mlp:tiny --steps 1 --batch 8",
    "plan --run": "--run --model mlp:tiny --steps 1 --batch 8",
    "plan --measure-scaling": "--measure-scaling out/new.json --replicas nosuch --pipelines nosuch",
    "quantize": "--checkpoint files/made/checkpoints --samples 64",
    "generate": "--checkpoint files/made/checkpoints --length 2",
    "predict": "--checkpoint files/made/checkpoints --data files/made/x.npy --output files/made/scores.npy",
    "trace": "--bytes 64",
    "simulate": "--ranks 8 --up-to 64",
    "draw collective": "--collective allreduce --algorithm ring",
    "draw program": "--collective allreduce --algorithm ring",
    "draw pipeline": "--schedule 1f1b",
    "draw experts": "files/made/metrics.jsonl",
    "prove collectives": "--max-size 3",
    "prove pipelines": "--stages 2 --microbatches 2 --jobs 1",
}
"""What a program needs, and what makes it short for a value that it accepts. The first group selects the program."""

MAKERS = {
    "train": "--model mlp:tiny --steps 2 --batch 8 --checkpoint files/made/checkpoints --json files/made/metrics.jsonl "
    "--trace files/made/trace.json",
    "quantize": "--checkpoint files/made/checkpoints --samples 64 -o files/made/q.safetensors",
    "tune": "--collective allreduce --sizes 8 --iterations 1 --seconds 0 --table files/made/table.json",
    "bench collectives": f"{SHORT['bench collectives']} --json files/made/report.json",
    "bench meshes": f"{SHORT['bench meshes']} --output files/made/meshes.json",
}
"""Right command lines, whose files are cut and changed."""

INPUTS = ("FILE", "DIR", "CHECKPOINT", "DATA", "folder", "file")
EVERY = 5  # of so many changes of a file, one is taken
ENDLESS = ("watch",)
"""Options by which a program runs until Ctrl-C."""
OUTPUTS = ("json", "plot", "out", "output", "pareto", "trace", "record", "plan_plot", "plan_json")


class Case(NamedTuple):
    """Program of `chorus` and the words after it."""

    program: str
    words: list[str]


def mutants(text: str) -> Iterator[str]:
    """Texts of a JSON value, in each of which one part is another or absent."""
    holder = [json.loads(text)]

    def walk(parent: Any, key: Any, depth: int) -> Iterator[str]:
        part = parent[key]
        for other in (None, -1, "x", [], {}, 1e308):
            parent[key] = other
            yield json.dumps(holder[0])
        parent[key] = part
        keys = list(part) if isinstance(part, dict) else range(min(2, len(part))) if isinstance(part, list) else ()
        for inner in keys if depth < 3 else ():
            yield from walk(part, inner, depth + 1)
        if isinstance(part, dict):
            for inner in keys:
                others = {name: value for name, value in part.items() if name != inner}
                parent[key] = others
                yield json.dumps(holder[0])
            parent[key] = part

    yield from walk(holder, 0, 0)


def write_files(folder: Path) -> None:
    """Write `CONTENTS`, and what is in ``made`` once more, cut and with parts exchanged."""
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for path in [path for path in (folder / "made").rglob("*") if path.is_file()]:
        data, half = path.read_bytes(), folder / "cut" / path.relative_to(folder / "made")
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(data[: len(data) // 2])
        if path.suffix in (".json", ".jsonl") and path.parent.name == "made":
            first, *others = data.decode().split("\n", 1) if path.suffix == ".jsonl" else [data.decode()]
            for number, text in enumerate(islice(mutants(first), None, None, EVERY)):
                (folder / f"{path.stem}-{number}{path.suffix}").write_text("\n".join([text, *others]))


class Parsed(BaseException):
    """Ends a program once its parser is complete."""


def parser_of(program: str) -> argparse.ArgumentParser:
    """Parser that a program fills before it reads its arguments."""
    from parallel.cli.programs import PROGRAMS

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Parsed(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), contextlib.suppress(SystemExit):
        try:
            import_module(PROGRAMS[program].module).main()
        except Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f"{program} reads no arguments")


def others(program: str, parser: argparse.ArgumentParser, tested: argparse.Action) -> list[str]:
    """Words of `SHORT` without those of the option under test and of options that exclude it."""
    exclusive = [group._group_actions for group in parser._mutually_exclusive_groups if tested in group._group_actions]
    gone = {option for group in [[tested], *exclusive] for action in group for option in action.option_strings}
    words = SHORT.get(program, "").split()
    starts = [at for at, word in enumerate(words) if word.startswith("--") or not at] + [len(words)]
    kept = []
    for start, stop in pairwise(starts):
        if words[start] not in gone and (tested.option_strings or words[start].startswith("-")):
            kept += words[start:stop]
    return kept


def cases_of(program: str, files: list[str], count: int) -> list[Case]:
    """Single wrong values of any option, and as many random options together."""
    parser, rng = parser_of(program), random.Random(f"{program} {count}")
    options = [one for one in parser._actions if not isinstance(one, argparse._HelpAction) and one.dest not in ENDLESS]
    valued = [one for one in options if one.nargs != 0 and not isinstance(one, argparse.BooleanOptionalAction)]
    cases = []
    for _ in range(count if valued else 0):
        option = rng.choice(valued)
        about, name = f"{option.metavar} {option.dest} {option.help}", option.option_strings[-1:]
        takes_file = option.type is Path or any(word in about for word in INPUTS)
        changed = files if option.dest not in OUTPUTS else [one for one in files if "-" not in one]
        kinds = [NUMBERS, NAMES, PLACES, *[changed] * (3 * takes_file)]
        value = rng.choice(rng.choice(kinds))
        words = others(program, parser, option)
        cases.append(Case(program, [*words, f"{name[0]}={value}" if name else value]))
    for _ in range(count):
        words = SHORT.get(program, "").split()
        for option in rng.sample(options, min(len(options), rng.randint(1, 5))):
            if not option.option_strings:
                continue
            known = [word.strip("(),;:.") for word in (option.help or "").split()]
            known = [word for word in known if not word.isdecimal()]  # defaults, which may take long
            values = [*map(str, option.choices or known), "1", "2", "0", "-1", "files/list.json"]
            name = rng.choice(option.option_strings)
            words.append(f"{name}={rng.choice(values)}" if option in valued else name)
        cases.append(Case(program, words))
    return cases


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(case: Case, place: Path) -> dict[str, Any]:
    """Run a command line as the whole program of this rank; its exit status, and what it printed as errors."""
    from parallel.cli import main

    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{place}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    words = [os.fsdecode(word.encode(errors="surrogateescape")) for word in case.words]
    status: Any = 0
    try:
        with mock.patch.dict(os.environ), mock.patch.object(main.watchdog, "start"):
            status = main.main([*case.program.partition(" --")[0].split(), *words])
    except SystemExit as end:
        status = end.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = "an exception"
    for stream, descriptor, old in zip((sys.stdout, sys.stderr), (1, 2), kept):
        stream.flush()
        os.dup2(old, descriptor)
        os.close(old)
    return {"status": status, "errors": Path(f"{place}.err").read_text(errors="backslashreplace")[-9000:]}


def main(folder: str, count: str, *programs: str) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, place = world.Get_rank(), Path(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    if rank == 0:
        Path(folder, "here/files/made").mkdir(parents=True)
    world.Barrier()
    os.chdir(place / "here")
    files: list[str] = []

    def report(case: Case, **facts: Any) -> None:
        with open(place / f"rank-{rank}", "a") as file:
            file.write(json.dumps({"case": case, **facts}) + "\n")

    def end(case: Case) -> None:
        report(case)
        before, start = content_of(Path("files")) if rank == 0 else {}, time.monotonic()
        world.Barrier()
        ended = run(case, place / f"printed-{rank}")
        world.Barrier()
        seconds = time.monotonic() - start
        changed = [str(path) for path, data in before.items() if not path.is_file() or path.read_bytes() != data]
        report(case, **ended, changed=changed, seconds=seconds)
        if changed and rank == 0:
            shutil.rmtree("files")
            shutil.copytree("again", "files")
        world.Barrier()

    for program, words in MAKERS.items():
        end(Case(program, words.split()))
    if rank == 0:
        write_files(Path("files"))
        shutil.copytree("files", "again")
        files = sorted(str(path) for path in Path("files").rglob("*"))
    files = world.bcast(files)
    for program in programs:
        for case in cases_of(program, files, int(count)):
            end(case)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The program that writes trained models in few bits: what it says, draws, keeps and refuses."""

import re

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("sklearn")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from mpi4py import MPI

from collectives import Communicator
from parallel.checkpoint.checkpoint_files import all_in
from parallel.cli import quantize_model
from parallel.cli.quantize_model import NEEDED
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training
from quant import PRESETS, PerGroup, parse

TASKS = {
    "classes": {"data": "teacher_classes", "model": "mlp:tiny", "steps": 80},
    "values": {"data": "teacher", "model": "mlp:tiny", "steps": 20},
    "images": {"data": "digits", "model": "convnet:tiny", "steps": 80},
    "text": {"data": "copy", "model": "gpt:tiny", "length": 16, "steps": 3, "warm_up": 0},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of a model of each kind."""
    made = {}
    for name, said in TASKS.items():
        made[name] = tmp_path_factory.mktemp(name)
        with Training(complete(said), Communicator(MPI.COMM_SELF)) as training:
            list(training.run())
            training.save(made[name])
    return made


def run(capsys, *arguments):
    assert quantize_model.main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", TASKS)
def test_from_a_checkpoint_to_a_file_and_back(folders, capsys, tmp_path, name):
    file = tmp_path / "m.safetensors"
    said = ["--spec", "int4_g16", "--method", "gptq", "--activations", "int8", "--samples", 64]
    output = run(capsys, "--checkpoint", folders[name], *said, "--report", "-o", file)
    (whole,) = re.findall(r"float32: (.*), [\d.]+ .?i?B", output)
    score, size, times = re.findall(r"gptq, inputs in int8: (.*), ([\d.]+ (?:[KM]i)?B) \((.*) times less\)", output)[0]
    assert whole != score and float(times) > 3
    layers = re.findall(r"^([\w.]+\.weight) +\d+ x \d+  int4_g16 ", output, re.MULTILINE)
    assert len(layers) == {"classes": 2, "values": 2, "images": 3, "text": 10}[name]
    assert f": {score}, {size}" in run(capsys, "--load", file)


def test_a_width_for_each_layer(folders, capsys, tmp_path):
    picture = tmp_path / "pareto.png"
    said = ["--spec", "int3_g32", "--mixed", 3, "--widths", "2,3,4", "--sensitivity", "fisher", "--samples", 32]
    output = run(capsys, "--checkpoint", folders["images"], *said, "--pareto", picture, "--search", "dp")
    same, mixed = (float(re.findall(rf"{who}: .* (\S+) bits a weight", output)[0]) for who in ("for all", "by dp"))
    assert mixed <= same and picture.read_bytes().startswith(b"\x89PNG")
    output = run(capsys, "--checkpoint", folders["images"], *said[:-2], "--samples", 8, "--mixed", 2.5)
    assert "for all" not in output and "mixed by milp" in output


def test_tuned_levels_and_widths_of_inputs(folders, capsys, tmp_path):
    file, inputs = tmp_path / "m.safetensors", ["--activations", "int8", "--mixed-inputs", 4, "--widths", "2,4,8"]
    said = ["--spec", "kmeans2", "--tune", 4, *inputs, "--samples", 64]
    output = run(capsys, "--checkpoint", folders["classes"], *said, "-o", file)
    rounded, tuned = (
        float(re.findall(rf"{how}: .*loss ([\d.]+)", output)[0]) for how in ("rtn", "inputs in int8 for all")
    )
    assert tuned < rounded
    widths = re.findall(r" (\d+)(?:,|$)", re.findall(r"bits of inputs: (.*)", output)[0])
    assert len(widths) == 2 and set(widths) <= {"2", "4", "8"}
    ((score, size),) = re.findall(r"kmeans2, rtn, tuned, inputs in mixed: (.*), ([\d.]+ (?:[KM]i)?B)", output)
    assert f": {score}, {size}" in run(capsys, "--load", file)


@pytest.mark.parametrize("said", [["--spec", "int3"], ["--spec", "int3", "--mixed", 3, "--widths", "2,4"]], ids=len)
def test_weights_trained_for_their_codes(folders, capsys, tmp_path, said):
    """Their loss is smaller than that of rounding after the training, in the same bytes."""
    file, name = tmp_path / "m.safetensors", "mixed" if "--mixed" in said else "int3"
    output = run(capsys, "--checkpoint", folders["classes"], *said, "--tune", 4, "--samples", 64, "-o", file)
    rounded, tuned = (
        float(re.findall(rf"^{name}, rtn{how}: .*loss ([\d.]+)", output, re.MULTILINE)[0]) for how in ("", ", tuned")
    )
    assert tuned < rounded
    ((score, size),) = re.findall(rf"{name}, rtn, tuned: (.*), ([\d.]+ (?:[KM]i)?B)", output)
    assert f": {score}, {size}" in run(capsys, "--load", file)


def test_one_of_several_checkpoints(folders, capsys):
    (path,) = all_in(folders["classes"])
    assert "loss" in run(capsys, "--checkpoint", path)


def broken(folder, tmp_path):
    """A checkpoint with NaN in it."""
    with Training(complete(TASKS["classes"]), Communicator(MPI.COMM_SELF)) as training:
        training.engine.flat.places[0].parameter.data[1, 2] = np.nan
        training.engine.tensor_slices()
        training.save(tmp_path / "nan")
    return tmp_path / "nan"


WRONG = {
    "no checkpoint": (
        lambda at, tmp: ["--checkpoint", tmp / "none"],
        "none: expected a folder with checkpoints of chorus train, found no such folder",
    ),
    "no such step": (lambda at, tmp: ["--checkpoint", tmp / "step-000000001"], "there is no such folder"),
    "spec": (lambda at, tmp: ["--checkpoint", at, "--spec", "int9"], "--spec: no spec 'int9': expected a preset (INT8"),
    "group of nothing": (lambda at, tmp: ["--checkpoint", at, "--spec", "int4_g0"], "--spec: size: expected at least"),
    "group": (lambda at, tmp: ["--checkpoint", at, "--spec", "int4_g512"], "groups of 512 fit nowhere"),
    "method": (lambda at, tmp: ["--checkpoint", at, "--method", "magic"], "invalid choice: 'magic'"),
    "method of a spec": (lambda at, tmp: ["--checkpoint", at, "--spec", "q4_0", "--method", "gptq"], "of another kind"),
    "inputs": (lambda at, tmp: ["--checkpoint", at, "--activations", "nf4"], "activations: expected linear codes"),
    "data": (
        lambda at, tmp: ["--checkpoint", at, "--calibrate", "letters"],
        "calibrate: data 'letters': neither a file",
    ),
    "other data": (lambda at, tmp: ["--checkpoint", at, "--calibrate", "digits"], "and digits has classes from (8, 8)"),
    "tuned otherwise": (
        lambda at, tmp: ["--checkpoint", at, "--tune", 1, "--method", "gptq"],
        "--tune: weights trained in codes linear are rounded by rtn, found --method gptq",
    ),
    "widths of inputs": (
        lambda at, tmp: ["--checkpoint", at, "--mixed-inputs", 4],
        "--mixed-inputs needs --activations",
    ),
    "samples": (lambda at, tmp: ["--checkpoint", at, "--samples", 0], "expected a whole number from 1 on, found '0'"),
    "too few bits": (lambda at, tmp: ["--checkpoint", at, "--mixed", 1, "--spec", "int3_g32"], "expected 2 to 8 bits"),
    "widths of a table": (lambda at, tmp: ["--checkpoint", at, "--mixed", 3, "--spec", "mxfp4"], "codes e2m1 have one"),
    "no width": (lambda at, tmp: ["--checkpoint", at, "--mixed", 3, "--widths", "3,9"], "bits: expected one of 1, 2"),
    "no numbers": (
        lambda at, tmp: ["--checkpoint", at, "--widths", "a"],
        "numbers as in 1,2,4 or 0:20, found 'a'",
    ),
    "a curve of nothing": (lambda at, tmp: ["--checkpoint", at, "--pareto", "p.png"], "--pareto needs --mixed"),
    "NaN": (lambda at, tmp: ["--checkpoint", broken(at, tmp)], "weight[1, 2] is nan: this model is broken"),
    "nothing": (lambda at, tmp: [], "one of the arguments --checkpoint --load is required"),
    "no file": (lambda at, tmp: ["--load", tmp / "none"], "cannot be used: there is no such file"),
    "a folder": (lambda at, tmp: ["--checkpoint", at, "-o", tmp], "is no plain file"),
    "no picture": (
        lambda at, tmp: ["--checkpoint", at, "--mixed", 3, "--pareto", "p.foo"],
        "--pareto: expected a name that ends in",
    ),
    "picture in a file": (
        lambda at, tmp: ["--checkpoint", at, "--mixed", 3, "--pareto", __file__ + "/a.png"],
        "cannot be written",
    ),
}


OPTIONS = {
    "spec": "int4",
    "method": "gptq",
    "activations": "int8",
    "observer": "ema",
    "calibrate": "digits",
    "samples": 8,
    "mixed": 3,
    "mixed_inputs": 4,
    "tune": 2,
    "search": "dp",
    "sensitivity": "fisher",
    "widths": "2,4",
    "pareto": "p.png",
    "report": None,
    "output": "b",
}
"""What may be said, in other words than nothing said."""


def option(name):
    words = f"--{name.replace('_', '-')}"
    return [words] if OPTIONS[name] is None else [words, str(OPTIONS[name])]


def test_short_names_can_be_parsed_or_are_codes():
    for text in ("int8", "int3_g64", "int4_row", "int4_g32_zero", "q4_0", "vsq"):
        assert parse(quantize_model.short_name(parse(text))) == parse(text)
    for name in ("NF4", "MXFP8", "MXFP4", "NVFP4"):
        spec = PRESETS[name].replace(granularity=PerGroup(8))
        assert quantize_model.short_name(spec) == spec.code


def test_the_options_are_all():
    there = {option.dest for option in quantize_model.parser()._actions} - {"help", "help_all", "checkpoint", "load"}
    assert {*OPTIONS} == there == {*NEEDED["checkpoint",]}


@pytest.mark.parametrize(
    "source, needed, name",
    [
        *(("--load", ("checkpoint",), name) for name in OPTIONS),
        *(("--checkpoint", needed, name) for needed, names in [*NEEDED.items()][1:] for name in names),
    ],
)
def test_what_would_do_nothing_is_refused(capsys, tmp_path, source, needed, name):
    with pytest.raises(SystemExit) as ended:
        quantize_model.main([source, str(tmp_path / "none"), *option(name)])
    assert ended.value.code == 2
    options = " or ".join(f"--{one.replace('_', '-')}" for one in needed)
    assert f"{option(name)[0]} needs {options}, and" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(folders, capsys, tmp_path, name):
    arguments, told = WRONG[name]
    with pytest.raises(SystemExit) as ended:
        quantize_model.main([*map(str, arguments(folders["classes"], tmp_path))])
    assert ended.value.code == 2
    assert told in " ".join(capsys.readouterr().err.split())

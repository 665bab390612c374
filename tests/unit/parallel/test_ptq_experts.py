"""Mixtures of experts and Mixture-of-Depths in few bits: selection biases, settings, errors per layer."""

import math
import re

import numpy as np
import pytest

pytest.importorskip("safetensors")

from mpi4py import MPI

from collectives import Communicator
from parallel.cli.quantize_model import print_layers
from parallel.data.sampler import Batch
from parallel.engine.operator_records import buffers_of
from parallel.nn.models import build
from parallel.nn.operator import name_all
from parallel.nn.rewrite import operators_in
from parallel.nn.transforms.quantizable_layers import layers_of
from parallel.ptq import load_model
from parallel.ptq.calibration import dealt
from parallel.ptq.evaluation import compare, evaluate
from parallel.ptq.quantize_model import quantise
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training
from quant import grouped
from quant.io import safetensors_file

SELF = MPI.COMM_SELF
pytestmark = pytest.mark.filterwarnings("ignore:calibration. expected at least as many rows")
"""Most tests calibrate on few samples."""
SAID = {"data": "copy", "model": "gpt-moe:tiny", "length": 16, "batch": 4, "steps": 3, "experts": "4,bias=0.5"}


def values_of(model):
    return {name: one.values.tolist() for name, one in buffers_of(operators_in(model)).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoint of a model whose biases outweigh the scores, with the biases and the evaluation of its training."""
    folder = tmp_path_factory.mktemp("experts")
    with Training(complete(SAID), Communicator(SELF)) as training:
        list(training.run())
        training.save(folder)
        return folder, values_of(training.model), training.score()


def test_selection_biases_of_a_checkpoint(trained):
    folder, biases, score = trained
    job = load_model.from_checkpoint(SELF, folder)
    assert values_of(job.model) == biases
    assert len(biases) == 2 and all(any(values) for values in biases.values())
    found = evaluate(job.model, job.loss, dealt(job.task.test, 1000, 64, 0, 1), SELF, job.measure)
    assert found.loss == pytest.approx(score.loss, rel=1e-5)


def test_selection_biases_of_a_file(trained, tmp_path):
    folder, biases, _ = trained
    job, path = load_model.from_checkpoint(SELF, folder), tmp_path / "m.safetensors"
    load_model.save(path, job, quantise(job.model, grouped(4, 16), dealt(job.task.train, 8, 4, 0, 1), SELF))
    back = load_model.load(path)
    assert values_of(back.model) == biases
    arrays = {name: one for name, one in safetensors_file.load(path).items() if not name.startswith("buffers/")}
    safetensors_file.save(path, arrays, safetensors_file.about(path))
    with pytest.raises(ValueError, match=r"buffers: expected 1.*found none"):
        load_model.load(path)


def test_settings_of_a_mesh_are_those_of_its_layout_only():
    """The settings of a run on a mesh, with the layout that one rank has too."""
    said = {"mesh": "dp=4,ep=2", "dispatch": "hierarchical", "overlap_expert_comm": True, "expert_shards": 2}
    found = load_model._single_rank_settings({**SAID, **said, "layout": "dp", "accumulate": 2})
    assert found == complete({**SAID, "accumulate": 2, "recompute": False})


def test_errors_where_tokens_are_routed(capsys):
    """Quantised routers and predictors choose other tokens: rows differ, or their number does."""
    model, random = build("gpt-moe:tiny", (16,), 40, experts="4,shared", depths="0.5"), np.random.default_rng(0)
    for parameter in name_all(model):
        parameter.data = random.normal(0, 0.3, parameter.shape).astype(np.float32)
    x = random.integers(0, 40, (4, 16))
    batches = [Batch(0, x, x, np.arange(4))]
    layers = layers_of(model)
    rows = compare(model, quantise(model, grouped(3, 16), batches, SELF), layers, batches, SELF)
    routed = [row.name for row in rows if row.name.startswith("2.block.") or ".experts." in row.name]
    assert [row.name for row in rows if math.isnan(row.arriving)] == routed and len(routed) == 2 * 8 + 2 + 2
    assert any(row.name.startswith("1.1.inner.1.shared.") for row in rows)
    print_layers(rows, ["int3_g16"] * len(rows))
    table = capsys.readouterr().out
    assert len(re.findall(r" -$", table, re.MULTILINE)) == len(routed) and "nan" not in table

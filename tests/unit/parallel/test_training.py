"""What a training makes of its settings."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("safetensors")

from mpi4py import MPI

from collectives import Communicator
from collectives.transport.memory.memory_limits import control_groups
from parallel.checkpoint import step_folders
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError
from parallel.data.datasets import ArrayDataset
from parallel.data.sampler import Batch
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.optim.lr_schedules import rate_at
from parallel.runtime import resources
from parallel.trainer import trainer as training
from parallel.trainer.recipes import complete
from parallel.trainer.task_setup import prepare
from parallel.trainer.trainer import Training, settings_in


@pytest.mark.parametrize("model, inputs", [("mlp:tiny", (8, 8)), ("convnet:tiny", (1, 8, 8))])
def test_images_of_bytes_are_taken_as_floats(tmp_path, model, inputs):
    images = np.arange(20 * 64, dtype=np.uint16).reshape(20, 8, 8).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(20) % 2)
    task, *_ = prepare(complete({"data": str(tmp_path / "images.npz"), "model": model}), 1)
    for part in (task.train, task.test):
        assert part.x.dtype == np.float32 and part.x.shape[1:] == inputs == task.inputs
    assert task.train.x.max() > 200


def test_batches_of_tokens():
    """As many windows as fit, at least one; a checkpoint's number gives way to that of samples."""
    given = {"data": "copy", "model": "gpt:tiny", "length": 16, "steps": 2, "batch_tokens": 100}
    with Communicator(MPI.COMM_SELF) as comm:
        with Training(complete(given), comm) as made:
            assert [record.samples for record in made.run()] == [6, 6]
            assert made.settings.batch == 6 and made.forecast.predicted == made.engine.ledger.predicted
        with Training(complete({**given, "batch_tokens": 3}), comm) as made:
            assert made.settings.batch == 1
        assert complete({"batch": 5}, previous=given).batch_tokens is None
        with pytest.raises(ValueError, match=r"batch_tokens: expected sequences, found targets of int64, shape \(\)"):
            Training(complete({"data": "teacher_classes", "batch_tokens": 100}), comm)


def test_batches_of_tokens_in_pipelines():
    """Checked with the number of samples that these tokens are: here 6."""
    given = {"data": "copy", "model": "gpt:tiny", "length": 16, "layout": "pp", "batch_tokens": 100}
    assert prepare(complete({**given, "microbatches": 6}), 2)[0].name == "copy"
    with pytest.raises(ValueError, match="microbatches: a batch of 6 samples does not divide into 4 micro-batches"):
        prepare(complete({**given, "microbatches": 4}), 2)


def test_another_mesh_drops_the_exchange_between_experts():
    """Parts of experts too, unless bits depend on them; given values, and those of the same mesh, stay."""
    before = {"layout": "dp", "mesh": "dp=4,ep=2", "dispatch": "hierarchical", "overlap_expert_comm": True}
    before |= {"accumulate": 2, "expert_shards": 2, "tensor_shards": 4}

    def found(given, **more):
        chosen = complete(given, before | more)
        assert (chosen.accumulate, chosen.tensor_shards) == (2, 4)
        return chosen.dispatch, chosen.overlap_expert_comm, chosen.expert_shards

    for same in ({}, {"mesh": "dp=4,ep=2"}, {"layout": "dp", "seed": 1}):
        assert found(same) == ("hierarchical", True, 2)
    assert found({"mesh": "dp=4"}) == ("direct", False, None)
    assert found({"mesh": "dp=4"}, reproducible=True) == ("direct", False, 2)
    assert found({"mesh": "dp=2,ep=2", "dispatch": "direct:int8"}) == ("direct:int8", False, None)


def test_another_mesh_drops_the_attention_of_divided_sequences():
    before = {"data": "copy", "layout": "dp", "mesh": "cp=2", "context": "ulysses"}
    assert complete({"mesh": "cp=2"}, before).context == complete({"seed": 1}, before).context == "ulysses"
    assert complete({"mesh": "dp=2"}, before).context == complete({"mesh": "dp=2,cp=2"}, before).context == "auto"
    assert complete({"mesh": "dp=2,cp=2", "context": "ring"}, before).context == "ring"


def test_after_asynchronous_steps_rates_are_those_of_steps():
    """A checkpoint of asynchronous training has several updates of each step, and one of fp16 may have fewer."""
    given = {"data": "copy", "model": "gpt:tiny", "length": 8, "steps": 20, "batch": 2, "warm_up": 10, "rate": 0.01}
    with Communicator(MPI.COMM_SELF) as comm, Training(complete(given), comm) as made:
        for updates, clock in ((12, 3), (2, 2)):
            made.engine.load(made.engine.state() | {"steps": 3, "updates": updates})
            assert next(made.run()).report.rate == rate_at(made._job.optimizer.rate, clock)


def test_bytes_stay_integers():
    task, *_ = prepare(complete({"data": "copy", "length": 8}), 1)
    assert task.train.take(np.arange(2))[0].dtype == np.int64


@pytest.mark.parametrize("more", [{}, {"reproducible": True}, {"precision": "bf16"}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_forecast_is_what_the_ledger_says_afterwards(monkeypatch, layout, more):
    """In every kind of memory, before an engine is there; and it is what the machine is asked for."""
    asked = []
    monkeypatch.setattr(resources, "check_memory", lambda comm, kinds: asked.append(kinds))
    said = complete(SAID | {"micro_batch": 5, "layout": layout} | more)
    with Training(said, Communicator(MPI.COMM_SELF)) as made:
        list(made.run(lambda: True))
        assert asked == [made.engine.ledger.needed]


def test_too_large_for_the_machine(monkeypatch):
    """Told before anything is allocated; a system that does not say how much memory it has is not asked."""
    comm = Communicator(MPI.COMM_SELF)
    assert resources.node_memory() > 10**8
    monkeypatch.setattr(resources, "node_memory", lambda: 100_000)
    monkeypatch.setattr(comm, "zeros", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(
        ValueError, match=r"not enough memory: it needs 21 MiB \(.*\), and the node has 97.7 KiB; a smaller"
    ):
        Training(complete(SAID | {"model": "mlp:medium"}), comm)
    monkeypatch.undo()
    monkeypatch.setattr(resources, "node_memory", lambda: 0)
    Training(complete(SAID), comm).close()


@pytest.mark.parametrize(
    "line, mount, name, unlimited",
    [
        ("0::/job/step", "", "memory.max", "max\n"),
        ("4:memory:/job/step", "memory", "memory.limit_in_bytes", f"{2**63}"),
    ],
)
def test_a_container_has_less_memory_than_its_machine(monkeypatch, tmp_path, line, mount, name, unlimited):
    """The least limit of a process's groups counts; what cannot be read is no limit."""
    groups, job = tmp_path / "groups", tmp_path / mount / "job"
    assert resources.container_limits(control_groups(groups, tmp_path)) == {}
    groups.write_text(f"7:cpu:/job/step/cpu\n{line}\n")
    (job / "step").mkdir(parents=True)
    assert resources.container_limits(control_groups(groups, tmp_path)) == {}
    (job / "step" / name).write_text(unlimited)
    (job / name).write_text("100000\n")
    (job.parent / name).write_text("200000\n")
    found = resources.container_limits(control_groups(groups, tmp_path))
    assert sorted(found.values())[:2] == [100_000, 200_000]
    monkeypatch.setattr(resources, "container_limits", lambda groups: found)
    resources.check_memory(MPI.COMM_SELF, {"parameters": 100_000})
    with pytest.raises(ValueError, match=r"it needs 97.7 KiB \(.*\), and the container has 97.7 KiB; a smaller"):
        resources.check_memory(MPI.COMM_SELF, {"parameters": 100_001})


@pytest.mark.parametrize("count, of", [(0, 7), (1, 7), (3, 7), (7, 7), (5, 10**6)])
def test_samples_from_all_over_a_data_set(count, of):
    """Each once, in order, the first among them, and none farther from its neighbour than it must be."""
    data = ArrayDataset(np.arange(of), -np.arange(of))
    some = training._EvenSubset(data, count)
    x, y = some.take(np.arange(count))
    assert len(some) == count == len(np.unique(x)) and np.array_equal(y, -x)
    assert count == 0 or x[0] == 0
    gaps = np.diff(np.append(x, of))
    assert set(gaps) <= {of // max(count, 1), -(-of // max(count, 1))}
    assert some.take(np.array([], np.int64))[0].size == 0
    assert np.array_equal(some.take(np.arange(count)[::-1])[0], x[::-1])


def test_a_look_at_the_test_set_is_from_all_over_it():
    """The mean over every second sample, and that over all of them, are what these samples alone have."""
    with Training(complete(SAID), Communicator(MPI.COMM_SELF)) as made:
        test = made.task.test
        for most, step in ((None, 1), (len(test) // 2, 2), (10 * len(test), 1)):
            x, y = test.take(np.arange(0, len(test), step))
            expected = made.engine.evaluate([Batch(0, x, y, np.arange(len(y)))], made._job.loss.correct)
            found = made.score(most)
            assert found.accuracy == expected.measure and abs(found.loss - expected.loss) < 1e-6


# ------------------------------------------------------------------------------------------ forged checkpoints


SAID = {"data": "teacher_classes", "model": "mlp:tiny", "batch": 24, "steps": 6}


@pytest.fixture
def written(tmp_path):
    """A checkpoint after two steps."""
    with Training(complete(SAID), Communicator(MPI.COMM_SELF)) as training:
        list(training.run(lambda: training.done == 1))
        return training.save(tmp_path / "a")


def forged(path, *keys, value):
    """The same checkpoint with another value in its state, and a checksum that fits; `...` takes the key away."""
    state = inner = json.loads((path / "state.json").read_text())
    for key in keys[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    (path / "state.json").write_text(json.dumps(state | {"sha256": step_folders.seal(state)}))


ENGINE = ("facts", "engine")
FORGERIES = [
    ((*ENGINE,), ..., "it has no engine"),
    ((*ENGINE,), {}, "steps is missing"),
    ((*ENGINE,), [], "expected values by name, found \\[\\]"),
    ((*ENGINE,), None, "expected values by name, found None"),
    ((*ENGINE, "steps"), -1, "steps: expected a whole number from 0 on, found -1"),
    ((*ENGINE, "steps"), 2.0, "steps: expected a whole number"),
    ((*ENGINE, "steps"), True, "steps: expected a whole number"),
    ((*ENGINE, "steps"), 3, "steps: expected 2, as the checkpoint's own, found 3"),
    ((*ENGINE, "updates"), "2", "updates: expected a whole number"),
    ((*ENGINE, "scaling"), ..., "state: expected .*found $"),
    ((*ENGINE, "scaling"), 1.0, "loss scale: expected values by name"),
    ((*ENGINE, "scaling", "value"), float("nan"), "value: expected 1.0 to 1.0, found nan"),
    ((*ENGINE, "scaling", "value"), "1", "value: expected a number, found '1'"),
    ((*ENGINE, "scaling", "good"), 0.5, "good: expected a number, found 0.5"),
    (("facts", "sampler"), ..., "it has no sampler"),
    (("facts", "sampler"), 7, "sampler position: position: expected values by name"),
    (("facts", "sampler", "epoch"), None, "epoch: expected a whole number"),
    (("facts", "sampler", "step"), 1.5, "step: expected a whole number"),
    (("facts", "sampler", "step"), 10**9, "sampler position: epoch 0, step 1000000000"),
    (("facts", "sampler", "seed"), ..., "seed is missing"),
    (("step",), -2, "step: expected a whole number"),
    (("step",), 1, "steps: expected 1, as the checkpoint's own, found 2"),
    (("files", "../../x.safetensors"), [1, ""], "'../../x.safetensors'"),
    (("files", "model.safetensors.index.json"), 7, "'model.safetensors.index.json' has 7"),
    (("files", "model.safetensors.index.json"), ["7", ""], "has \\['7', ''\\]"),
    (("files", "model-00001-of-00001.safetensors"), ..., "is missing in the checkpoint"),
    (("facts", "settings"), ..., "settings: expected values by name, found None"),
    (("facts", "settings", "batch"), "24", "batch: expected int, found '24'"),
    (("facts", "settings", "rate"), [1], "rate: expected float"),
    (("facts", "settings", "reproducible"), 1, "reproducible: expected bool"),
]


@pytest.mark.parametrize("where, value, words", FORGERIES)
def test_a_forged_checkpoint_changes_nothing(written, where, value, words):
    """By someone who knows how to make the checksum: whatever is wrong is told, and all is as it was."""
    forged(written, *where, value=value)
    comm = Communicator(MPI.COMM_SELF)
    with Training(complete(SAID), comm) as training:
        before = [piece.array.copy() for piece in training.engine.tensor_slices()]
        state, position = training.engine.state(), training.sampler.position()
        with pytest.raises(CheckpointError, match=words):
            found = Checkpoint(comm, written)
            settings_in(found)
            training.resume(found)
        assert all(np.array_equal(was, now.array) for was, now in zip(before, training.engine.tensor_slices()))
        assert (state, position) == (training.engine.state(), training.sampler.position())


@pytest.mark.parametrize("wrong", [{"batch": 2.0}, {"layout": 1}, {"recompute": 2}, {"steps": True}])
def test_settings_of_a_wrong_kind(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected "):
        complete(SAID | wrong)


def test_names_of_no_setting_are_refused_unless_they_are_another_versions():
    for name, value in (("batchh", 3), ("Batch", None)):
        with pytest.raises(ValueError, match=f"settings: expected names of fields, such as 'batch', found '{name}'"):
            complete({name: value})
    assert complete({"batch": 3}, previous={"batchh": 5, "seed": 7}) == complete({"batch": 3, "seed": 7})


def test_mixtures_have_the_values_of_the_dense_family():
    dense, sparse = (complete({"data": "pydoc", "model": model}) for model in ("gpt", "gpt-moe"))
    assert sparse == replace(dense, model="gpt-moe:mini")
    assert (sparse.rate, sparse.warm_up, sparse.clip) == (2e-3, 100, 1.0)

"""A checkpoint knows no layout: it is written by all ranks, read by any, and refused by all at once."""

import numpy as np
import pytest

pytest.importorskip("safetensors")

from parallel import AdamW, Engine, nn
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError, all_in, latest, tensors_in
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

SAID = {"data": "teacher_classes", "model": "mlp:tiny", "batch": 24, "micro_batch": 5, "dropout": 0.1, "steps": 6}


def trained(comm, steps=3, resume=None, into=None, **more):
    """Train up to `steps`, save into `into`, and give the losses."""
    with Training(complete(SAID | more), comm) as training:
        if resume is not None:
            training.resume(Checkpoint(comm, resume))
        losses = []
        for record in training.run(lambda: training.done + 1 >= steps) if steps > training.done else ():
            losses.append(record.report.loss)
        if into is not None:
            training.save(into)
    return losses


def same(one, other):
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=True))
    return len(pairs) > 5 and all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("read", ["dp", "zero1", "zero3"])
@pytest.mark.parametrize("written", LAYOUTS)
def test_from_any_layout_to_any_on_fewer_ranks(world, comm, folder, written, read):
    trained(comm, layout=written, into=folder / "a")
    path = latest(comm, folder / "a")
    assert path.name == "step-000000003"
    half = comm.Split(world.Get_rank() % 2, 0)
    again = folder / f"b{world.Get_rank() % 2}"
    trained(half, 0, path, again, layout=read)
    assert same(path, all_in(again)[0])
    half.Free()


@pytest.mark.parametrize("layout", ["dp", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_goes_on_is_what_would_have_been(comm, folder, layout, precision):
    said = {"layout": layout, "precision": precision}
    whole = trained(comm, 6, into=folder / "whole", **said)
    first = trained(comm, 2, into=folder / "parts", **said)
    rest = trained(comm, 6, latest(comm, folder / "parts"), folder / "parts", **said)
    assert len(first) == 2 and first + rest == whole
    assert same(all_in(folder / "parts")[-1], all_in(folder / "whole")[-1])


def host_only(comm, style):
    if style == "hogwild" and comm.nodes is not None:
        pytest.skip("ranks share no memory")


@pytest.mark.parametrize("style", ["local", "group", "sgp"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_replicas_go_on_with_is_what_would_have_been(comm, folder, style, precision):
    """A checkpoint is a meeting of all: whoever goes on from it is where those are who never stopped."""
    said = {"layout": style, "precision": precision}
    whole = []
    with Training(complete(SAID | said), comm) as training:
        for record in training.run():
            whole.append(record.report.loss)
            if training.done in (2, 6):
                training.save(folder / "whole")
    with Training(complete(SAID | said), comm) as training:
        training.resume(Checkpoint(comm, all_in(folder / "whole")[0]))
        rest = [record.report.loss for record in training.run()]
        training.save(folder / "parts")
    np.testing.assert_array_equal(rest, whole[2:])
    assert same(all_in(folder / "parts")[-1], all_in(folder / "whole")[-1])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("style", ["local", "group", "sgp", "hogwild"])
def test_from_replicas_to_layouts_and_back(comm, folder, style):
    """On any number of ranks: what one of them saves, the other has."""
    host_only(comm, style)
    trained(comm, 2, layout="zero2", into=folder / "a")
    trained(comm, 4, latest(comm, folder / "a"), folder / "b", layout=style)
    trained(comm, 4, latest(comm, folder / "b"), folder / "c", layout="zero3")
    assert same(latest(comm, folder / "b"), latest(comm, folder / "c"))
    trained(comm, 6, latest(comm, folder / "b"), folder / "d", layout="dp")
    assert latest(comm, folder / "d").name == "step-000000006"


def test_files_are_shared_out(world, comm, folder):
    trained(comm, 1, into=folder)
    names = [path.name for path in latest(comm, folder).glob("model-*.safetensors")]
    tensors = 4  # of the model: two matrices, two biases
    assert len(names) == min(world.Get_size(), tensors)


def test_damage_is_told_on_all_ranks_and_nothing_has_changed(world, comm, folder):
    trained(comm, 1, into=folder)
    path = latest(comm, folder)
    world.Barrier()
    if world.Get_rank() == 0:
        file = sorted(path.glob("optimizer-*.safetensors"))[-1]
        file.write_bytes(file.read_bytes()[:-10])
    world.Barrier()
    with pytest.raises(CheckpointError, match=r"has .* bytes instead of"):
        Checkpoint(comm, path)


def test_another_model_is_told_on_all_ranks_and_nothing_has_changed(comm, folder):
    trained(comm, 1, into=folder)
    with Training(complete(SAID | {"model": "mlp:small", "layout": "zero1"}), comm) as training:
        before = [piece.array.copy() for piece in training.engine.tensor_slices()]
        with pytest.raises(CheckpointError, match="is of another model or optimiser"):
            training.resume(Checkpoint(comm, latest(comm, folder)))
        after = [piece.array for piece in training.engine.tensor_slices()]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_rank_that_cannot_write_fails_all(world, comm, folder, monkeypatch):
    trained(comm, 1, into=folder)
    with Training(complete(SAID), comm) as training:
        training.resume(Checkpoint(comm, latest(comm, folder)))
        fail_on_last(world, monkeypatch)
        training.engine.steps = 7
        if world.Get_size() <= 4:  # there is a tensor for each rank
            with pytest.raises(CheckpointError, match=r"step-000000007 was not written: .*No space left"):
                training.save(folder)
    assert [path.name for path in all_in(folder)] == ["step-000000001"]


def fail_on_last(world, monkeypatch):
    """Let the last rank find no space for its files."""
    if world.Get_rank() == world.Get_size() - 1:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("parallel.checkpoint.checkpoint_files.SafetensorsWriter", full)


def engine(comm, layout="dp"):
    return Engine(nn.mlp([4, 6, 3]), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.1), layout=layout, micro_batch=1)


def steps_of(engine, count, scale=1.0):
    x = scale * np.random.default_rng(0).standard_normal((6, 4))
    for _ in range(count):
        engine.step(x, np.arange(6) % 3)


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_a_longer_older_run_is_not_mixed_with_a_new_one(world, comm, folder):
    """Refused on all ranks before anything is written; or replaced, and `load` takes the new run."""
    with engine(comm) as old:
        for _ in range(5):
            steps_of(old, 1)
            old.save(folder)
    with engine(comm, "zero1") as new:
        steps_of(new, 1)
        with pytest.raises(CheckpointError, match=r"of another run, step-000000005 and 2 more.* overwrite=True"):
            new.save(folder)
        assert [path.name for path in all_in(folder)] == [f"step-00000000{step}" for step in (3, 4, 5)]
        world.Barrier()
        assert new.save(folder, overwrite=True) == folder / "step-000000001"
        weights = new.state_dict()
        steps_of(new, 1)
        new.save(folder)
        assert [path.name for path in all_in(folder)] == ["step-000000001", "step-000000002"]
        world.Barrier()
    with engine(comm) as resumed:
        resumed.load(folder / "step-000000001")
        assert equal(resumed.state_dict(), weights)


def test_twice_at_one_step_and_after_a_rollback(comm, folder):
    with engine(comm) as one:
        steps_of(one, 1)
        one.save(folder, first=True)
        one.save(folder, first=False)
        assert one.load(folder) == {"first": False}
        steps_of(one, 3)
        one.save(folder, branch=0)
        one.load(folder / "step-000000001")
        steps_of(one, 2, scale=2.0)
        one.save(folder, branch=1)
        weights = one.state_dict()
    with engine(comm, "zero2") as other:  # another process goes on with the run
        assert other.load(folder) == {"branch": 1} and other.steps == 3
        assert equal(other.state_dict(), weights)
        steps_of(other, 1)
        other.save(folder, keep=1)
    assert [path.name for path in all_in(folder)] == ["step-000000004"]


def test_facts_that_are_too_deep(comm, folder):
    deep = []
    for _ in range(500):
        deep = [deep]
    with engine(comm) as one, pytest.raises(ValueError, match="deep: expected a value for JSON"):
        one.save(folder, deep=deep)


@pytest.mark.parametrize("layout", ["dp-naive", "dp", "zero1"])
def test_drawn_or_dealt_and_taken_up_again_the_digits_are_the_same(comm, folder, layout):
    """Reproducible: who had which micro-batch is nowhere to be seen, also not after a restart."""
    said = {"reproducible": True, "layout": layout}
    dealt = trained(comm, steps=6, into=folder / "dealt", **said)
    drawn = trained(comm, steps=3, into=folder / "drawn", pool=True, **said)
    drawn += trained(comm, 6, latest(comm, folder / "drawn"), folder / "again", pool=True, **said)
    assert drawn == dealt
    assert same(latest(comm, folder / "dealt"), latest(comm, folder / "again"))

"""The test of a model in parts, so that its progress can be shown, comes to what it comes to at once."""

from dataclasses import replace

import pytest

from parallel.runtime.consistency_check import StepFailed
from parallel.trainer import trainer
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

layouts = pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b", "ps", "local"])


def fitting(comm, layout):
    """A small training; skipped on numbers of ranks that the layout has not."""
    if layout == "ps" and comm.size < 2:
        pytest.skip("a server and a worker")
    if layout.startswith("pp") and comm.size > 2:
        pytest.skip("a small model has two parts")
    said = {"data": "teacher_classes", "model": "mlp:tiny", "layout": layout, "batch": 24, "micro_batch": 5, "steps": 2}
    return Training(complete(said), comm)


class Unreadable:
    """A data set with a sample that is damaged."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def take(self, indices):
        if 5 in indices:
            raise OSError("sample 5 cannot be read")
        return self.data.take(indices)


@layouts
def test_a_sample_that_one_rank_cannot_read(comm, layout):
    with fitting(comm, layout) as made:
        task = made.task
        made.task = replace(task, test=Unreadable(task.test))
        with pytest.raises(StepFailed, match="sample 5 cannot be read"):
            made.score(100)
        made.task = task
        assert made.score(100).loss > 0


@pytest.mark.parametrize("limit", ["PARTS_PER_EVALUATION", "BYTES_PER_EVALUATION"])
@layouts
def test_in_parts_as_at_once(comm, layout, limit, monkeypatch):
    at_once, in_parts = [], []
    with fitting(comm, layout) as made:
        for _ in made.run():
            pass
        whole = made.score(100, tell=lambda done, count: at_once.append((done, count)))
        monkeypatch.setattr(trainer, limit, 1)
        parts = made.score(100, tell=lambda done, count: in_parts.append((done, count)))
    assert whole.loss == pytest.approx(parts.loss, rel=1e-6) and whole.accuracy == pytest.approx(parts.accuracy)
    assert at_once[-1] == in_parts[-1] == (100, 100) and in_parts == sorted(in_parts)
    assert len(in_parts) > len(at_once)

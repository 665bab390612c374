"""The test of a model in parts, so that its progress can be shown, comes to what it comes to at once."""

import pytest

from parallel.engine.settings import complete
from parallel.trainer import trainer
from parallel.trainer.trainer import Training


@pytest.mark.parametrize("limit", ["PARTS_PER_EVALUATION", "BYTES_PER_EVALUATION"])
@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b", "ps", "local"])
def test_in_parts_as_at_once(comm, layout, limit, monkeypatch):
    if layout == "ps" and comm.size < 2:
        pytest.skip("a server and a worker")
    if layout.startswith("pp") and comm.size > 2:
        pytest.skip("a small model has two parts")
    said = {"data": "teacher_classes", "model": "mlp:tiny", "layout": layout, "batch": 24, "micro_batch": 5, "steps": 2}
    at_once, in_parts = [], []
    with Training(complete(said), comm) as made:
        for _ in made.run():
            pass
        whole = made.score(100, tell=lambda done, count: at_once.append((done, count)))
        monkeypatch.setattr(trainer, limit, 1)
        parts = made.score(100, tell=lambda done, count: in_parts.append((done, count)))
    assert whole.loss == pytest.approx(parts.loss, rel=1e-6) and whole.accuracy == pytest.approx(parts.accuracy)
    assert at_once[-1] == in_parts[-1] == (100, 100) and in_parts == sorted(in_parts)
    assert len(in_parts) > len(at_once)

"""What a training makes of its settings."""

import numpy as np
import pytest

from parallel.settings import complete
from parallel.training import prepare


@pytest.mark.parametrize("model, inputs", [("mlp:tiny", (8, 8)), ("convnet:tiny", (1, 8, 8))])
def test_images_of_bytes_are_taken_as_floats(tmp_path, model, inputs):
    images = np.arange(20 * 64, dtype=np.uint16).reshape(20, 8, 8).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(20) % 2)
    task, *_ = prepare(complete({"data": str(tmp_path / "images.npz"), "model": model}), 1)
    for part in (task.train, task.test):
        assert part.x.dtype == np.float32 and part.x.shape[1:] == inputs == task.inputs
    assert task.train.x.max() > 200


def test_bytes_stay_integers():
    task, *_ = prepare(complete({"data": "copy", "length": 8}), 1)
    assert task.train.take(np.arange(2))[0].dtype == np.int64

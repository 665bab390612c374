"""The programs that use a trained model: `chorus generate` and `chorus predict`, from checkpoints of any layout."""

import numpy as np
import pytest

pytest.importorskip("safetensors")

from mpi4py import MPI
from support.program_runs import call

from collectives import Communicator
from parallel import AdamW, Engine, nn
from parallel.cli import generate, predict
from parallel.ptq import load_model
from parallel.ptq.load_model import model_alone
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

SELF = Communicator(MPI.COMM_SELF)
SMALL = {"steps": 2, "batch": 4}
TASKS = {
    "text": {"data": "TEXT", "model": "gpt:tiny", "length": 16, **SMALL},
    "mixture": {"data": "TEXT", "model": "gpt-moe:tiny", "experts": "4", "length": 16, **SMALL},
    "zero3": {"data": "TEXT", "model": "gpt:tiny", "length": 16, "layout": "zero3", **SMALL},
    "classes": {"data": "teacher_classes", "model": "mlp:tiny", **SMALL},
    "values": {"data": "teacher", "model": "mlp:tiny", "layout": "pp:1f1b", "microbatches": 2, **SMALL},
    "pruned": {"data": "teacher", "model": "mlp:tiny", "prune": 0.5, **SMALL},
    "images": {"data": "IMAGES", "model": "convnet:tiny", **SMALL},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoint, and trained model's scores of inputs, of each task; the data are not there any more."""
    made, root = {}, tmp_path_factory.mktemp("data")
    (root / "text.txt").write_bytes("Frost färbt die Blätter. ".encode() * 40)
    random = np.random.default_rng(0)
    np.savez(root / "images.npz", x=random.random((40, 8, 8), np.float32), y=np.arange(40) % 4)
    for name, said in TASKS.items():
        data = {"TEXT": str(root / "text.txt"), "IMAGES": str(root / "images.npz")}.get(said["data"], said["data"])
        made[name] = tmp_path_factory.mktemp(name)
        with Training(complete(said | {"data": data}), SELF) as training:
            list(training.run())
            training.save(made[name])
    for file in root.iterdir():
        file.unlink()
    return made


@pytest.mark.parametrize("name", ["text", "mixture", "zero3"])
def test_text_is_written(folders, name):
    """The prompt, and whole characters of the tokens that the model draws by this seed."""
    options = ["--checkpoint", folders[name], "--prompt", "Äh ", "--length", 50, "--seed", 3, "--top-k", 30]
    ended = call(generate.main, *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    tokens = nn.generate(
        model_alone(SELF, folders[name])[1], list("Äh ".encode()), 50, temperature=0.8, top_k=30, seed=3
    )
    assert ended.stdout == "Äh " + bytes(tokens).decode(errors="replace") + "\n"
    assert call(generate.main, *options[:-3], 4, *options[-2:]).stdout != ended.stdout


def test_text_of_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    text, file = "Frost färbt die Blätter rot und gelb. " * 40, tmp_path / "t.json"
    (tmp_path / "text").mkdir()
    for number in range(2):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    made.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False))
    made.save(str(file))
    said = {"data": str(tmp_path / "text"), "tokenizer": str(file), "model": "gpt:tiny", "length": 8, **SMALL}
    with Training(complete(said), SELF) as training:
        assert (training.task.kind, training.task.outputs) == ("tokens", made.get_vocab_size())
        assert made.decode(training.task.train.text[:40].tolist()) in f" {text}"
        list(training.run())
        training.save(tmp_path / "saved")
    ended = call(generate.main, "--checkpoint", tmp_path / "saved", "--prompt", "Frost", "--length", 20)
    assert ended.returncode == 0, ended.stderr
    tokens = [*nn.generate(model_alone(SELF, tmp_path / "saved")[1], made.encode("Frost").ids, 20, temperature=0.8)]
    assert ended.stdout == "Frost" + made.decode(tokens, skip_special_tokens=False) + "\n"


INPUTS = {
    "text": np.arange(80).reshape(5, 16) % 256,
    "classes": np.linspace(-1, 1, 70 * 32).reshape(70, 32),
    "values": np.linspace(-1, 1, 7 * 32).reshape(7, 32),
    "pruned": np.linspace(-1, 1, 7 * 32).reshape(7, 32),
    "images": np.linspace(0, 1, 9 * 64).reshape(9, 8, 8),
}


@pytest.mark.parametrize("name", INPUTS)
def test_scores_are_written(folders, tmp_path, name):
    np.save(tmp_path / "x.npy", INPUTS[name])
    files = ["--data", tmp_path / "x.npy", "--output", tmp_path / "new" / "y"]
    ended = call(predict.main, "--checkpoint", folders[name], *files)
    assert ended.returncode == 0, ended.stderr
    x = INPUTS[name][:, None] if name == "images" else INPUTS[name]
    found, expected = np.load(tmp_path / "new" / "y"), model_alone(SELF, folders[name])[1](x)
    assert found.dtype == np.float32 and found.shape == expected.shape and len(found) == len(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_pruned_weights_are_zero(folders):
    model = model_alone(SELF, folders["pruned"])[1]
    assert np.mean(model.parameters()[0].data == 0) >= 0.4


def test_checkpoints_of_earlier_releases(folders, monkeypatch):
    """Which do not name the shape of the model: the data do."""
    opened, (_, expected) = load_model._opened, model_alone(SELF, folders["classes"])

    def without_task(comm, path):
        found = opened(comm, path)
        del found.facts["task"]
        return found

    monkeypatch.setattr(load_model, "_opened", without_task)
    _, model = model_alone(SELF, folders["classes"])
    assert (model(INPUTS["classes"]) == expected(INPUTS["classes"])).all()
    with pytest.raises(ValueError, match="neither a file nor one of"):
        model_alone(SELF, folders["text"])


def test_checkpoint_of_an_engine(tmp_path):
    """Whose model only its program knows."""
    with Engine(nn.mlp([4, 3]), nn.SoftmaxCrossEntropy(), SELF, AdamW(lr=0.1)) as engine:
        engine.save(tmp_path)
    ended = call(predict.main, "--checkpoint", tmp_path, "--data", "x.npy", "--output", "y.npy")
    assert ended.returncode == 2 and "is not of chorus train: the program that wrote it has its model" in ended.stderr


@pytest.mark.parametrize(
    ("program", "name", "options", "text"),
    [
        (generate, "classes", (), "expected a model gpt or gpt-moe, found mlp:tiny"),
        (generate, "text", ("--prompt", ""), "prompt: expected at least one token, found none"),
        (generate, "text", ("--temperature", "-1"), "argument --temperature: expected a number from 0 on"),
        (generate, None, (), "expected a folder with checkpoints of chorus train"),
        (predict, "classes", ("--data", "none.npy", "--output", "y.npy"), "none.npy"),
        (predict, "classes", ("--data", "x.npy", "--output", "."), "--output: . is no plain file"),
        (predict, "text", ("--data", "x.npy", "--output", "y.npy"), "x.npy does not fit gpt:tiny"),
        (predict, "classes", ("--data", "x.npz", "--output", "y.npy"), "x.npz: not a plain array"),
        (
            predict,
            "classes",
            ("--data", "0.npy", "--output", "y.npy"),
            "0.npy: expected numbers with an axis of samples",
        ),
        (predict, "classes", ("--data", "x.txt", "--output", "y.npy"), "x.txt: not a plain array"),
    ],
)
def test_mistakes(folders, tmp_path, monkeypatch, program, name, options, text):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((3, 32), np.float32))
    np.save("0.npy", np.float32(0))
    np.savez("x.npz", x=np.zeros(3))
    (tmp_path / "x.txt").write_text("no array")
    ended = call(program.main, "--checkpoint", folders[name] if name else tmp_path, *options)
    assert ended.returncode == 2 and text in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr

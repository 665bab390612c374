"""Tiny models with data and losses, and the same models as functions of tensors in PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from parallel import nn
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.models import convnet, mlp, transformer
from parallel.nn.router import RouterSettings

WORDS, LENGTH, LAYERS, HEADS, WIDTH = 13, 8, 2, 4, 8
WIDTHS = [6, 8, 8, 8, 5]


@dataclass(frozen=True)
class Task:
    """Model, loss and data of a short training.

    Attributes
    ----------
    name, model, loss : name, and functions that make a new model and loss
    data : function (random generator, samples) -> (inputs, targets)
    twin : function (torch, parameters by name, inputs) -> scores, of the same model in PyTorch, or None
    """

    name: str
    model: Callable[[], Any]
    data: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    loss: Callable[[], Any] = SoftmaxCrossEntropy
    twin: Callable[..., Any] | None = None

    @cached_property
    def is_text(self) -> bool:
        """True for sequences of tokens."""
        return self.batch(0, 1)[0].dtype.kind == "i"

    @cached_property
    def has_cuts(self) -> bool:
        """True if the model has a table of the operators to cut."""
        return bool(self.model().cuts)

    @cached_property
    def units(self) -> int:
        """Number of units that pipelines can divide."""
        return len(self.model().items)

    @property
    def has_experts(self) -> bool:
        return self.name.startswith("mixture")

    def batch(self, step: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a step, the same wherever they are made."""
        return self.data(np.random.default_rng([step, 7]), samples)


def tokens(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences, and targets of which some do not count, unevenly among samples and positions."""
    x, y = random.integers(0, WORDS, (2, samples, LENGTH))
    y[random.random((samples, LENGTH)) < np.linspace(0.4, 0, samples)[:, None]] = -1
    return x, y


def full_tokens(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences, and targets that all count."""
    x, y = random.integers(0, WORDS, (2, samples, LENGTH))
    return x, y


def vectors(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and their classes."""
    return random.normal(size=(samples, WIDTHS[0])), random.integers(0, WIDTHS[-1], samples)


def gpt_in_torch(torch: Any, values: dict[str, Any], x: np.ndarray) -> Any:
    """Scores of `GPT` in PyTorch, from parameters by name."""
    functional = torch.nn.functional

    def norm(at: str, h: Any) -> Any:
        return functional.layer_norm(h, (WIDTH,), values[f"{at}.gain"], values[f"{at}.bias"])

    def linear(at: str, h: Any) -> Any:
        return h @ values[f"{at}.weight"] + values[f"{at}.bias"]

    h = values["0.0.weight"][torch.tensor(x)] + values["0.1.weight"][: x.shape[1]]
    for layer in range(1, LAYERS + 1):
        q, k, v = linear(f"{layer}.0.inner.1", norm(f"{layer}.0.inner.0", h)).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + linear(f"{layer}.0.inner.3", mixed)
        inner = functional.gelu(linear(f"{layer}.1.inner.1", norm(f"{layer}.1.inner.0", h)), approximate="none")
        h = h + linear(f"{layer}.1.inner.3", inner)
    return norm(f"{LAYERS + 1}.0", h) @ values["0.0.weight"].T


def mlp_in_torch(torch: Any, values: dict[str, Any], x: np.ndarray) -> Any:
    """Scores of `MLP` in PyTorch, from parameters by name."""
    h = torch.tensor(x)
    for number in range(len(WIDTHS) - 1):
        at = f"{number}.{int(number == 0)}"
        h = h @ values[f"{at}.weight"] + values[f"{at}.bias"]
        h = h if number == len(WIDTHS) - 2 else torch.relu(h)
    return h


def gpt(**options: Any) -> Callable[[], Any]:
    """Maker of a small transformer with these options."""
    return lambda: transformer(WORDS, LENGTH, LAYERS, HEADS, WIDTH, **options)


def mixture(experts: int = 4, every: int = 1, shared: bool = False, **router: Any) -> Callable[[], Any]:
    """Maker of a small transformer with mixtures of experts, with these settings of the routers."""

    def model() -> Any:
        settings = RouterSettings(**{"choices": 2, "balance_loss": 0.1} | router)
        layers = ExpertLayers(experts, settings, every, shared)
        return transformer(WORDS, LENGTH, LAYERS, HEADS, WIDTH, experts=layers)

    return model


GPT = Task("gpt", gpt(), tokens, twin=gpt_in_torch)
MLP = Task("mlp", lambda: mlp(WIDTHS), vectors, twin=mlp_in_torch)
MIXTURE = Task("mixture", mixture(), full_tokens)


def values(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and real targets."""
    return random.normal(size=(samples, WIDTHS[0])), random.normal(size=(samples, WIDTHS[-1]))


def images(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of two channels and their classes."""
    return random.normal(size=(samples, 2, 8, 8)), random.integers(0, 5, samples)


def shared_dropout() -> Any:
    """Multilayer perceptron with one Dropout object at three places."""
    drop = nn.Dropout(0.4)
    first = nn.Sequential([nn.Linear(6, 8), nn.ReLU(), drop])
    return nn.Sequential([first, nn.Sequential([nn.Linear(8, 8), nn.ReLU(), drop]), drop, nn.Linear(8, 5)])


def pooled() -> Any:
    """Convolutions of several forms, pooling, normalisation, gates."""
    convolutions = [
        nn.Conv2d(2, 4, (3, 3), stride=2, padding=1, bias=False),
        nn.MaxPool2d(2, 1),
        nn.GELU(),
        nn.AvgPool2d(2, 1),
    ]
    head = [nn.Flatten(), nn.RMSNorm(16, eps=1e-4), nn.Linear(16, 12, bias=False), nn.SwiGLU(6), nn.LayerNorm(6, 1e-4)]
    return nn.Sequential([nn.Sequential(convolutions), nn.Sequential(head), nn.SiLU(), nn.Linear(6, 5)])


def frozen_gain() -> Any:
    """Perceptron with a factor that is frozen from its construction."""
    return nn.Sequential(
        [nn.Linear(6, 8), Scale(8), nn.GELU(tanh=True), nn.Linear(8, 5)], cuts={"0": "column", "3": "row"}
    )


class Scale(nn.Operator):
    """Features times factors that are not trained."""

    def __init__(self, features: int):
        self.factors = nn.Parameter((features,), nn.constant(1.5), decay=True, requires_grad=False)

    def forward(self, x: Any, run: Any) -> tuple[Any, Any]:
        return x * self.factors.data, x

    def backward(self, dy: Any, saved: Any, grads: Any) -> Any:
        grads(self.factors, lambda out: (dy * saved).sum(axis=0, out=out))
        return dy * self.factors.data


CONVOLUTIONS = (
    Task("convnet", lambda: convnet((2, 8, 8), 5, (3, 4)), images),
    Task("convnet dropout", lambda: convnet((2, 8, 8), 5, (3, 4), dropout=0.3, recompute=True), images),
    Task("pooled", pooled, images),
)
BUILT = (
    Task("mlp built", lambda: nn.build("mlp:tiny", (6,), 5, dropout=0.1, recompute=True), vectors),
    Task("gpt built", lambda: nn.build("gpt:tiny", (8,), WORDS, depths="0.5"), tokens),
    Task("mixture built", lambda: nn.build("gpt-moe:tiny", (8,), WORDS, experts="4,k=2"), full_tokens),
)
FROZEN_GAIN = Task("scaled", frozen_gain, vectors)
REGRESSION = Task("mlp regression", lambda: mlp(WIDTHS), values, MSE)


def normed(sync: bool = False) -> Callable[[], Any]:
    """Maker of a multilayer perceptron with batch normalisation, or with that of all replicas."""
    return lambda: nn.Sequential(
        [nn.Linear(6, 8), nn.BatchNorm(8, eps=1e-3, momentum=0.3, sync=sync), nn.ReLU(), nn.Linear(8, 5)],
        cuts={"0": "column", "3": "row"},
    )


def normed_images() -> Any:
    unit = nn.Sequential([nn.Conv2d(2, 3, 3), nn.BatchNorm(3), nn.ReLU()])
    return nn.Sequential([unit, nn.Recompute(nn.BatchNorm(3)), nn.Sequential([nn.Flatten(), nn.Linear(108, 5)])])


NORMED = (Task("mlp normed", normed(), vectors), Task("convnet normed", normed_images, images))
SYNCHRONISED = Task("mlp synchronised", normed(sync=True), vectors)
CLASS_WEIGHTS = [0.3, 0.5, 0.2, 1.7, 0.1]
WEIGHTED = Task("mlp weighted", lambda: mlp(WIDTHS), vectors, lambda: SoftmaxCrossEntropy(class_weights=CLASS_WEIGHTS))


def soft(classes: int, data: Callable[..., Any] = vectors) -> Callable[..., Any]:
    """Data with distributions in the place of classes."""

    def made(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = data(random, samples)
        return x, random.dirichlet(np.ones(classes), y.shape)

    return made


def weighted(data: Callable[..., Any], of_samples: bool = False) -> Callable[..., Any]:
    """Data with a weight for each target, some of them 0, or for each sample."""

    def made(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = data(random, samples)
        shape = y.shape[: 1 if of_samples or y.dtype.kind == "f" else y.ndim]
        return x, nn.with_weights(y, random.uniform(0.1, 2, shape) * (random.random(shape) < 0.8))

    return made


def shares(random: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and targets from 0 to 1."""
    return random.normal(size=(samples, WIDTHS[0])), random.random((samples, WIDTHS[-1]))


LOSS_TASKS = (
    Task("mlp l1", lambda: mlp(WIDTHS), values, nn.L1),
    Task("mlp l1 weighted", lambda: mlp(WIDTHS), weighted(values), lambda: nn.L1(weighted=True)),
    Task("mlp huber", lambda: mlp(WIDTHS), values, lambda: nn.Huber(0.7)),
    Task("mlp huber weighted", lambda: mlp(WIDTHS), weighted(values), lambda: nn.Huber(0.7, weighted=True)),
    Task("mlp mse weighted", lambda: mlp(WIDTHS), weighted(values), lambda: MSE(weighted=True)),
    Task("mlp bce", lambda: mlp(WIDTHS), shares, lambda: nn.BCEWithLogits(pos_weights=CLASS_WEIGHTS)),
    Task("mlp bce weighted", lambda: mlp(WIDTHS), weighted(shares), lambda: nn.BCEWithLogits(weighted=True)),
    Task("mlp soft", lambda: mlp(WIDTHS), soft(5), lambda: SoftmaxCrossEntropy(0.1, class_weights=CLASS_WEIGHTS)),
    Task("mlp soft weighted", lambda: mlp(WIDTHS), weighted(soft(5)), lambda: SoftmaxCrossEntropy(weighted=True)),
    Task("mlp rows weighted", lambda: mlp(WIDTHS), weighted(vectors), lambda: SoftmaxCrossEntropy(0.2, weighted=True)),
)
TEXT_LOSS_TASKS = (
    Task("gpt soft", gpt(), soft(WORDS, tokens), SoftmaxCrossEntropy),
    Task("gpt weighted", gpt(), weighted(tokens), lambda: SoftmaxCrossEntropy(0.1, weighted=True)),
    Task("gpt samples weighted", gpt(), weighted(tokens, True), lambda: SoftmaxCrossEntropy(weighted=True)),
    Task("gpt classes", gpt(), tokens, lambda: SoftmaxCrossEntropy(class_weights=np.linspace(0, 2, WORDS))),
)
SHARED_DROPOUT = Task("mlp shared dropout", shared_dropout, vectors)
GATED_TASKS = (
    Task("gated", lambda: nn.gated_transformer(WORDS, LENGTH, LAYERS, HEADS, WIDTH, kv_heads=2, dropout=0.2), tokens),
    Task("gated full", lambda: nn.gated_transformer(WORDS, LENGTH, LAYERS, HEADS, WIDTH, recompute="full"), tokens),
)
LLAMA = Task(
    "llama",
    lambda: nn.gated_transformer(
        WORDS,
        LENGTH,
        LAYERS,
        HEADS,
        WIDTH,
        kv_heads=2,
        dropout=0.2,
        llama=nn.LlamaOptions(50.0, 10, tied=True, eps=1e-4),
    ),
    tokens,
)

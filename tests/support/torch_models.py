"""Small networks of torch.nn as lists of blocks, and their training by PyTorch alone."""

import numpy as np
import torch
from torch import nn

CLASSES, SAMPLES, MICRO, STEPS = 5, 12, 3, 20


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a skip connection."""

    def __init__(self, channels):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        y = torch.relu(self.norms[0](self.convs[0](x)))
        return torch.relu(x + self.norms[1](self.convs[1](y)))


class Recurrent(nn.Module):
    """LSTM that passes on its outputs, and the last hidden state beside them."""

    def __init__(self, inputs, width):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)

    def forward(self, x, hidden=None):
        y, (hidden, _) = self.lstm(x if hidden is None else x + hidden[:, None])
        return y, hidden[0]


class Joined(nn.Module):
    """Linear layer over outputs and hidden state."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, hidden):
        return self.linear(torch.cat([x.flatten(1), hidden], 1))


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, **{"dropout": 0.0, "batch_first": True, **options})


def resnet():
    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    return [first, ResidualBlock(4), ResidualBlock(4), last]


def encoder():
    return [nn.Linear(6, 8), encoder_layer(), encoder_layer(norm_first=True), head()]


def dropout():
    return [nn.Linear(6, 8), encoder_layer(dropout=0.3), encoder_layer(dropout=0.3), head()]


def head():
    return nn.Sequential(nn.Flatten(), nn.Linear(8 * 7, CLASSES))


def lstm():
    return [Recurrent(6, 8), Recurrent(8, 8), Recurrent(8, 8), Joined(8 * 7 + 8, CLASSES)]


NETWORKS = {"resnet": resnet, "encoder": encoder, "lstm": lstm}
SHAPES = {"resnet": (1, 8, 8)}


def blocks(make, dtype="float32"):
    torch.manual_seed(1)
    return [block.to(getattr(torch, dtype)) for block in make()]


def batch(name, dtype="float32"):
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, *SHAPES.get(name, (7, 6)))).astype(dtype)
    return x, random.integers(0, CLASSES, SAMPLES)


def through(some, x):
    """Result of blocks one after another, which may be tuples."""
    for block in some:
        x = block(*x) if isinstance(x, tuple) else block(x)
    return x


def trained(some, x, y, steps=STEPS):
    """Losses of the steps of SGD, and of an evaluation, of micro-batches one after another.

    Running statistics are those of the mean of a step's micro-batches, each from the ones at the beginning.
    """
    x, y, net = torch.from_numpy(x), torch.from_numpy(y), nn.ModuleList(some)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        before = [one.clone() for one in net.buffers()]
        after, total = [[] for _ in before], 0.0
        for at in range(0, SAMPLES, MICRO):
            for one, values in zip(net.buffers(), before):
                one.copy_(values)
            loss = nn.functional.cross_entropy(through(some, x[at : at + MICRO]), y[at : at + MICRO], reduction="sum")
            (loss / SAMPLES).backward()
            total += loss.item()
            for values, one in zip(after, net.buffers()):
                values.append(one.double().clone())
        for one, values in zip(net.buffers(), after):
            one.copy_(sum(values) / len(values))
        optimizer.step()
        losses.append(total / SAMPLES)
    net.eval()
    with torch.no_grad():
        return [*losses, nn.functional.cross_entropy(through(some, x), y).item()]

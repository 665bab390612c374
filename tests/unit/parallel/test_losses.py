"""Losses and their weights: equal to PyTorch in float64, values, means and gradients; and what they refuse."""

import numpy as np
import pytest

from parallel import nn
from parallel.nn.gradcheck import check_loss

torch = pytest.importorskip("torch")
F = torch.nn.functional

RANDOM = np.random.default_rng(0)
Y, VALUES, SHARES = RANDOM.normal(0, 2, (6, 5)), RANDOM.normal(0, 2, (6, 5)), RANDOM.random((6, 5))
CLASSES, SOFT = np.array([1, 4, -1, 0, 2, 2]), RANDOM.dirichlet(np.ones(5), 6)
ROWS, OF_CLASSES = RANDOM.uniform(0, 2, 6), [0.3, 0.0, 1.5, 2.0, 0.7]
CLASS_TENSOR, WEIGHT_TENSOR = torch.tensor(CLASSES), torch.tensor(OF_CLASSES, dtype=torch.float64)
WIDE_ROWS = torch.tensor(np.repeat(ROWS[:, None], 5, 1))


def cross_entropy(targets, **options):
    return lambda y: F.cross_entropy(y, torch.tensor(targets), ignore_index=-1, **options)


def rows_of(function):
    """Weighted mean of losses of rows, by the sum of the weights of the rows that count."""

    def mean(y):
        losses, weights = function(y), torch.tensor(np.where(CLASSES < 0, 0, ROWS))
        return (losses * weights).sum() / weights.sum()

    return mean


def elements_of(function, targets):
    """Weighted mean over elements."""
    return lambda y: (function(y, torch.tensor(targets), reduction="none") * WIDE_ROWS).sum() / WIDE_ROWS.sum()


CASES = {
    "mse": (nn.MSE(), VALUES, lambda y: F.mse_loss(y, torch.tensor(VALUES))),
    "mse weighted": (nn.MSE(weighted=True), nn.with_weights(VALUES, ROWS), elements_of(F.mse_loss, VALUES)),
    "mse weighted by torch": (
        nn.MSE(weighted=True),
        nn.with_weights(VALUES, ROWS),
        lambda y: F.mse_loss(y, torch.tensor(VALUES), weight=WIDE_ROWS),
    ),
    "l1": (nn.L1(), VALUES, lambda y: F.l1_loss(y, torch.tensor(VALUES))),
    "l1 weighted": (nn.L1(weighted=True), nn.with_weights(VALUES, ROWS), elements_of(F.l1_loss, VALUES)),
    "huber": (nn.Huber(), VALUES, lambda y: F.huber_loss(y, torch.tensor(VALUES))),
    "huber narrow": (nn.Huber(0.3), VALUES, lambda y: F.huber_loss(y, torch.tensor(VALUES), delta=0.3)),
    "huber weighted": (nn.Huber(weighted=True), nn.with_weights(VALUES, ROWS), elements_of(F.huber_loss, VALUES)),
    "bce": (nn.BCEWithLogits(), SHARES, lambda y: F.binary_cross_entropy_with_logits(y, torch.tensor(SHARES))),
    "bce positive": (
        nn.BCEWithLogits(pos_weights=OF_CLASSES),
        SHARES,
        lambda y: F.binary_cross_entropy_with_logits(y, torch.tensor(SHARES), pos_weight=WEIGHT_TENSOR),
    ),
    "bce weighted": (
        nn.BCEWithLogits(weighted=True),
        nn.with_weights(SHARES, ROWS),
        elements_of(F.binary_cross_entropy_with_logits, SHARES),
    ),
    "classes": (nn.SoftmaxCrossEntropy(), CLASSES, cross_entropy(CLASSES)),
    "class weights": (
        nn.SoftmaxCrossEntropy(class_weights=OF_CLASSES),
        CLASSES,
        cross_entropy(CLASSES, weight=WEIGHT_TENSOR),
    ),
    "class weights smooth": (
        nn.SoftmaxCrossEntropy(0.2, class_weights=OF_CLASSES),
        CLASSES,
        cross_entropy(CLASSES, weight=WEIGHT_TENSOR, label_smoothing=0.2),
    ),
    "soft": (nn.SoftmaxCrossEntropy(), SOFT, cross_entropy(SOFT)),
    "soft smooth with class weights": (
        nn.SoftmaxCrossEntropy(0.2, class_weights=OF_CLASSES),
        SOFT,
        cross_entropy(SOFT, weight=WEIGHT_TENSOR, label_smoothing=0.2),
    ),
    "classes weighted": (
        nn.SoftmaxCrossEntropy(weighted=True),
        nn.with_weights(CLASSES, ROWS),
        rows_of(lambda y: F.cross_entropy(y, CLASS_TENSOR, ignore_index=-1, reduction="none")),
    ),
    "soft weighted": (
        nn.SoftmaxCrossEntropy(weighted=True),
        nn.with_weights(SOFT, np.where(CLASSES < 0, 0, ROWS)),
        rows_of(lambda y: F.cross_entropy(y, torch.tensor(SOFT), reduction="none")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_like_torch(name):
    loss, targets, peer = CASES[name]
    leaf = torch.tensor(Y, requires_grad=True)
    expected = peer(leaf)
    expected.backward()
    total, saved = loss.forward(Y, targets)
    count = loss.count(targets)
    assert total / count == pytest.approx(expected.item(), rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(loss.backward(1 / count, saved), leaf.grad.numpy(), rtol=1e-12, atol=1e-14)
    check_loss(loss, Y, targets)
    assert loss.backward(1.0, loss.forward(Y.astype(np.float32), targets)[1]).dtype == np.float32


def test_large_scores():
    """No overflow, and scores of minus infinity where the target has no probability."""
    y = np.array([[1e4, 0.0, -np.inf], [-1e4, 0.0, -np.inf]])
    loss = nn.SoftmaxCrossEntropy(class_weights=[1, 2, 3])
    total, saved = loss.forward(y, np.array([0, 0]))
    assert total == 1e4
    np.testing.assert_array_equal(loss.backward(1.0, saved), [[0, 0, 0], [-1, 1, 0]])
    wide, saved = nn.BCEWithLogits().forward(np.array([[1e4, -1e4]]), np.array([[0.0, 1.0]]))
    assert wide == 2e4 and nn.BCEWithLogits().backward(1.0, saved).tolist() == [[1, -1]]


def test_numbers_of_correct_predictions():
    classes = np.array([0, 1, 1, -1])
    y = np.eye(3)[[0, 1, 2, 0]]
    assert nn.SoftmaxCrossEntropy().correct(y, classes) == 2
    assert nn.SoftmaxCrossEntropy(class_weights=[3, 1, 1]).correct(y, classes) == 4
    assert nn.SoftmaxCrossEntropy(weighted=True).correct(y, nn.with_weights(classes, [1, 0.5, 2, 2])) == 1.5
    assert nn.SoftmaxCrossEntropy().correct(y, np.eye(3)[[0, 0, 2, 1]]) == 2
    assert nn.BCEWithLogits().correct(np.array([[1.0, -1, 2]]), np.array([[1.0, 1, 0.6]])) == 2
    assert nn.BCEWithLogits(weighted=True).correct(np.array([[1.0, -1]]), np.array([[1.0, 0, 0.5]])) == 1


def test_weights_of_samples_and_of_tokens():
    tokens = np.zeros((2, 3), int)
    assert nn.with_weights(tokens, [1, 2])[..., 1].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert nn.with_weights(tokens, np.eye(2, 3))[..., 1].tolist() == np.eye(2, 3).tolist()
    for wrong in ([1, 2, 3], np.ones((2, 3, 1)), 1.0):
        with pytest.raises(ValueError, match=r"weights: expected those of targets of shape \(2, 3\), found shape"):
            nn.with_weights(tokens, wrong)


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (nn.MSE(weighted=True), nn.with_weights(VALUES, -ROWS), "weights that are finite numbers from 0 on, found -"),
        (nn.MSE(weighted=True), abs(VALUES), r"targets of shape \(6, 5\) and weights"),
        (nn.BCEWithLogits(), VALUES, "targets that are numbers from 0 to 1"),
        (nn.BCEWithLogits(pos_weights=[1, 2]), SHARES, "expected 2 features"),
        (nn.SoftmaxCrossEntropy(), -SOFT, "targets that are finite numbers from 0 on"),
        (nn.SoftmaxCrossEntropy(class_weights=[1, 2]), np.zeros(6, int), "expected scores of 2 classes"),
        (nn.SoftmaxCrossEntropy(weighted=True), nn.with_weights(CLASSES + 1, ROWS), "target 5 is not below 5"),
        (nn.SoftmaxCrossEntropy(weighted=True), np.full((6, 2), 0.5), "classes that are integers"),
        (nn.SoftmaxCrossEntropy(weighted=True), CLASSES, "targets and a weight along the last axis"),
    ],
)
def test_refused_targets(loss, targets, message):
    with pytest.raises(ValueError, match=message):
        loss.forward(Y, targets)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Huber(0),
        lambda: nn.Huber(float("nan")),
        lambda: nn.SoftmaxCrossEntropy(class_weights=[1, -1]),
        lambda: nn.BCEWithLogits(pos_weights=[float("inf")]),
    ],
)
def test_refused_options(make):
    with pytest.raises(ValueError, match=r"(delta|class_weights|pos_weights): expected (a )?finite number"):
        make()


def test_a_class_without_a_weight():
    with pytest.raises(ValueError, match="target 3 is not below 2"):
        nn.SoftmaxCrossEntropy(class_weights=[1, 1]).count(np.array([0, 3]))

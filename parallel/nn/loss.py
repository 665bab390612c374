"""Losses: each returns the sum over a micro-batch; engines divide by the number of targets of all ranks."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import as_matrix, elements, expect, expect_range, is_single
from parallel.nn.operator import ArraySpec, OperatorOutline
from parallel.nn.target_weights import expect_all, split_weights, weights_of
from quant.types import Array


class Loss(Protocol):
    """Interface of losses: sum of losses over a micro-batch, its gradient, number of targets. No parameters.

    A loss may have a method ``outline(y, targets)``, the outline for arrays like these (`ArraySpec`): saved arrays and
    bytes of temporaries, with a scalar `y`. Without it, a forward pass on zeros finds the saved arrays.
    """

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        """Return (sum of losses over the micro-batch, values that `backward` needs)."""

    def backward(self, scale: float, saved: Any) -> Array:
        """Gradient with respect to y of `scale` times the sum of losses."""

    def count(self, targets: Array) -> float:
        """Number of targets that count, by which the sum of losses is divided to get the mean.

        Any real number from 0 on, such as a sum of weights; in a step without targets nothing is updated.
        """


NO_RESULT = ArraySpec((), np.dtype(np.float64))


class SoftmaxCrossEntropy:
    """Cross-entropy loss: sum of -log softmax(scores)[target] over all targets that are not negative.

    Scores have shape (..., classes) and targets, integers, the same without the last axis. Targets of floats and the
    shape of the scores are distributions: the loss is the sum of -target log softmax(scores).

    The mean is over the targets, each counted with its class weight and its own. Distributions count with their own
    weight only, also with class weights, as in PyTorch.

    Parameters
    ----------
    smoothing : float
        From 0 to below 1: probability that is taken from the target and spread over all classes alike (Szegedy et al.,
        "Rethinking the Inception architecture for computer vision", CVPR 2016, section 7).
    class_weights : sequence of float, optional
        Factor of the term of each class, from 0 on.
    weighted : bool
        True for targets with weights (`with_weights`).
    """

    class_weights: tuple[float, ...] | None = None
    weighted = False

    def __init__(self, smoothing: float = 0.0, *, class_weights: Sequence[float] | None = None, weighted: bool = False):
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing: expected 0 to below 1, found {smoothing}")
        self.smoothing, self.weighted = smoothing, weighted
        self.class_weights = weights_of("class_weights", class_weights)

    @property
    def is_plain(self) -> bool:
        """True if all targets count alike."""
        return self.class_weights is None and not self.weighted

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        if self._takes_integers(targets):
            expect(y.shape[:-1] == targets.shape, self, f"targets of shape {y.shape[:-1]}", targets)
            expect_range(self, targets, y.shape[-1], "target")
            loss, log_sum = kernels.softmax_cross_entropy(as_matrix(y), targets.reshape(-1))
            return loss, (y, targets, log_sum)
        rows, wanted = self._distributions(y, targets)
        log_sum = kernels.log_sum_exp(rows)
        terms = kernels.array_namespace(y).where(wanted == 0, 0, log_sum - rows)  # scores may be -inf
        terms *= wanted
        return kernels.number(terms.sum(dtype=np.float64)), (y, targets, log_sum[:, 0])

    def backward(self, scale: float, saved: Any) -> Array:
        y, targets, log_sum = saved
        if self._takes_integers(targets):
            flat = targets.reshape(-1)
            return kernels.softmax_cross_entropy_backward(scale, as_matrix(y), flat, log_sum).reshape(y.shape)
        rows, wanted = self._distributions(y, targets)
        gradient = kernels.array_namespace(y).exp(rows - log_sum[:, None])
        gradient *= wanted.sum(axis=-1)[:, None]
        gradient -= wanted
        gradient *= scale
        return kernels.narrow(gradient, y.dtype).reshape(y.shape)

    def count(self, targets: Array) -> float:
        if self.is_plain and targets.dtype.kind in "iu":
            return int((targets >= 0).sum())
        return float(self._counted(targets)[1].sum(dtype=np.float64))

    def correct(self, y: Array, targets: Array) -> float:
        """Number of correct predictions: targets that count, whose class, the most probable one, has the best score.

        With weights their sum: a weighted accuracy.
        """
        classes, weights = self._counted(targets)
        total = ((y.argmax(axis=-1) == classes) * weights).sum(dtype=np.float64)
        return int(total) if self.is_plain else float(total)

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        wide = kernels.wide(y.dtype)
        log_sum = ArraySpec((elements(y) // max(1, y.shape[-1]),), wide)
        work = (3 if self._takes_integers(targets) else 6) * elements(y) * wide.itemsize
        return OperatorOutline(NO_RESULT, (y, targets, log_sum), 0, work)

    def _takes_integers(self, targets: Any) -> bool:
        """True for targets without weights or smoothing, of integers."""
        return self.is_plain and not self.smoothing and targets.dtype.kind in "iu"

    def _classes(self, wanted: Array) -> Array | None:
        """Classes of targets without weights, or None for distributions."""
        if wanted.dtype.kind in "iu":
            return wanted[..., 0] if self.weighted else wanted
        if not self.weighted or wanted.shape[-1] > 1:
            return None
        classes = wanted[..., 0].astype(np.int64)
        expect(bool((classes == wanted[..., 0]).all()), self, "classes that are integers", wanted)
        return classes

    def _counted(self, targets: Array) -> tuple[Array, Array]:
        """Classes of targets, those of greatest probability of distributions, and the weights with which they count."""
        xp = kernels.array_namespace(targets)
        wanted, weights = split_weights(self, targets)
        classes = self._classes(wanted)
        if classes is None:
            expect(wanted.ndim > 1, self, "targets that are integers, or distributions", targets)
            classes, counted = wanted.argmax(axis=-1), xp.ones(wanted.shape[:-1])
        else:
            counted = classes >= 0
            if self.class_weights is not None:
                expect_range(self, classes, len(self.class_weights), "target")
                counted = counted * xp.asarray(np.array(self.class_weights))[xp.maximum(classes, 0)]
        return classes, counted if weights is None else counted * weights[..., 0]

    def _distributions(self, y: Array, targets: Array) -> tuple[Array, Array]:
        """Scores, and targets as distributions times their weights: matrices, computed wide."""
        xp, rows, size = kernels.array_namespace(y), as_matrix(kernels.widen(y)), y.shape[-1]
        wanted, weights = split_weights(self, targets)
        classes = self._classes(wanted)
        if self.class_weights is not None:
            expect(len(self.class_weights) == size, self, f"scores of {len(self.class_weights)} classes", y)
        if classes is None:
            expect(wanted.shape == y.shape, self, f"targets that are integers, or of shape {y.shape}", wanted)
            expect_all(self, "targets", wanted)
            found = as_matrix(kernels.widen(wanted)) * (1 - self.smoothing) + self.smoothing / size
        else:
            expect(classes.shape == y.shape[:-1], self, f"targets of shape {y.shape[:-1]}", classes)
            expect_range(self, classes, size, "target")
            flat, found = classes.reshape(-1), xp.zeros_like(rows)
            (here,) = xp.nonzero(flat >= 0)
            found[here] = self.smoothing / size
            found[here, flat[here]] += 1 - self.smoothing
        if self.class_weights is not None:
            found = found * xp.asarray(np.array(self.class_weights, rows.dtype))
        return rows, found if weights is None else found * weights.reshape(-1, 1)


class ElementLoss:
    """Base class of losses that are sums over elements of y, which have a target each.

    The mean is over the elements, each counted with its weight.

    Parameters
    ----------
    weighted : bool
        True for targets with weights of rows (`with_weights`).
    """

    def __init__(self, *, weighted: bool = False):
        self.weighted = weighted

    def losses(self, y: Array, targets: Array) -> Array:
        """Loss of each element, of wide arrays."""
        raise NotImplementedError(f"{type(self).__name__} has no losses")

    def slopes(self, y: Array, targets: Array) -> Array:
        """Derivatives of `losses` with respect to y."""
        raise NotImplementedError(f"{type(self).__name__} has no slopes")

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        wanted, weights = self._expected(y, targets)
        terms = self.losses(kernels.widen(y), wanted)
        if weights is not None:
            terms = terms * weights
        return kernels.number(terms.sum(dtype=np.float64)), (y, targets)

    def backward(self, scale: float, saved: Any) -> Array:
        y, targets = saved
        wanted, weights = self._expected(y, targets)
        slopes = self.slopes(kernels.widen(y), wanted)
        return kernels.narrow(slopes * (scale if weights is None else scale * weights), y.dtype)

    def count(self, targets: Array) -> float:
        wanted, weights = split_weights(self, targets)
        if weights is None:
            return int(targets.size)
        return float(weights.sum(dtype=np.float64)) * int(wanted.shape[-1])

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        return OperatorOutline(NO_RESULT, (y, targets), 0, 5 * elements(y) * kernels.wide(y.dtype).itemsize)

    def _expected(self, y: Array, targets: Array) -> tuple[Array, Array | None]:
        """Targets and their weights. ValueError if they do not fit y."""
        wanted, weights = split_weights(self, targets)
        expect(y.shape == wanted.shape, self, f"targets of shape {y.shape}{' and weights' * self.weighted}", wanted)
        return wanted if wanted.dtype.kind in "iu" else kernels.widen(wanted), weights


class MSE(ElementLoss):
    """Squared-error loss: sum of (y - target)^2."""

    def losses(self, y: Array, targets: Array) -> Array:
        difference = y - targets
        return difference * difference

    def slopes(self, y: Array, targets: Array) -> Array:
        return 2 * (y - targets)


class L1(ElementLoss):
    """Absolute-error loss: sum of |y - target|, with the derivative 0 where they are equal."""

    def losses(self, y: Array, targets: Array) -> Array:
        return abs(y - targets)

    def slopes(self, y: Array, targets: Array) -> Array:
        return kernels.array_namespace(y).sign(y - targets)


class Huber(ElementLoss):
    """Huber loss: sum of d^2 / 2 of differences d up to `delta`, and of delta (|d| - delta / 2) of larger ones.

    Huber, "Robust estimation of a location parameter", Annals of Mathematical Statistics 35, 1964.

    Parameters
    ----------
    delta : float
        Above 0.
    """

    def __init__(self, delta: float = 1.0, *, weighted: bool = False):
        super().__init__(weighted=weighted)
        if not is_single(delta) or delta <= 0:
            raise ValueError(f"delta: expected a finite number above 0, found {delta!r}")
        self.delta = delta

    def losses(self, y: Array, targets: Array) -> Array:
        difference = y - targets
        near = difference.clip(-self.delta, self.delta)
        return near * (difference - near / 2)

    def slopes(self, y: Array, targets: Array) -> Array:
        return (y - targets).clip(-self.delta, self.delta)


class BCEWithLogits(ElementLoss):
    """Binary cross entropy: sum of -target log s - (1 - target) log(1 - s) with s = sigmoid(y), targets from 0 to 1.

    Parameters
    ----------
    pos_weights : sequence of float, optional
        Factor of the first term by feature, from 0 on. The mean is over the elements, also with factors, as in PyTorch.
    """

    def __init__(self, *, pos_weights: Sequence[float] | None = None, weighted: bool = False):
        super().__init__(weighted=weighted)
        self.pos_weights = weights_of("pos_weights", pos_weights)

    def losses(self, y: Array, targets: Array) -> Array:
        expect_all(self, "targets", targets, 1.0)
        return (1 - targets) * y + self._factors(y, targets) * kernels.softplus(-y)

    def slopes(self, y: Array, targets: Array) -> Array:
        return (1 - targets) - self._factors(y, targets) * kernels.sigmoid(-y)

    def correct(self, y: Array, targets: Array) -> float:
        """Number of elements, or sum of their weights, with y above 0 where the target is above 1/2, and conversely."""
        wanted, weights = self._expected(y, targets)
        right = (y > 0) == (wanted > 0.5)
        return float((right if weights is None else right * weights).sum(dtype=np.float64))

    def _factors(self, y: Array, targets: Array) -> Array:
        """Factors of softplus(-y) in the loss of each element."""
        if self.pos_weights is None:
            return kernels.array_namespace(y).ones_like(y)
        expect(len(self.pos_weights) == y.shape[-1], self, f"{len(self.pos_weights)} features", y)
        return 1 + (kernels.array_namespace(y).asarray(np.array(self.pos_weights, y.dtype)) - 1) * targets


LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": SoftmaxCrossEntropy,
    "mse": MSE,
    "l1": L1,
    "huber": Huber,
    "bce": BCEWithLogits,
}
"""Losses by name."""

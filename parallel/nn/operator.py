"""What a layer is: parameters, a motion forward, a motion backward, and the outline of both. No tape, no MPI.

An operator's `forward` returns its result and, as a plain value, whatever `backward` will want to have back. So any
number of micro-batches may be under way at once, and to forget what was saved and compute it again is a wrapper of four
lines. `backward` does not store gradients of parameters: it hands each to a *sink*, as a function that computes it, and
the sink decides when and into which memory. All kinds of data parallelism differ in the sink alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np

Array = Any
"""A NumPy or CuPy array."""


class NotAtHand(RuntimeError):
    """A parameter was used while its values were not in this rank's memory, or before it had any."""


@dataclass(eq=False)
class Parameter:
    """A tensor to be learned: shape, first values, and, while they are at hand, its values.

    Parameters
    ----------
    shape : tuple of int
    init : callable (random generator, shape) -> array
        First values. The generator is seeded with the parameter's name, so they depend neither on the layout nor on
        what else the model contains.
    decay : bool
        Whether weight decay applies; by custom not to biases and gains.

    Attributes
    ----------
    name : str
        Given by `name_all`: the path of attributes and numbers from the model to here, such as ``"3.mlp.0.weight"``.
    uses : int
        How often the model's tree holds it, which is how often a backward hands in a gradient for it; 2 for an
        embedding that is tied to the output.
    dtype : dtype
        In which its values are stored, or were when they were last at hand; float32 before they ever were.
    """

    shape: tuple[int, ...]
    init: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    decay: bool = True
    name: str = field(default="", init=False)
    uses: int = field(default=0, init=False)
    dtype: np.dtype = field(default=np.dtype(np.float32), init=False)
    _data: Array = field(default=None, init=False, repr=False)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def data(self) -> Array:
        """The values, an array of `shape`."""
        if self._data is None:
            raise NotAtHand(
                f"parameter {self.name or '(without a name)'} of shape {self.shape}: its values are not at hand; "
                "give the model memory first (materialise), or enter the unit that it belongs to"
            )
        return self._data

    @data.setter
    def data(self, values: Array) -> None:
        if values is not None and values.shape != self.shape:
            raise ValueError(f"parameter {self.name}: expected an array of shape {self.shape}, found {values.shape}")
        self._data = values
        self.dtype = self.dtype if values is None else values.dtype

    def first(self, seed: int) -> np.ndarray:
        """Its first values for a seed: float64, the same wherever and in whatever order they are asked for."""
        values = self.init(np.random.default_rng([seed, crc32(self.name.encode())]), self.shape)
        return np.asarray(values, np.float64).reshape(self.shape)


def normal(deviation: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """First values from a normal distribution around zero."""
    return lambda random, shape: random.normal(0.0, deviation, shape)


def constant(value: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """First values that are all the same."""
    return lambda random, shape: np.full(shape, value)


@dataclass(frozen=True)
class Run:
    """Which pass through the model this is, for the operators that want to know.

    Attributes
    ----------
    training : bool
        Whether dropout drops.
    seed, step : int
        Together with a sample's number and the operator's name they say what a random operator draws, so that it
        does not depend on the rank, the micro-batch or the order in which samples are looked at.
    samples : array of int64, shape (batch,)
        The number of each sample of the micro-batch, in the data set or in the stream.
    """

    training: bool = True
    seed: int = 0
    step: int = 0
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class Sink(Protocol):
    """Where gradients of parameters go.

    `compute` writes the gradient of one micro-batch, from one use of the parameter, into the array that it is given
    (of the parameter's shape; whatever that holds is overwritten). The sink calls it once, now or later.
    """

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None: ...


class Spec(NamedTuple):
    """An array's shape and type, in place of the array. One spec stands for one array: identity counts."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of such an array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Outline(NamedTuple):
    """What a pass through an operator will come to, from shapes alone.

    Attributes
    ----------
    y : Spec
        The result.
    saved : nested tuples of Spec (and whatever is no array)
        What `forward` will save. An input that is kept as it is, is the input's own spec, so that what two operators
        share is counted once.
    flops : int
        Of the forward: multiplications and additions of its matrix products and convolutions.
    work : int
        Bytes of temporaries at the worst moment of the forward or the backward, besides x, y, dx, dy and `saved`: with
        the reference kernels; compiled ones take less.
    """

    y: Spec
    saved: Any
    flops: int = 0
    work: int = 0


class Operator:
    """A layer. Parameters and operators that are attributes of it, or in lists that are, belong to it.

    A subclass has three methods. Arrays come and go in the storage type (float32, float64, or a half type); what wants
    more digits takes them inside.
    """

    name: str = ""

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """(y, saved): the result, and what `backward` needs. Writes into neither x nor itself."""
        raise NotImplementedError

    def onward(self, x: Array, run: Run, after: Operator | None) -> tuple[Array, tuple[Any, ...]]:
        """`forward`, and what was saved in a tuple; or, in one pass over memory, the forward of the next one as well.

        Then y is the next one's, and the tuple has two items. That what is saved is what both save by themselves is
        what lets backward know nothing of it.
        """
        y, saved = self.forward(x, run)
        return y, (saved,)

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dx, from dy: the gradients of the loss by x and by y. Hands parameters' gradients to `grads`.

        Neither dy nor what was saved is written into: `grads` may compute from them later.
        """
        raise NotImplementedError

    def outline(self, x: Spec) -> Outline:
        """What `forward` would do to an array like `x`: the shape of the result, and what it costs."""
        raise NotImplementedError

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """The parameters and operators that this one directly holds, with their names here, in order of attributes."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter | Operator):
                yield name, value
            elif isinstance(value, list | tuple):
                for number, item in enumerate(value):
                    if isinstance(item, Parameter | Operator):
                        yield f"{name}.{number}", item

    def walk(self, path: str = "") -> Iterator[tuple[str, Parameter | Operator]]:
        """Everything in the tree below, with paths; what is held twice comes twice."""
        for name, value in self.members():
            here = f"{path}.{name}" if path else name
            yield here, value
            if isinstance(value, Operator):
                yield from value.walk(here)

    def parameters(self) -> list[Parameter]:
        """All parameters in the tree, each once, in the order of their first place in it."""
        found = {id(value): value for _, value in self.walk() if isinstance(value, Parameter)}
        return list(found.values())


def name_all(model: Operator) -> list[Parameter]:
    """Name every operator and parameter by its first path in the tree, count uses, and return the parameters."""
    for parameter in model.parameters():
        parameter.name, parameter.uses = "", 0
    for path, value in model.walk():
        if isinstance(value, Parameter):
            value.name = value.name or path
            value.uses += 1
        else:
            value.name = path
    return model.parameters()


def arrays_of(saved: Any) -> dict[int, Any]:
    """The distinct arrays (or specs) in nested tuples, by identity: of arrays, the memory that a view looks at."""
    if isinstance(saved, Spec):
        return {id(saved): saved}
    if isinstance(saved, list | tuple):
        return {key: value for item in saved for key, value in arrays_of(item).items()}
    if hasattr(saved, "nbytes") and hasattr(saved, "dtype"):
        while isinstance(getattr(saved, "base", None), type(saved)):
            saved = saved.base
        return {id(saved): saved}
    return {}


def nbytes_of(saved: Any) -> int:
    """Bytes of all distinct arrays in what was saved, or of the specs in its outline."""
    return sum(value.nbytes for value in arrays_of(saved).values())

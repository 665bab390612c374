"""Graph of a model's operators: their kinds and sizes, matrix products and weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from parallel.planning.analytic.checked import expect_at_least, lookup
from parallel.planning.analytic.flops import OperatorCost
from parallel.planning.analytic.operator_kinds import KINDS


@dataclass(frozen=True)
class GraphOperator:
    """Operator of a graph: its kind (a key of `KINDS`), the names of its inputs, and its sizes.

    Attributes
    ----------
    features : int
        Of the result, for kind "linear". 0: same as the first input.
    heads : int
        For kind "attention". Its input is queries, keys and values side by side, each of `features`.
    """

    kind: str
    inputs: tuple[str, ...] = ()
    features: int = 0
    heads: int = 1

    def __post_init__(self) -> None:
        expected = lookup("kind", self.kind, KINDS).inputs
        if expected != len(self.inputs) and not (expected < 0 and self.inputs):
            many = "1 or more" if expected < 0 else expected
            raise ValueError(f"inputs: expected {many} for kind {self.kind}, found {len(self.inputs)}")
        expect_at_least(self, 0, "features")
        expect_at_least(self, 1, "heads")


class OperatorGraph:
    """Operators by name, in an order in which inputs come first. The first one is the input of the model.

    Parameters
    ----------
    operators : mapping of str to GraphOperator
    shape : tuple of int
        Of the input: batch, length, width.
    repeated : bool
        True if the result is the input of the next of many equal blocks, with the same placements.

    Raises
    ------
    ValueError
        If an input is no earlier operator, or sizes do not fit.
    """

    def __init__(self, operators: Mapping[str, GraphOperator], shape: tuple[int, int, int], repeated: bool = False):
        self.operators, self.repeated = dict(operators), repeated
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, operator in self.operators.items():
            # inputs come first, so one pass finds all shapes and no circle can appear
            for source in operator.inputs:
                if source not in self.shapes:
                    known = ", ".join(self.shapes) or "none"
                    raise ValueError(f"{name}: expected earlier operators as inputs ({known}), found {source!r}")
            taken = [self.shapes[source] for source in operator.inputs]
            width = operator.features or (taken[0][-1] if taken else shape[-1])
            if operator.kind == "add" and len(set(taken)) > 1:
                raise ValueError(f"{name}: expected inputs of equal shapes, found {', '.join(map(str, taken))}")
            if operator.kind == "attention" and (taken[0][-1] != 3 * width or width % operator.heads):
                raise ValueError(
                    f"{name}: expected an input of 3 x {width} features and a divisor of {width} heads, "
                    f"found {taken[0][-1]} and {operator.heads}"
                )
            self.shapes[name] = (*shape[:-1], width)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Names of each operator and its input, the input first. With `repeated`, also the result and the first."""
        found = [(source, name) for name, operator in self.operators.items() for source in operator.inputs]
        names = list(self.operators)
        return [*found, (names[-1], names[0])] if self.repeated else found

    def products(self, name: str, parts: tuple[int, int, int] = (1, 1, 1)) -> list[OperatorCost]:
        """Matrix products of a forward pass with samples, input and result features cut in these numbers of `parts`."""
        operator, (batch, length, width) = self.operators[name], self.shapes[name]
        samples, inputs, outputs = parts
        if operator.kind == "linear":
            k = self.shapes[operator.inputs[0]][-1]
            return [OperatorCost("linear", name, batch * length // samples, k // inputs, width // outputs, 1)]
        if operator.kind == "attention":
            each = width // operator.heads
            repeats = batch * operator.heads // (samples * outputs)
            return [
                OperatorCost("scores", name, length, each, length, repeats),
                OperatorCost("scores", name, length, length, each, repeats),
            ]
        return []

    def weights(self, name: str) -> int:
        """Elements of the operator's weight."""
        operator = self.operators[name]
        if operator.kind == "norm":
            return 2 * self.shapes[name][-1]
        return self.shapes[name][-1] * self.shapes[operator.inputs[0]][-1] if operator.kind == "linear" else 0

"""Application of the transforms that `Settings` describe to a model."""

from collections.abc import Callable
from typing import Any, cast

from parallel.engine.settings import DEFAULTS, STORED, TRANSFORM_FIELDS, Settings
from parallel.nn.compose import Sequential
from parallel.nn.operator import Operator
from parallel.nn.rewrite import operators_in
from parallel.nn.transforms.fake_quantized_input import FakeQuantizedInput
from parallel.nn.transforms.few_bit_product import PRODUCTS, with_products
from parallel.nn.transforms.pruning import PATTERNS, Pruning, of_neighbours
from parallel.nn.transforms.quantizable_layers import kind_of, layers_of
from parallel.nn.transforms.weight_transform import TransformedWeight, WeightFunction, rounding_to
from parallel.nn.transforms.wrapper import rebuilt
from quant import QuantSpec, parse


def with_transforms(model: Operator, settings: Settings) -> Operator:
    """Model with the transforms of an engine's settings. ValueError names a setting."""
    if settings.prune and settings.steps is None:
        raise ValueError(f"steps: pruning reaches {settings.prune:g} after half of them; expected a number, found None")
    return transformed(model, settings, settings.steps or 0)  # type: ignore[arg-type]


def transformed(model: Sequential, settings: Settings, steps: int) -> Sequential:
    """Model with the transforms of `settings`. Shares the parameters and their names. ValueError names a field.

    `steps` counts the whole training: pruning reaches its fraction after half of them. It prunes weights that
    are used in matrix products only. With the pattern `rows` not the last product's weights, whose rows are the
    results. Without transforms the model itself is returned.
    """
    for name in TRANSFORM_FIELDS:
        if getattr(settings, name) != getattr(DEFAULTS, name) and not any(map(kind_of, operators_in(model))):
            raise ValueError(f"{name}: expected a model with layers whose weights it changes, found none")
    weights = _weight_functions(model, settings, steps)
    inputs = _field("fake_quant_inputs", parse, settings.fake_quant_inputs) if settings.fake_quant_inputs else None
    products = _products(settings)
    if not weights and inputs is None and products is None:
        return model

    def change(operator: Operator) -> Operator:
        kind = kind_of(operator)
        if kind is None:
            return operator
        functions = weights.get(id(operator.weight), ())  # type: ignore[attr-defined]
        made = operator if products is None else with_products(operator, products)
        made = TransformedWeight(made, functions, kind.transposed) if functions else made
        # Only inputs of products are quantised: those of an embedding may be numbers of tokens.
        return made if inputs is None or kind.product is None else _with_input(made, inputs)

    return cast(Sequential, rebuilt(model, change))


def pruning_of(settings: Settings, steps: int) -> Pruning | None:
    """Pruning that `settings` describe for a training of `steps` steps, or None. ValueError names a field."""
    pattern, sparsity = settings.prune_pattern, settings.prune
    if pattern not in PATTERNS:
        keep, size = _field("prune_pattern", of_neighbours, pattern)
        if sparsity not in (0.0, 1 - keep / size):
            raise ValueError(
                f"prune: expected {1 - keep / size:g}, as {pattern} prunes, or nothing; found {sparsity:g}"
            )
        return Pruning(1 - keep / size, pattern)
    return Pruning(sparsity, pattern, ramp=steps // 2) if sparsity else None


def prune(model: Sequential, settings: Settings, steps: int, step: int) -> None:
    """Set to 0 the weights that passes of a model, trained for `step` of `steps` steps with `settings`, took as 0."""
    only_pruned = Settings(prune=settings.prune, prune_pattern=settings.prune_pattern)
    for _, operator in transformed(model, only_pruned, steps).walk():
        if isinstance(operator, TransformedWeight):
            operator.weight.data = operator.values(step)


def _weight_functions(model: Sequential, settings: Settings, steps: int) -> dict[int, list[WeightFunction]]:
    """Functions of each weight, by the id of the parameter."""
    pruning, layers = pruning_of(settings, steps), layers_of(model)
    prunable = [layer for layer in layers if all(getattr(kind_of(user), "product", None) for user in layer.users)]
    prunable = prunable[:-1] if settings.prune_pattern == "rows" else prunable  # the last rows are results
    found: dict[int, list[WeightFunction]] = {}
    if pruning is not None:
        pruned: WeightFunction = pruning.values
        found = {id(layer.parameter): [pruned] for layer in prunable}
    if settings.fake_quant:
        spec = _field("fake_quant", parse, settings.fake_quant)
        for layer in layers:
            found.setdefault(id(layer.parameter), []).append(rounding_to(spec, layer.name))
    return found


def _products(settings: Settings) -> Any:
    if settings.products == STORED:
        return None
    if settings.fake_quant or settings.fake_quant_inputs:
        raise ValueError(f"products: {settings.products} and fake quantisation exclude each other")
    return PRODUCTS[settings.products]


def _with_input(operator: Operator, spec: QuantSpec) -> Operator:
    made: Operator = _field("fake_quant_inputs", lambda spec: FakeQuantizedInput(operator, spec), spec)
    return made


def _field(name: str, make: Callable[[Any], Any], value: Any) -> Any:
    """``make(value)``. Its ValueError gets the name of the field."""
    try:
        return make(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error

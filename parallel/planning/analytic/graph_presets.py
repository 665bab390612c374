"""Graphs of the planner: a transformer block by its numbers, and graphs in TOML files.

A file has the input's `shape` (batch, length, width), optionally `repeated`, and tables ``[operators.NAME]`` in order,
whose keys are the fields of `GraphOperator`.
"""

import tomllib
from pathlib import Path

from parallel.planning.analytic.checked import from_table
from parallel.planning.analytic.operator_graph import GraphOperator, OperatorGraph
from parallel.planning.analytic.transformer import Transformer


def transformer_block(model: Transformer, batch: int) -> OperatorGraph:
    """One of a model's equal layers: attention and a plain FFN, each after a norm and added to the layer's input.

    ValueError for models whose layers are others: grouped heads, latent attention, gates or experts.
    """
    others = {
        "fewer kv heads": model.kv_heads != model.heads,
        "latent attention": model.latent is not None,
        "a gated FFN": model.gated,
        "experts": model.experts is not None,
        "heads of another width": model.heads * model.head_width != model.width,
    }
    if found := [name for name, has in others.items() if has]:
        raise ValueError(f"model: expected a plain transformer for a graph of its block, found {', '.join(found)}")

    def linear(source: str, features: int) -> GraphOperator:
        return GraphOperator("linear", (source,), features)

    operators = {
        "x": GraphOperator("input"),
        "norm 1": GraphOperator("norm", ("x",)),
        "queries, keys, values": linear("norm 1", 3 * model.width),
        "attention": GraphOperator("attention", ("queries, keys, values",), model.width, model.heads),
        "projection": linear("attention", model.width),
        "add 1": GraphOperator("add", ("projection", "x")),
        "norm 2": GraphOperator("norm", ("add 1",)),
        "FFN in": linear("norm 2", model.ffn),
        "activation": GraphOperator("elementwise", ("FFN in",)),
        "FFN out": linear("activation", model.width),
        "add 2": GraphOperator("add", ("FFN out", "add 1")),
    }
    return OperatorGraph(operators, (batch, model.context, model.width), repeated=True)


def two_layers(rows: int, width: int, hidden: int) -> OperatorGraph:
    """Products with A and B, and an activation between: the smallest example of tensor parallelism."""
    operators = {
        "x": GraphOperator("input"),
        "A": GraphOperator("linear", ("x",), hidden),
        "activation": GraphOperator("elementwise", ("A",)),
        "B": GraphOperator("linear", ("activation",), width),
        "y": GraphOperator("output", ("B",)),
    }
    return OperatorGraph(operators, (rows, 1, width))


def read_graph(path: Path, batch: int | None = None) -> OperatorGraph:
    """Graph of a TOML file, with another batch if given; ValueError, which names the file, if something is wrong."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a TOML file, found: {getattr(error, 'strerror', None) or error}") from None
    known = ("shape", "repeated", "operators")
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    shape = table.get("shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size > 0 for size in shape)):
        raise ValueError(f"{path}: shape: expected [batch, length, width], found {shape!r}")
    if type(table.get("repeated", False)) is not bool:
        raise ValueError(f"{path}: repeated: expected true or false, found {table['repeated']!r}")
    entries = table.get("operators")
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{path}: operators: expected tables [operators.NAME], found {entries!r}")
    operators = {name: from_table(GraphOperator, entry, f"{path}: {name}") for name, entry in entries.items()}
    try:
        return OperatorGraph(operators, (batch or shape[0], shape[1], shape[2]), table.get("repeated", False))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None

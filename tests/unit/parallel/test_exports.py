"""Types of the public names: those of the import table, and constructors with every hyperparameter."""

import ast
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import parallel
from parallel.optim import optimizers, param_groups
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.param_groups import TORCH_NAMES, GroupArguments, ParamGroup


def test_type_checkers_see_the_names_that_are_exported():
    tree = ast.parse(Path(parallel.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {alias.asname: node.module for block in blocks for node in block.body for alias in node.names}
    expected = {name: module for module, names in parallel.EXPORTS.items() for name in names.split()}
    assert typed == expected | {"nn": "parallel"}


def with_aliases(names):
    own = set(names)
    return own | {alias for alias, some in TORCH_NAMES.items() if own.issuperset(some)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_types_of_the_hyperparameters(name):
    made = OPTIMIZERS[name]
    known = vars(typing) | vars(param_groups) | vars(optimizers)
    arguments = next(known[f"{one.__name__}Arguments"] for one in made.__mro__ if f"{one.__name__}Arguments" in known)
    types = typing.get_type_hints(arguments, known)
    assert types.keys() == with_aliases(one.name for one in fields(made) if one.init)
    assert made(lr=0.1, weight_decay=0.2).describe()["name"] == name


def test_types_of_a_group():
    assert set(GroupArguments.__annotations__) == with_aliases(one.name for one in fields(ParamGroup)) - {"params"}


def test_names_of_pytorch_that_differ():
    with pytest.raises(AttributeError, match="no attribute 'Module'; its counterpart is Operator"):
        _ = parallel.nn.Module
    assert all(hasattr(parallel.nn, name) for name in parallel.nn.TORCH_CLASSES.values())
    with pytest.raises(AttributeError, match=r"no attribute 'Linaer'$"):
        _ = parallel.nn.Linaer


def test_operators_as_arguments_or_in_a_list():
    one, other = parallel.nn.ReLU(), parallel.nn.GELU()
    for made in (parallel.nn.Sequential(one, other), parallel.nn.Sequential([one, other])):
        assert made.items == [one, other] and made.cuts == {}
    assert parallel.nn.Sequential(one).items == [one] and parallel.nn.Sequential().items == []
    with pytest.raises(TypeError, match="Sequential: expected operators, found 3 as item 1"):
        parallel.nn.Sequential(one, 3)

"""Methods generated from the declarations of collectives, and their type stub."""

import ast
import inspect

import pytest

from collectives import Communicator
from collectives.runtime.collective_declarations import DECLARATIONS
from collectives.runtime.collective_forms import FORMS, STUB, method_name, stub


def test_the_stub_is_up_to_date():
    assert STUB.read_text() == stub(), "run collectives.runtime.collective_forms.write_stub()"


@pytest.mark.parametrize("form", FORMS)
def test_signatures_and_docstrings_of_the_stub_are_those_of_the_methods(form):
    (owner,) = (node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef))
    written = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
    for declaration in DECLARATIONS:
        name = method_name(declaration.name, form)
        method = getattr(Communicator, name)
        arguments = written[name].args
        assert list(inspect.signature(method).parameters) == [a.arg for a in arguments.args + arguments.kwonlyargs]
        assert inspect.getdoc(method) == ast.get_docstring(written[name])
        assert method.__name__ == name and (method.__annotations__["return"] is None) == (form == "blocking")


def test_defaults_are_those_of_mpi4py():
    from mpi4py import MPI

    reduce = inspect.signature(Communicator.Reduce).parameters
    assert reduce["op"].default == MPI.SUM and reduce["root"].default == 0
    assert inspect.signature(Communicator.Allreduce_init).parameters["info"].default == MPI.INFO_NULL

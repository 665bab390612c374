"""Blocking, ``I...`` and ``..._init`` methods of each collective, generated from its declaration.

The methods are generated as source, as `dataclasses` does: a blocking call of a few bytes takes microseconds, and a
wrapper that forwards ``*args`` would cost a tenth of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from mpi4py import MPI

from collectives.runtime.collective_declarations import DECLARATIONS, Declaration
from collectives.runtime.requests import Request

FORMS = ("blocking", "non-blocking", "persistent")

_KEYWORDS = ("*", 'algorithm: str = "auto"', "segments: int | None = None")

_PARAMETERS = {"op": "op: MPI.Op = MPI.SUM", "root": "root: int = 0", "recvcounts": "recvcounts: Any = None"}

_DOCUMENTED = {
    "op": "op : MPI.Op\n    Predefined or user-defined; ranks are combined in order if it does not commute.",
    "root": "root : int",
    "recvcounts": "recvcounts : sequence of int, optional\n"
    "    Elements for each rank; by default the size of each rank's `recvbuf`.",
}

_FROM_COMMUNICATOR = {
    "rank": "self._rank",
    "size": "self._size",
    "recvcounts": "self._counts(sendbuf, recvbuf, recvcounts)",
}
"""Arguments of `Declaration.describe` that the communicator adds."""

STUB = Path(__file__).with_name("collective_methods.pyi")
"""Types of the generated methods, for type checkers and editors; written by `write_stub`."""


def method_name(name: str, form: str) -> str:
    """Name of the method of a collective in a form: ``Allreduce``, ``Iallreduce``, ``Allreduce_init``."""
    return {"blocking": name, "non-blocking": f"I{name.lower()}", "persistent": f"{name}_init"}[form]


def add_methods(owner: type) -> None:
    """Add the methods of all collectives in all forms to a class."""
    for declaration in DECLARATIONS:
        for form in FORMS:
            function = _function(declaration, form, owner.__module__)
            function.__qualname__ = f"{owner.__name__}.{function.__name__}"
            setattr(owner, function.__name__, function)


def _function(declaration: Declaration, form: str, module: str) -> Callable[..., Any]:
    # The file name marks the frame as one of this package, for `desync_check.caller`.
    code = compile(_source(declaration, form), __file__, "exec", dont_inherit=True)
    scope: dict[str, Any] = {"describe": declaration.describe, "MPI": MPI, "Any": Any, "Request": Request}
    scope |= {"__name__": module, "__package__": __package__}
    exec(code, scope)
    function: Callable[..., Any] = scope[method_name(declaration.name, form)]
    function.__doc__ = _documentation(declaration, form)
    return function


def _source(declaration: Declaration, form: str) -> str:
    names = _arguments(declaration)
    values = _FROM_COMMUNICATOR | {"v_form": repr(declaration.v_form)}
    call = f"describe({', '.join(values.get(name, name) for name in _parameters(declaration))})"
    if form == "non-blocking":
        body = f"return self._begin({call}, algorithm, segments)"
    elif form == "persistent":
        body = f"return self._bind({call}, algorithm, segments)"
    elif declaration.v_form:
        body = f"self._run({call}, algorithm, segments)"
    else:
        send = next((name for name in ("sendbuf", "buf") if name in names), None)
        recv = next((name for name in ("recvbuf", "buf") if name in names), None)
        op, root = "op" if "op" in names else "MPI.SUM", "root" if "root" in names else "0"
        key = f"{declaration.describe.__name__!r}, {send}, {recv}, {op}, {root}, algorithm, segments"
        body = (
            f"key = self._run_cached({key})\n"
            f"if key:\n"
            f"    self._run({call}, algorithm, segments, key, {send}, {recv}, {op})"
        )
    parameters = ", ".join(_signature(declaration, form))
    returns = "None" if form == "blocking" else "Request"
    return f"def {method_name(declaration.name, form)}({parameters}) -> {returns}:\n{indent(body, '    ')}\n"


def _parameters(declaration: Declaration) -> list[str]:
    return list(inspect.signature(declaration.describe).parameters)


def _arguments(declaration: Declaration) -> list[str]:
    """Names of mpi4py's arguments."""
    return [name for name in _parameters(declaration) if name not in ("rank", "size", "v_form")]


def _signature(declaration: Declaration, form: str) -> list[str]:
    arguments = [_PARAMETERS.get(name, f"{name}: Any") for name in _arguments(declaration)]
    info = ["info: MPI.Info = MPI.INFO_NULL"] if form == "persistent" else []
    return ["self", *arguments, *info, *_KEYWORDS]


def _documentation(declaration: Declaration, form: str) -> str:
    if form != "blocking":
        return f"{'Start' if form == 'non-blocking' else 'Create a persistent request for'} `{declaration.name}`."
    buffers = (indent(fill(text, 104), "    ") for text in declaration.buffers)
    parts = [_DOCUMENTED.get(name) or f"{name} : buffer\n{next(buffers)}" for name in _arguments(declaration)]
    heading = ["", "Parameters", "-" * 10] if parts else []
    return "\n".join([declaration.summary, *heading, *parts])


def stub() -> str:
    """Text of the type stub."""
    lines = [
        '# mypy: disable-error-code="override"',
        "# Generated by collectives.runtime.collective_forms.write_stub().",
        "",
        "from typing import Any",
        "",
        "from mpi4py import MPI",
        "",
        "from collectives.runtime.inherited_methods import Inherited",
        "from collectives.runtime.requests import Request",
        "",
        "class CollectiveMethods(Inherited):",
        '    """Collectives on arrays, in three forms each."""',
    ]
    for declaration in DECLARATIONS:
        for form in FORMS:
            returns = "None" if form == "blocking" else "Request"
            lines += ["", f"    def {method_name(declaration.name, form)}("]
            lines += [f"        {part}," for part in _signature(declaration, form)]
            lines.append(f"    ) -> {returns}:")
            text = _documentation(declaration, form)
            closing = '\n"""' if "\n" in text else '"""'
            lines += indent(f'"""{text}{closing}', "        ").splitlines()
    return "\n".join(lines) + "\n"


def write_stub() -> None:
    """Write the type stub, after a change of the declarations."""
    STUB.write_text(stub())

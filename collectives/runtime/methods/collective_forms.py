"""Blocking, ``I...`` and ``..._init`` methods of each collective, generated from its declaration.

The methods are generated as source, as `dataclasses` does: a blocking call of a few bytes takes microseconds, and a
wrapper that forwards ``*args`` would cost a tenth of that.
"""

import inspect
import linecache
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from textwrap import fill, indent
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives.runtime.arguments import call as calls
from collectives.runtime.arguments import neighbor_calls
from collectives.runtime.requests.native_requests import ended_request
from collectives.runtime.requests.request import Request
from collectives.transport.waits import Deadline, seconds_of

FORMS = ("blocking", "non-blocking", "persistent")


class Declaration(NamedTuple):
    """One collective: `describe` validates the arguments of mpi4py's method `name` and returns the `Call`.

    `v_form`: for blocks of any length; `typed`: each of a datatype.
    """

    name: str
    describe: Callable[..., calls.Call]
    summary: str
    buffers: tuple[str, ...] = ()
    v_form: bool = False
    typed: bool = False


_IN_PLACE = "or ``MPI.IN_PLACE`` on all ranks, whose {} are then in `recvbuf`."
_OPERANDS = f"n elements, {_IN_PLACE.format('operands')}"
_OWN_OPERANDS = "n elements, or ``MPI.IN_PLACE``, if they are in `recvbuf`."
_SAME = "n elements of the same type."
_AT_ROOT = "at the root; ignored elsewhere, where it may be None."
_ROOT_IN_PLACE = "``MPI.IN_PLACE`` at the root, whose {} is then in `recvbuf`."
_ANY_LENGTH = """`{}` of blocks of any length.

A buffer of several blocks is ``[array, counts]``, ``[array, counts, displs, type]`` and so on."""

_TYPED = """`{}` of blocks that have a datatype each.

A buffer is ``[array, counts, displs, datatypes]`` or ``[array, (counts, displs), datatypes]``, with
displacements in bytes, or ``[array, datatypes]`` for one element in each block."""

DECLARATIONS = (
    Declaration("Barrier", calls.barrier, "Return once all ranks have entered the barrier."),
    Declaration(
        "Bcast",
        calls.broadcast,
        "Send the root's vector to all ranks.",
        ("The vector: read at the root, written elsewhere. The same number of bytes on all ranks.",),
    ),
    Declaration(
        "Reduce",
        calls.reduce,
        "Reduce the vectors of all ranks, element by element, into the root's `recvbuf`.",
        (f"n elements; {_ROOT_IN_PLACE.format('operand')}", f"n elements of the same type {_AT_ROOT}"),
    ),
    Declaration(
        "Allreduce",
        calls.allreduce,
        "Reduce the vectors of all ranks, element by element, into every rank's `recvbuf`.\n\n"
        'All ranks get the same bits, unless the requested algorithm is ``"census"`` or ``"ordered_census"``.',
        (_OPERANDS, _SAME),
    ),
    Declaration(
        "Scatter",
        calls.scatter,
        "Send block r of the root's `sendbuf` to rank r; blocks of equal length.",
        (f"p blocks {_AT_ROOT}", "One block; ``MPI.IN_PLACE`` at the root leaves its block in `sendbuf`."),
    ),
    Declaration(
        "Gather",
        calls.gather,
        "Collect one block of every rank in the root's `recvbuf`; blocks of equal length.",
        (f"One block; {_ROOT_IN_PLACE.format('block')}", f"p blocks {_AT_ROOT}"),
    ),
    Declaration(
        "Allgather",
        calls.allgather,
        "Collect one block of every rank in every rank's `recvbuf`; blocks of equal length.",
        (f"One block, {_IN_PLACE.format('blocks')}", "p blocks."),
    ),
    Declaration(
        "Reduce_scatter_block",
        calls.reduce_scatter_block,
        "Reduce the vectors of all ranks and store block r of the result on rank r; blocks of equal length.",
        (
            f"p blocks, {_IN_PLACE.format('operands')}",
            "One block; in place p blocks, of which the first receives the result and the others are unchanged.",
        ),
    ),
    Declaration(
        "Reduce_scatter",
        calls.reduce_scatter,
        "Reduce the vectors of all ranks and store block r of the result, ``recvcounts[r]`` elements, on rank r.",
        (
            f"All blocks, {_IN_PLACE.format('operands')}",
            "One block; in place all blocks: the result is stored at the beginning, the rest is unchanged.",
        ),
        v_form=True,
    ),
    Declaration(
        "Alltoall",
        calls.alltoall,
        "Send one block to every rank and receive one from each; blocks of equal length.",
        (f"p blocks, block r for rank r; {_IN_PLACE.format('blocks')}", "p blocks, block r from rank r."),
    ),
    *(
        Declaration(f"{name}v", describe, _ANY_LENGTH.format(name), v_form=True)
        for name, describe in (
            *(("Scatter", calls.scatter), ("Gather", calls.gather)),
            *(("Allgather", calls.allgather), ("Alltoall", calls.alltoall)),
        )
    ),
    Declaration("Alltoallw", calls.alltoall, _TYPED.format("Alltoall"), v_form=True, typed=True),
    Declaration(
        "Scan",
        calls.scan,
        "Reduce the vectors of ranks 0 to this one, element by element and in rank order.",
        (_OWN_OPERANDS, _SAME),
    ),
    Declaration(
        "Exscan",
        calls.exscan,
        "Reduce the vectors of the ranks below this one, in rank order; rank 0's `recvbuf` is unchanged.",
        (_OWN_OPERANDS, _SAME),
    ),
)

_BLOCKS = "One block for each {}, in the order of the topology."

NEIGHBOR_DECLARATIONS = (
    Declaration(
        "Neighbor_allgather",
        neighbor_calls.neighbor_allgather,
        "Send one block to all destinations in the topology, receive one of each source; blocks of equal length.",
        ("One block.", _BLOCKS.format("source")),
    ),
    Declaration(
        "Neighbor_alltoall",
        neighbor_calls.neighbor_alltoall,
        "Send a block to each destination in the topology, receive one of each source; blocks of equal length.",
        (_BLOCKS.format("destination"), _BLOCKS.format("source")),
    ),
    *(
        Declaration(f"Neighbor_{name}v", describe, _ANY_LENGTH.format(f"Neighbor_{name}"), v_form=True)
        for name, describe in (
            ("allgather", neighbor_calls.neighbor_allgather),
            ("alltoall", neighbor_calls.neighbor_alltoall),
        )
    ),
    Declaration(
        "Neighbor_alltoallw",
        neighbor_calls.neighbor_alltoall,
        _TYPED.format("Neighbor_alltoall"),
        v_form=True,
        typed=True,
    ),
)
"""Collectives of communicators that have a topology."""

_KEYWORDS = ("*", 'algorithm: str = "auto"', "segments: int | None = None")

_TIMEOUT = "timeout: float | None = None"

_PARAMETERS = {"op": "op: MPI.Op = MPI.SUM", "root": "root: int = 0", "recvcounts": "recvcounts: Any = None"}

_DOCUMENTED = {
    "op": "op : MPI.Op\n    Predefined or user-defined; ranks are combined in order if it does not commute.",
    "root": "root : int",
    "timeout": "timeout : float, optional\n    Seconds after which the call raises `collectives.errors.Timeout`.",
    "recvcounts": "recvcounts : sequence of int, optional\n"
    "    Elements for each rank; by default the size of each rank's `recvbuf`; required in place.",
}

_FROM_COMMUNICATOR = {
    "rank": "self._rank",
    "size": "self._size",
    "neighbors": "self._neighbors",
    "recvcounts": "self._counts(sendbuf, recvbuf, recvcounts)",
}
"""Arguments of `Declaration.describe` that the communicator adds."""


def method_name(name: str, form: str) -> str:
    """Name of the method of a collective in a form: ``Allreduce``, ``Iallreduce``, ``Allreduce_init``."""
    return {"blocking": name, "non-blocking": f"I{name.lower()}", "persistent": f"{name}_init"}[form]


def add_methods(owner: type, declarations: Sequence[Declaration]) -> None:
    """Add the methods of collectives in all forms to a class."""
    for declaration, form in product(declarations, FORMS):
        name, source = method_name(declaration.name, form), _source(declaration, form)
        # Within the package, as frames of it are left out of reports; tracebacks find the source by it.
        file = f"{os.path.dirname(__file__)}{os.sep}<{name}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        code = compile(source, file, "exec", dont_inherit=True)
        scope: dict[str, Any] = {"describe": declaration.describe}
        scope |= {"MPI": MPI, "SUM": MPI.SUM, "Any": Any, "Request": Request, "ended_request": ended_request}
        scope |= {"Deadline": Deadline, "seconds_of": seconds_of}
        scope |= {"__name__": owner.__module__, "__package__": __package__}
        exec(code, scope)
        function = scope[name]
        function.__doc__ = documentation(declaration, form)
        function.__qualname__ = f"{owner.__name__}.{function.__name__}"
        setattr(owner, function.__name__, function)


def _source(declaration: Declaration, form: str) -> str:
    names = _arguments(declaration)
    values = _FROM_COMMUNICATOR | {"v_form": repr(declaration.v_form), "typed": repr(declaration.typed)}
    planner = "self._open_planner()"
    call = f"describe({', '.join(values.get(name, name) for name in _parameters(declaration.describe))})"
    if form == "persistent":
        body = f"return {planner}.init({call}, algorithm, segments)"
    else:
        send = next((name for name in ("sendbuf", "buf") if name in names), None)
        recv = next((name for name in ("recvbuf", "buf") if name in names), None)
        op, root = "op" if "op" in names else "SUM", "root" if "root" in names else "0"
        if "recvcounts" in names:
            root = "recvcounts"  # without a root, they take its place in the compiled call
        arguments = f"{send}, {recv}, {op}, {root}, algorithm, segments"
        if form == "blocking":
            calls, cached, ended = "_calls", "_run_cached", "return"
            otherwise = f"if found:\n    {planner}.run({call}, algorithm, segments, found)"
        else:
            calls, cached, ended = "_starts", "_start_cached", "return ended_request()"
            begin = f"{planner}.begin({call}, algorithm, segments, found)"
            otherwise = f"return found if isinstance(found, Request) else {begin}"
        rest = f"found = self.{cached}(found, {declaration.name!r}, {arguments})\n{otherwise}"
        check = ""
        if form == "blocking":  # the first part of a call hardly waits, and so needs no time limit
            check = "if timeout is not None:\n    seconds_of(timeout)\n"
            limited = f"with Deadline(timeout, self._rank):\n{indent(rest, '    ')}\nreturn"
            rest = f"if timeout is not None:\n{indent(limited, '    ')}\n{rest}"
        body = (
            f"{check}"
            f"try:\n"
            f"    found = self.{calls}[{declaration.name!r}]({arguments})\n"
            f"    if not found:\n"
            f"        {ended}\n"
            f"{indent(rest, '    ')}\n"
            f"except BaseException as error:\n"
            f"    self._break_off({form!r}, error, {declaration.name!r}, {send}, {recv})\n"
            f"    raise"
        )
    returns = "None" if form == "blocking" else "Request"
    heading = f"def {method_name(declaration.name, form)}({', '.join(signature(declaration, form))}) -> {returns}:"
    return f"{heading}\n{indent(body, '    ')}\n"


def _arguments(declaration: Declaration) -> list[str]:
    """Names of the arguments of mpi4py's method for the collective."""
    added = {"rank", "size", "neighbors", "v_form", "typed"}
    return [name for name in _parameters(declaration.describe) if name not in added]


@cache
def _parameters(describe: Callable[..., calls.Call]) -> tuple[str, ...]:
    return tuple(inspect.signature(describe).parameters)


def signature(declaration: Declaration, form: str) -> list[str]:
    """Source text of each parameter of a generated method, with type and default."""
    arguments = [_PARAMETERS.get(name, f"{name}: Any") for name in _arguments(declaration)]
    info = ["info: MPI.Info = MPI.INFO_NULL"] if form == "persistent" else []
    return ["self", *arguments, *info, *_KEYWORDS, *([_TIMEOUT] if form == "blocking" else [])]


def documentation(declaration: Declaration, form: str) -> str:
    """Docstring of the generated method of a collective in a form."""
    if form != "blocking":
        return f"{'Start' if form == 'non-blocking' else 'Create a persistent request for'} `{declaration.name}`."
    buffers = (indent(fill(text, 104), "    ") for text in declaration.buffers)
    if not declaration.buffers:
        return declaration.summary
    parts = [_DOCUMENTED.get(name) or f"{name} : buffer\n{next(buffers)}" for name in _arguments(declaration)]
    return "\n".join([declaration.summary, "", "Parameters", "-" * 10, *parts])

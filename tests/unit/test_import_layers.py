"""Import layers: one ordered list of folders. Imports go up the list only."""

import ast
from pathlib import Path

import pytest
from support.sources import SOURCES

PACKAGES = ("collectives", "parallel", "quant")

LAYERS = [
    "quant.types",
    "quant.formats",
    "quant.spec",
    "quant.layout",
    "quant.kernels",
    "quant.scaling",
    "quant.array",
    "quant.quantize",
    "quant.row_format",
    "quant",
    "quant.observers",
    "quant.ptq",
    "quant.search",
    "quant.io",
    "collectives.errors",
    "collectives.types",
    "collectives.units",
    "collectives.engine",
    "collectives.schedule",
    "collectives.buffers",
    "collectives.transport",
    "collectives.transport.mpi",
    "collectives.transport.memory",
    "collectives.transport.node",
    "collectives.transport.gpu",
    "collectives.analysis",
    "collectives.algorithms",
    "collectives.selection",
    "collectives.runtime",
    "collectives.runtime.arguments",
    "collectives.runtime.record",
    "collectives.runtime.execution",
    "collectives.runtime.requests",
    "collectives.runtime.binding",
    "collectives.runtime.builders",
    "collectives.runtime.gpu",
    "collectives.runtime.planning",
    "collectives.runtime.methods",
    "collectives.communicator",
    "collectives.topologies",
    "collectives",
    "collectives.compressed",
    "collectives.torch",
    "parallel.nn",
    "parallel.nn.transforms",
    "parallel.runtime",
    "parallel.optim",
    "parallel.data",
    "parallel.checkpoint",
    "parallel.sharding.axis",
    "parallel.sharding.context",
    "parallel.sharding.expert",
    "parallel.sharding.tensor",
    "parallel.sharding",
    "parallel.engine.data_parallel",
    "parallel.engine.grad_compression",
    "parallel.engine.option",
    "parallel.engine.settings",
    "parallel.engine",
    "parallel.asynchronous",
    "parallel.asynchronous.decentralized",
    "parallel.asynchronous.server",
    "parallel.pipeline.schedule",
    "parallel.pipeline",
    "parallel.trainer",
    "parallel.planning",
    "parallel.planning.analytic",
    "parallel.planning.measured",
    "parallel.ptq",
    "parallel.torch",
    "collectives.benchmark",
    "collectives.cli",
    "collectives.__main__",
    "quant.cli",
    "parallel",
    "parallel.cli.reports",
    "parallel.cli",
]
"""From the lowest layer to the highest. A package's own name stands for its `__init__` module."""

NO_MPI = (
    "collectives.schedule collectives.analysis collectives.algorithms quant parallel.nn "
    "parallel.optim parallel.pipeline.schedule parallel.planning.analytic"
)
"""Layers whose modules import no MPI, directly or indirectly (`quant`: all of its layers but the programs)."""


def module_of(path: Path) -> str:
    """Dotted name of the module in a file."""
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for package in PACKAGES for path in sorted((SOURCES / package).rglob("*.py"))}


def layer_of(module: str) -> str:
    """The longest entry of the list that the module's name begins with."""
    fits = [layer for layer in LAYERS if module == layer or (module.startswith(layer + ".") and layer not in PACKAGES)]
    if not fits:
        raise AssertionError(f"{module} belongs to no layer: expected a folder of LAYERS")
    return max(fits, key=len)


def imports(path: Path) -> list[tuple[int, str]]:
    """Line and module of every import of our packages, at any depth of the file, those for type checkers included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: expected an absolute import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append((node.lineno, name if name in MODULES else str(node.module)))
    return [(line, name) for line, name in found if name.split(".")[0] in PACKAGES]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    own = LAYERS.index(layer_of(module))
    wrong = [
        f"{MODULES[module]}:{line}: {layer_of(module)} imports {name} of {layer_of(name)}"
        for line, name in imports(MODULES[module])
        if LAYERS.index(layer_of(name)) > own
    ]
    assert not wrong, "\n".join(wrong)


def test_every_layer_exists():
    used = {layer_of(module) for module in MODULES}
    assert not [layer for layer in LAYERS if layer not in used]


def without_mpi(module: str) -> bool:
    """True for modules that must work where there is no MPI."""
    return module.startswith(tuple(NO_MPI.split())) and not module.startswith("quant.cli")


@pytest.mark.parametrize("module", [*filter(without_mpi, MODULES)])
def test_pure_modules_import_no_mpi(module):
    names = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert not [name for name in names if name.split(".")[0] == "mpi4py"]

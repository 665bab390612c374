"""Imports go to a lower floor, or stay on their own; the floors that hold pure algorithms know no MPI."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    0: "collectives.schedule.steps collectives.schedule.semantics collectives.schedule.chunks collectives.schedule.topology quant",
    1: "collectives.schedule.transforms",
    2: "collectives.algorithms",
    3: "collectives.algorithms.catalog collectives.analysis.cost_functions collectives.analysis.prove collectives.analysis.simulate_large collectives.analysis.draw "
    "collectives.transport collectives.runtime.ops collectives.buffers.staging collectives.selection.cost_model collectives.selection.timing_table "
    "collectives.selection.timing_file collectives.buffers collectives.buffers.dlpack collectives.errors",
    4: "collectives.runtime.binder collectives.runtime.single_exchange collectives.selection.select collectives.runtime.call",
    5: "collectives.runtime.requests collectives.runtime.native collectives.runtime.binding collectives.runtime.count_exchange collectives.runtime.eager_buffers "
    "collectives.kept collectives.runtime.persistent_agreement collectives.runtime.planner collectives.runtime.desync_check collectives.runtime.point_to_point "
    "collectives.communicator",
    6: "collectives collectives.compressed collectives.compressed.compression_model "
    "parallel.nn parallel.flat parallel.optim parallel.updates parallel.schedules parallel.scaling "
    "parallel.precision parallel.data parallel.datasets parallel.canonical parallel.plan parallel.bucket "
    "parallel.stretches parallel.motion parallel.record parallel.report parallel.interrupt parallel.tensorfile "
    "parallel.settings parallel.facts parallel.server.clocks parallel.server.messages parallel.server.keys "
    "parallel.server.work parallel.server.order parallel.server.record parallel.server.chain "
    "parallel.pipeline.amounts parallel.pipeline.actions parallel.pipeline.placement parallel.pipeline.schedules "
    "parallel.pipeline.plan parallel.pipeline.lowering parallel.pipeline.faults parallel.pipeline.simulate "
    "parallel.pipeline.memory parallel.pipeline.formulas parallel.pipeline.draw parallel.pipeline.partition "
    "parallel.pipeline.search parallel.pipeline.excerpts parallel.pipeline.division "
    "parallel.posttraining.tree parallel.posttraining.layers parallel.posttraining.packed",
    7: "parallel",
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules.split()}
ROOMS = {"collectives": False, "parallel": True, "quant": True}  # package -> are its submodules on its floor?
WITHOUT_MPI = ("catalog", "networks", "walk", "scale", "draw", "costs", "measured")
"""Besides everything on floors 0 to 2, and the part of `parallel` that is on floor 6."""


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in ROOMS for path in sorted((ROOT / package).rglob("*.py"))}


def floor_of(module):
    """The floor of the nearest enclosing entry of the table, or None for a module that the table misses."""
    for prefix in (module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)):
        if prefix in FLOOR and (prefix == module or ROOMS.get(prefix, True)):
            return FLOOR[prefix]
    return None


def imports(module):
    """Every module that `module` imports, with the line; `from package import module` names the module."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(above + ([node.module] if node.module else []))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield (name if name in MODULES else base), node.lineno


def known(module):
    floor = floor_of(module)
    assert floor is not None, f"{module} stands on no floor: give it one in the table of this test"
    return floor


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    floor = known(module)
    for name, line in imports(module):
        if name in MODULES:
            above = f"{module}:{line} (floor {floor}) imports {name} (floor {known(name)})"
            assert known(name) <= floor, above
        alone = floor == FLOOR["parallel.nn"] and module.startswith("parallel.")
        if alone and name.startswith("collectives"):
            assert known(name) <= 2, f"{module}:{line} imports {name}, but must know no MPI"
        if alone or floor <= 2 or module.removeprefix("collectives.") in WITHOUT_MPI:
            assert name.split(".")[0] != "mpi4py", f"{module}:{line} imports {name}, but must know no MPI"

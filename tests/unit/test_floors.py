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
    "parallel.nn parallel.nn.flat_params parallel.optim.optimizers parallel.optim.kernels parallel.optim.lr_schedules parallel.optim.loss_scaling "
    "parallel.optim.precision parallel.data.sampler parallel.data.datasets parallel.runtime.tree_sum parallel.data_parallel.partition_spec parallel.data_parallel.grad_bucket "
    "parallel.checkpoint.tensor_slices parallel.engine.microbatch_pass parallel.runtime.profiler parallel.runtime.step_report parallel.runtime.signals parallel.checkpoint.safetensors_writer "
    "parallel.settings parallel.runtime.validation parallel.parameter_server.worker_clocks parallel.parameter_server.messages parallel.parameter_server.key_assignment "
    "parallel.parameter_server.work_assignment parallel.server.order parallel.parameter_server.event_record parallel.parameter_server.replication_chain "
    "parallel.pipeline.schedule.numeric parallel.pipeline.schedule.actions parallel.pipeline.schedule.stage_placement parallel.pipeline.schedule.schedules "
    "parallel.pipeline.schedule.pipeline_plan parallel.pipeline.schedule.lowering parallel.pipeline.schedule.checks parallel.pipeline.schedule.simulator "
    "parallel.pipeline.schedule.activation_memory parallel.pipeline.schedule.formulas parallel.pipeline.schedule.timeline parallel.pipeline.schedule.stage_partition "
    "parallel.pipeline.schedule.schedule_search parallel.pipeline.schedule.truncate parallel.pipeline.param_division "
    "parallel.ptq.model_surgery parallel.ptq.quantizable_layers parallel.ptq.packed_weights",
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

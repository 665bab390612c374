"""Conversions of values from outside a function, such as `int(...)` and `.astype(...)`: none loses anything.

The test finds conversions of a function's arguments, of names and loops that take values from them, and of results of
callables that users hand in, in the syntax trees. Each remaining one has a reason here. New ones check their value: by
`operator.index`, `real_number`, `widened` or `exact_integers` (`parallel.runtime.validation`).
"""

import ast

import numpy as np
import pytest
from support.sources import SOURCES

PACKAGES = ("collectives", "parallel", "quant")

OWN = ("benchmark", "reports", "analysis", "measured", "kernels")
"""Folders without values of users: figures and checks; and kernels, whose callers check."""

TYPES = {name for name in np.sctypeDict if isinstance(name, str)}
ARRAYS = ("asarray", "array", "ascontiguousarray", "asfortranarray", "require", "fromiter")
"""NumPy's functions that convert to a dtype, if they have one: the second argument, or dtype=."""

NUMBER = "a number of the device's runtime"
CHECKED = "the function has checked the value"
COMPUTED = "a number that the package has computed"
TEXT = "digits of a text; a ValueError for others"
EXACT = "the new type holds all values of the old one"
ROUNDED = "rounding to the type of training, as documented"

ALLOWED = {
    "collectives/buffers/device_memory.py DeviceMemory._number": NUMBER,
    "collectives/buffers/dlpack.py read": "an IntEnum",
    "collectives/buffers/layouts.py _placement": "integers of MPI_Type_get_contents",
    "collectives/cli/arguments.py numbers": TEXT,
    "collectives/cli/faults.py fault": CHECKED,
    "collectives/cli/record_files.py _entry": COMPUTED,
    "collectives/cli/record_files.py _frames": CHECKED,
    "collectives/runtime/record/causes.py place": COMPUTED,
    "collectives/runtime/record/causes.py _without_record": COMPUTED,
    "collectives/runtime/record/causes.py slowness": COMPUTED,
    "collectives/runtime/planning/agreement.py _number": TEXT,
    "collectives/runtime/arguments/argument_keys.py _part": "integers of NumPy",
    "collectives/runtime/arguments/call.py _root": CHECKED,
    "collectives/runtime/builders/communicator_transports.py Transports.__init__": "an attribute of the MPI",
    "collectives/runtime/execution/program.py Program.advance_patiently": COMPUTED,
    "collectives/runtime/execution/program.py Program.start_on": COMPUTED,
    "collectives/cli/trace.py first_rows": COMPUTED,
    "collectives/engine/row_operands.py RowOperands._label_row": COMPUTED,
    "collectives/runtime/execution/program_memory.py _address": NUMBER,
    "collectives/transport/mpi/mpi_transport.py MpiMessage.error": COMPUTED,
    "collectives/transport/mpi/reduced.py gathered_rows": COMPUTED,
    "collectives/runtime/gpu/gpu_program.py _GpuCall._plan": COMPUTED,
    "collectives/runtime/arguments/ops.py _bind_on_device.address": NUMBER,
    "collectives/selection/timing_file.py _positive": CHECKED,
    "collectives/transport/gpu/device_messages.py DeviceNodeTransport.__init__": COMPUTED,
    "collectives/transport/gpu/exported_memory.py ExportedMemory.allocate": NUMBER,
    "collectives/transport/gpu/gpu_channel.py set_place": "bytes of a handle",
    "collectives/transport/gpu/gpu_kernels.py GpuKernels.__init__": NUMBER,
    "collectives/transport/gpu/gpu_kernels.py GpuKernels._reduce": COMPUTED,
    "collectives/transport/gpu/peer_kernels.py PeerKernels.put": COMPUTED,
    "collectives/transport/gpu/peer_kernels.py PeerKernels.take": COMPUTED,
    "collectives/transport/node/shm.py NodeAwareTransport.__init__": COMPUTED,
    "collectives/transport/waits.py seconds_of": CHECKED,
    "parallel/checkpoint/tensor_slices.py TensorSlice.sources": "digits of a name",
    "parallel/checkpoint/tensor_slices.py natural_key": "digits of a name",
    "collectives/cli/bench.py slowest_ms": COMPUTED,
    "parallel/cli/draw_experts.py plot_expert_loads": COMPUTED,
    "parallel/cli/bench_dispatch.py copies_between": COMPUTED,
    "parallel/cli/bench_pipeline.py overhead": COMPUTED,
    "parallel/cli/batch_job.py _number": CHECKED,
    "parallel/runtime/resources.py node_count": COMPUTED,
    "parallel/cli/plan_arguments.py positive": TEXT,
    "parallel/cli/plan_cluster.py whole_number": TEXT,
    "parallel/cli/plan_graph.py mesh_sizes": TEXT,
    "parallel/cli/quantize_model.py search_widths": "compared with the value itself",
    "parallel/cli/train_run.py TrainingRun.steps": COMPUTED,
    "parallel/sharding/context/divided_router.py DividedRouter._of_tokens": "from narrow to wide floats",
    "parallel/data/datasets.py _classes": COMPUTED,
    "parallel/data/datasets.py _pair": CHECKED,
    "parallel/data/sequences.py PaddedSequences.__init__": COMPUTED,
    "parallel/data/sequences.py _cuts": COMPUTED,
    "parallel/data/shards.py ShardWriter.add": CHECKED,
    "parallel/data/shards.py _typed": CHECKED,
    "parallel/engine/data_parallel/sharded_optimizer.py ShardedOptimizer._allgather": COMPUTED,
    "parallel/engine/base.py TrainEngine._typed": ROUNDED,
    "parallel/engine/fingerprint.py text_of": "an array of one element",
    "parallel/sharding/expert/hierarchical_route.py HierarchicalRoute.__init__": COMPUTED,
    "parallel/engine/grad_compression/__init__.py lambda": CHECKED,
    "parallel/engine/grad_compression/__init__.py parse": TEXT,
    "parallel/engine/grad_compression/powersgd.py PowerSGD.exchange": COMPUTED,
    "parallel/nn/array_checks.py expect_range.judge_largest": "for a message",
    "parallel/nn/array_checks.py expect_range.judge_smallest": "for a message",
    "parallel/nn/depths.py DepthLayers.parse": TEXT,
    "parallel/nn/depths.py _within_block": TEXT,
    "parallel/nn/loss.py ElementLoss.count": COMPUTED,
    "parallel/nn/loss.py SoftmaxCrossEntropy._classes": CHECKED,
    "parallel/trainer/task_setup.py _number": TEXT,
    "parallel/nn/router.py Router._length": COMPUTED,
    "parallel/nn/router.py Router._of_tokens": "from narrow to wide floats",
    "parallel/nn/buffer.py SelectionBias.update": COMPUTED,
    "parallel/nn/buffer.py StateBuffer.end_step": COMPUTED,
    "parallel/optim/grad_norm.py total": COMPUTED,
    "parallel/optim/lr_schedules.py LRSchedule.__init__": "compared with the value itself",
    "parallel/optim/optimizer.py Optimizer.update": CHECKED,
    "parallel/optim/optimizer.py _is_rate": CHECKED,
    "parallel/asynchronous/server/event_order.py EventOrder.note": "an IntEnum",
    "parallel/asynchronous/server/worker_trainer.py WorkerTrainer._pass": ROUNDED,
    "parallel/cli/predict.py scores_of": ROUNDED,
    "parallel/data/text.py TextTokens.encode": "the library's numbers have 32 bits",
    "parallel/nn/operator.py _input": ROUNDED,
    "parallel/pipeline/config.py _numbers": TEXT,
    "parallel/ptq/load_model.py _load_weights.read": ROUNDED,
    "parallel/pipeline/config.py resolve.layers": ROUNDED,
    "parallel/planning/analytic/choice_search.py ChoiceProblem.cost": COMPUTED,
    "parallel/planning/analytic/graph_stages.py StagePlanner._sending": COMPUTED,
    "parallel/planning/analytic/machines.py Device._curve": COMPUTED,
    "parallel/planning/analytic/step_time.py _replica_seconds": COMPUTED,
    "parallel/planning/analytic/step_time.py message_seconds": COMPUTED,
    "parallel/ptq/calibration.py InputMoments.add": EXACT,
    "parallel/ptq/mixed_inputs.py _elements": COMPUTED,
    "parallel/runtime/step_report.py in_units": "compared with the value itself",
    "parallel/runtime/validation.py real_number": "an array of one element",
    "parallel/runtime/validation.py widened": CHECKED,
    "parallel/sharding/tensor/cut_model.py Cutter._cut": TEXT,
    "parallel/trainer/state_keeper.py StateKeeper._choose": COMPUTED,
    "parallel/trainer/state_keeper.py _rank_of": "a name that this module has made",
    "parallel/trainer/task_setup.py flops": COMPUTED,
    "parallel/trainer/task_setup.py prepare.lambda": ROUNDED,
    "parallel/nn/transforms/fake_quantized_input.py FakeQuantizedInput.forward": COMPUTED,
    "parallel/nn/transforms/fake_quantized_input.py MovingRange.load": CHECKED,
    "parallel/nn/transforms/fake_quantized_input.py MovingRange.state": COMPUTED,
    "parallel/nn/transforms/fake_quantized_input.py fake_quantized": COMPUTED,
    "parallel/nn/transforms/quantizable_layers.py expect_finite": "for a message",
    "quant/formats.py as_float32": "checked; codes are computed in float32",
    "quant/observers/histogram.py Histogram.observe": COMPUTED,
    "quant/observers/histogram.py Histogram.total": COMPUTED,
    "quant/ptq/awq.py awq.loss": EXACT,
    "quant/ptq/gptq.py _compensated": EXACT,
    "quant/ptq/gptq.py _inverse_root": CHECKED,
    "quant/ptq/gptq.py gptq.lambda": EXACT,
    "quant/ptq/gptq.py product_loss": EXACT,
    "quant/ptq/hqq.py _loss": EXACT,
    "quant/ptq/integer_matmul.py _sums": EXACT,
    "quant/ptq/integer_matmul.py integer_matmul": EXACT,
    "quant/ptq/smoothquant.py smoothing": EXACT,
    "quant/quantize.py _floats": "checked; codes are computed in float32",
    "quant/quantize.py _nonfinite_message": "for a message",
    "quant/scaling/codebook.py fit_groups": EXACT,
    "quant/scaling/codebook.py kmeans_exact": EXACT,
    "quant/scaling/codebook.py kmeans_lloyd": EXACT,
    "quant/scaling/codebook.py stored_levels": "for a message",
    "quant/scaling/scales.py halves": "the format of the scales",
    "quant/scaling/scales.py numbers_of": EXACT,
    "quant/scaling/scales.py zero_point": "a whole number of 8 bits",
    "quant/search.py _in_units": "compared with the value itself",
    "quant/search.py dynamic": COMPUTED,
    "quant/spec/granularity.py whole_number": CHECKED,
}


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LOOPS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Conversions(ast.NodeVisitor):
    """Conversions in a module, `found`: (name of the function, source text)."""

    def __init__(self):
        self.names, self.outside, self.found = [], [set()], []

    def visit(self, node):
        if isinstance(node, FUNCTIONS):
            self.visit_function(node)
            return
        if isinstance(node, ast.ClassDef):
            self.names.append(node.name)
        for loop in node.generators if isinstance(node, LOOPS) else [node] if isinstance(node, ast.For) else []:
            self.note_target(loop.target, loop.iter)
        if isinstance(node, ast.Assign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.note_names(target, node.value)
        if isinstance(node, ast.Call):
            self.note_call(node)
        self.generic_visit(node)
        if isinstance(node, ast.ClassDef):
            self.names.pop()

    def visit_function(self, node):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self.names.append(getattr(node, "name", "lambda"))
        self.outside.append(self.outside[-1] | {one.arg for one in named if one is not None})
        self.generic_visit(node)
        self.names.pop()
        self.outside.pop()

    def note_target(self, target, iterable):
        """Names that a loop over values from outside sets."""
        parts = iterable.args if isinstance(iterable, ast.Call) and not self.comes_in(iterable) else [iterable]
        several = [one for part in parts for one in (part.elts if isinstance(part, ast.Tuple) else [part])]
        if any(map(self.comes_in, several)):
            self.outside[-1] |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}

    def note_names(self, target, value):
        """Names that an assignment of values from outside sets."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts):
                self.note_names(one, its)
        elif isinstance(target, ast.Name | ast.Tuple) and self.comes_in(value):
            self.outside[-1] |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}

    def note_call(self, node):
        value = converted(node)
        if value is not None and self.comes_in(value):
            self.found.append((".".join(self.names), ast.unparse(node)))

    def comes_in(self, value):
        """True for an argument, its attributes, items and results; of `self` for a call of what it holds."""
        inner, called = value, False
        while isinstance(inner, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
            held = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)
            called |= held and isinstance(inner.func.value, ast.Attribute)
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
        if not isinstance(inner, ast.Name) or inner.id not in self.outside[-1]:
            return False
        return called or inner.id not in ("self", "cls")


def converted(call):
    """Value that a call converts to another type; None if it converts none."""
    function, arguments = call.func, call.args
    if isinstance(function, ast.Attribute):
        if function.attr in ("astype", "item"):
            return function.value
        typed = len(arguments) > 1 or any(keyword.arg == "dtype" for keyword in call.keywords)
        numpys = isinstance(function.value, ast.Name) and function.value.id in ("np", "xp", "cupy")
        converts = numpys and (function.attr in TYPES or (typed and function.attr in ARRAYS))
        return arguments[0] if arguments and converts else None
    if isinstance(function, ast.Name) and arguments:
        if function.id in ("int", "float"):
            return arguments[0]
        if function.id == "map" and isinstance(arguments[0], ast.Name) and arguments[0].id in ("int", "float"):
            return arguments[1]
    return None


def modules():
    for package in PACKAGES:
        for path in sorted((SOURCES / package).rglob("*.py")):
            place = path.relative_to(SOURCES)
            if not set(place.parts) & set(OWN):
                yield place, ast.parse(path.read_text())


def conversions(tree):
    visitor = Conversions()
    visitor.visit(tree)
    return visitor.found


def test_conversions_of_values_from_outside():
    found = {f"{place} {name}": text for place, tree in modules() for name, text in conversions(tree)}
    assert not {place: text for place, text in found.items() if place not in ALLOWED}
    assert not [place for place in ALLOWED if place not in found], "no longer there"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("def f(x): return int(x)", True),
        ("def f(loss, y): return float(loss.count(y))", True),
        ("def f(some): return [int(n) for n in some]", True),
        ("def f(a, b):\n for one in (a, b): one.astype('f4')", True),
        ("def f(self): return int(self._loss.count(1))", True),
        ("def f(x):\n y = x[0]\n return int(y)", True),
        ("def f(x): return int(y) if (y := x.n) else 0", True),
        ("def f(x): return tuple(map(int, x))", True),
        ("def f(x): return np.int64(x)", True),
        ("def f(x): return np.asarray(x, np.float32)", True),
        ("def f(x): return np.array(x, dtype=int)", True),
        ("def f(x): return x.item()", True),
        ("def f(x): return np.asarray(x)", False),
        ("def f(x): return operator.index(x)", False),
        ("def f(self): return int(self._count)", False),
        ("def f(x): return int(index)", False),
    ],
)
def test_what_is_found(source, is_found):
    assert bool(conversions(ast.parse(source))) == is_found

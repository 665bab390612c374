"""Device memory, staged and handed over directly: every collective, every algorithm, one to five ranks, without a GPU.

The stand-in for CuPy does nothing before someone waits for the stream, and its addresses belong to no process: results
are right only if every wait is there, and nothing but its own copies and kernels can have touched the memory.
"""

import sys
import threading
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from support.doc_examples import EXAMPLES, FORMS, check
from support.doc_examples import call as submit
from support.fakes import Foreign, GpuHub, NoInterface, cupy

from collectives import Communicator
from collectives.algorithms import catalog
from collectives.buffers import memory, staging
from collectives.buffers.arguments import vector
from collectives.runtime.arguments import call as calls
from collectives.runtime.binding import call_binding
from collectives.runtime.methods.collective_forms import DECLARATIONS
from collectives.selection.select import AlgorithmChoice
from collectives.transport.mpi import cuda_support

pytestmark = pytest.mark.usefixtures("gpu")

BASE = {
    "bcast": "broadcast",
    "reduce_scatter_block": "reduce_scatter",
    "scatterv": "scatter",
    "gatherv": "gather",
    "allgatherv": "allgather",
    "alltoallv": "alltoall",
}
ROOTED = ("bcast", "reduce", "scatter", "gather", "scatterv", "gatherv")
ALGORITHMS = [
    (name, algorithm)
    for name in EXAMPLES
    for algorithm, entry in catalog.CATALOG[BASE.get(name, name)].items()
    if entry.private or name not in ("scatterv", "gatherv", "alltoallv")
]


def call_of(example, send, recv, rank, size):
    declaration = next(entry for entry in DECLARATIONS if entry.name == example.method)
    v_form = {"v_form": True} if example.method.endswith("v") else {}
    return declaration.describe(*example.arguments(send, recv), rank, size, **v_form)


def alone(cuda_aware=None):
    return Communicator(MPI.COMM_SELF.Dup(), cuda_aware=cuda_aware)


def on_device(array):
    return None if array is None else cupy.asarray(array)


def blank(array):
    return None if array is None else cupy.empty(array.shape, array.dtype)


def everyone(size, part):
    """Run ``part(rank)`` in a thread per rank, each with a stream of its own; raise what any raised."""
    errors, streams = [], [cupy.cuda.Stream(non_blocking=True) for _ in range(size)]

    def run(rank):
        try:
            with streams[rank]:
                part(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [stream.number for stream in streams]


def play(name, algorithm, size, n, hub, direct, dtype="f4", root=0, in_place=False, segments=1, forms=("run",)):
    """All ranks do the collective: on the device itself where `direct` says so, through the host where not.

    What they bring is still on its way on their streams when the collective begins.
    """

    def part(rank):
        example = EXAMPLES[name](rank, size, n, dtype, root, in_place)
        send, recv = blank(example.send), blank(example.recv)
        call, lane = call_of(example, send, recv, rank, size), None
        if direct(rank):
            call, lane = call_binding.as_device_call(call)
        program = call_binding.bind_call(call, AlgorithmChoice(algorithm, segments), rank, size, hub.wire(rank), lane)
        for form in forms:
            for array, fresh in ((send, example.send), (recv, example.recv)):
                if array is not None:
                    array[...] = cupy.asarray(fresh)
            if lane is not None:
                lane.follow(*(array for array in (send, recv) if array is not None))
            if form == "run":
                program.run()
            else:
                program.start()
                while not program.advance():
                    pass
            if example.expected is not None:
                assert n == 0 or not cupy.GPU.touched(*recv._range)
                cupy.get_current_stream().synchronize() if n == 0 else None
                check(recv._seen(), example.expected)
        program.free()

    return everyone(size, part)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "algorithm"), ALGORITHMS)
def test_direct(gpu, name, algorithm, size):
    """Only device addresses reach the wire, and nothing reaches the host."""
    for n in (0, 3, 23):
        for root in {0, size - 1} if name in ROOTED else {0}:
            for in_place in (False, True):
                hub = GpuHub(size)
                play(name, algorithm, size, n, hub, lambda rank: True, root=root, in_place=in_place)
                assert hub.carried <= {True}
    assert {kind for kind, *_ in gpu.log} <= {"kernel", "wait", "query", "wait_event"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "algorithm"), ALGORITHMS)
def test_staged(gpu, name, algorithm, size):
    """No device address reaches the wire, and no kernel runs but those of the test itself."""
    for n in (0, 23):
        for in_place in (False, True):
            hub = GpuHub(size)
            play(name, algorithm, size, n, hub, lambda rank: False, root=size - 1, in_place=in_place)
            assert hub.carried <= {False}


@pytest.mark.parametrize("name", EXAMPLES)
def test_some_ranks_direct_and_some_staged(name):
    """Messages are the same bytes either way, so no rank need know what the others do."""
    for algorithm in [algorithm for collective, algorithm in ALGORITHMS if collective == name]:
        play(name, algorithm, 4, 23, GpuHub(4), lambda rank: rank % 2 == 0, dtype="i4")


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_again_and_again_blocking_and_not(name, way):
    """A program bound once serves new data every time, run through or advanced step by step."""
    for algorithm in [algorithm for collective, algorithm in ALGORITHMS if collective == name]:
        forms = ("run", "advance", "run", "advance")
        play(name, algorithm, 3, 11, GpuHub(3), lambda rank: way == "direct", forms=forms, in_place=True)


@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("algorithm", list(catalog.CATALOG["allreduce"]))
def test_messages_that_are_cut(monkeypatch, algorithm, way):
    """Parts are combined while others arrive, in landing slots that are used again: not before they are free."""
    monkeypatch.setattr(call_binding, "SEGMENT", 16)
    for size in (2, 3, 4):
        for segments in (1, 3):
            play("allreduce", algorithm, size, 203, GpuHub(size), lambda rank: way == "direct", segments=segments)


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_only_the_stream_of_the_arrays_is_waited_for(gpu, way):
    other = cupy.cuda.Stream(non_blocking=True)
    with other:
        elsewhere = cupy.zeros(3)  # stays under way for ever
    streams = play("allreduce", "ring", 3, 50, GpuHub(3), lambda rank: way == "direct")
    assert {stream for kind, stream, _ in gpu.log if kind in ("wait", "query")} == set(streams)
    assert gpu.touched(*elsewhere._range) == [other.number]


def test_no_wait_without_need(monkeypatch):
    """Before the first message and after the last; in between only where a message follows a sum."""
    mark, marks = staging.DeviceMemory.mark, []

    def marked(self):
        marks.append(None)
        mark(self)

    monkeypatch.setattr(staging.DeviceMemory, "mark", marked)

    def waits(name, algorithm, size):
        """Waits of a rank: each is for a mark of its own."""
        marks.clear()
        play(name, algorithm, size, 8, GpuHub(size), lambda rank: True)
        return len(marks) / size

    assert waits("bcast", "mst", 1) == 1
    assert waits("allgather", "ring", 4) == 2  # for what was there before, and for one's own block on its way home
    assert waits("allreduce", "ring", 4) == 1 + 3  # three sums, each sent on


def test_the_test_would_see_a_missing_wait(monkeypatch):
    monkeypatch.setattr(staging.DeviceMemory, "mark", lambda self: None)
    with pytest.raises((RuntimeError, AssertionError)):
        play("allreduce", "recursive_doubling", 2, 8, GpuHub(2), lambda rank: True)


def test_scratch_lies_on_the_device(gpu):
    x = cupy.asarray(np.ones(40, "f4"))
    call, lane = call_binding.as_device_call(calls.reduce(x, None, MPI.SUM, 0, 2, 4))
    program = call_binding.bind_call(call, AlgorithmChoice("mst"), 2, 4, GpuHub(4).wire(2), lane)
    assert program.nbytes > 0
    memories = program.memories
    assert all(isinstance(memory.array, cupy.ndarray) for memory in memories)
    assert sum(memory.array.nbytes for memory in memories[2:]) == program.nbytes


def test_sums_in_place_need_no_copy(gpu):
    play("allreduce", "ring", 3, 50, GpuHub(3), lambda rank: True, in_place=True)
    assert "hidden copy" not in {kind for kind, *_ in gpu.log}


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"])
def test_every_operation_with_a_kernel(op):
    x, y = cupy.asarray(np.arange(6, dtype="i4")), cupy.asarray(np.zeros(6, "i4"))
    found = call_binding.as_device_call(calls.allreduce(x, y, getattr(MPI, op), 0, 2))
    kernel = found[0].combine
    left, right = np.array([0, 1, 2, 3], "i4"), np.array([2, 1, 0, 3], "i4")
    here, there, out = cupy.asarray(left), cupy.asarray(right), cupy.zeros(4, "i4")
    kernel.bind(here, there, out)()
    expected = np.zeros(4, "i4")
    calls.combine(getattr(MPI, op), left.dtype, MPI.INT)(left, right, expected)
    np.testing.assert_array_equal(out.get(), expected)


def test_what_the_device_cannot_do_is_staged():
    user = MPI.Op.Create(lambda x, y, datatype: None)
    small = Foreign(cupy.zeros(64, "u1"), dtype=np.longdouble)
    x = cupy.zeros(4, "i4")
    for send, op in ((small, MPI.SUM), (x, user), (x, MPI.REPLACE)):
        assert call_binding.as_device_call(calls.allreduce(send, send, op, 0, 2)) is None
    assert call_binding.as_device_call(calls.broadcast(small, 0, 0, 2)) is not None  # bytes are bytes
    assert call_binding.as_device_call(calls.barrier()) is None
    user.Free()


def test_memory_in_two_places_is_staged(gpu):
    gpu.devices = 2
    here, there = cupy.zeros(4), np.zeros(4)
    assert call_binding.as_device_call(calls.allreduce(here, there, MPI.SUM, 0, 2)) is None
    assert call_binding.as_device_call(calls.allreduce(there, here, MPI.SUM, 0, 2)) is None
    with cupy.cuda.Device(1):
        second = cupy.empty(4)
    assert call_binding.as_device_call(calls.allreduce(here, second, MPI.SUM, 0, 2)) is None
    assert call_binding.as_device_call(calls.allreduce(here, here, MPI.SUM, 0, 2)) is not None


def test_the_second_device_is_worked_on_from_the_first(gpu):
    gpu.devices = 2
    with cupy.cuda.Device(1):
        x, y = cupy.asarray(np.arange(5.0)), cupy.asarray(np.zeros(5))
    call, lane = call_binding.as_device_call(calls.allreduce(x, y, MPI.SUM, 0, 1))
    assert lane.number == 1
    call_binding.bind_call(call, AlgorithmChoice("ring"), 0, 1, GpuHub(1).wire(0), lane).run()
    assert y._seen().tolist() == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------------------ streams


def test_the_stream_that_an_array_names(gpu):
    stream, mine = cupy.cuda.Stream(), cupy.cuda.Stream()
    with stream:
        memory = cupy.zeros(3)
        memory += 1  # still to come
    array = Foreign(memory, stream=stream)
    staged = staging.stage(vector(array, "x"), load=True, store=True)
    with mine:
        staged.load()
    assert staged.host.view("f8").tolist() == [1, 1, 1]
    assert {number for kind, number, _ in gpu.log if kind in ("wait", "to_host")} == {stream.number}


@pytest.mark.parametrize("pointer", [1, 0])
def test_the_default_stream_has_two_names(gpu, pointer):
    memory = cupy.zeros(3)
    array = Foreign(memory, stream=cupy.cuda.ExternalStream(1) if pointer else cupy.cuda.Stream.null)
    assert staging.DeviceMemory(array)._stream.number == 0


def test_streams_of_two_arrays_are_ordered_on_the_device(gpu):
    one, other = cupy.cuda.Stream(), cupy.cuda.Stream()
    with one:
        x = cupy.zeros(3)
        x += 1
    with other:
        y = cupy.zeros(3)
        y += 5  # would come after the result if nobody minded
    sender, receiver = Foreign(x, stream=one), Foreign(y, stream=other)
    call, lane = call_binding.as_device_call(calls.allreduce(sender, receiver, MPI.SUM, 0, 1))
    gpu.log.clear()
    lane.follow(sender, receiver)
    call_binding.bind_call(call, AlgorithmChoice("ring"), 0, 1, GpuHub(1).wire(0), lane).run()
    assert y._seen().tolist() == [1, 1, 1]
    assert {number for kind, number, _ in gpu.log if kind == "wait"} == {one.number}


def test_dlpack_orders_the_producer_first(gpu):
    theirs, ours = cupy.cuda.Stream(), cupy.cuda.Stream()
    with theirs:
        memory = cupy.zeros(3)
        memory += 2
    array = NoInterface(memory, theirs)
    with ours:
        staged = staging.stage(vector(array, "x"), load=True, store=False)
        staged.load()
    assert array.asked[-1] == ours.ptr
    assert staged.host.view("f8").tolist() == [2, 2, 2]
    assert {number for kind, number, _ in gpu.log if kind == "wait"} == {ours.number}


def test_a_later_call_follows_the_stream_of_its_own_time(gpu):
    """The program is kept for the same memory; the stream is the caller's at each call."""
    comm = alone(True)
    x, y = cupy.zeros(2000, "f4"), cupy.zeros(2000, "f4")
    both = x, y
    bound = comm.Allreduce_init(x, y)

    def again():
        bound.Start()
        bound.Wait()

    for turn, work in enumerate([partial(comm.Allreduce, x, y), lambda: comm.Iallreduce(*both).Wait(), again] * 2):
        stream = cupy.cuda.Stream()
        with stream:
            cupy.GPU.run(0, gpu.begun[0])
            x += 1
            gpu.log.clear()
            work()
            assert [entry for entry in gpu.log if entry[0] != "wait_event"] == [("copy", stream.number, 8000)]
            assert (y.get() == turn + 1).all()
    bound.Free()
    programs = comm._planner
    assert len(programs.cache.bound) == 1 and len(programs.nonblocking.bound) == 2  # each on a channel of its own
    comm.Free()


# ------------------------------------------------------------------------------------------ the communicator's part


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("cuda_aware", [True, False])
def test_on_one_rank(gpu, name, cuda_aware):
    """In every form: no wait of the host, and at most a copy on the device, which is none in place."""
    comm = alone(cuda_aware)
    assert comm.device_transfer == "none: one rank"
    for n, in_place, form in product((0, 5, 3000), (False, True), FORMS):
        example = EXAMPLES[name](0, 1, n, "f4", 0, in_place)
        send, recv = on_device(example.send), on_device(example.recv)
        arguments = example.arguments(send, recv)
        same = n == 0 or any(one is MPI.IN_PLACE for one in arguments)
        gpu.log.clear()
        submit(comm, example.method, form, arguments)
        assert [kind for kind, *_ in gpu.log] in ([[]] if same else [[], ["copy"]])
        check(recv.get(), example.expected)
    comm.Free()


def test_any_operation_on_one_rank(gpu):
    """Those of users, which could run on the host only, and of derived datatypes, which are moved as bytes."""
    comm, op = alone(), MPI.Op.Create(lambda *_: pytest.fail("nothing is reduced"))
    x, y = cupy.full(7, 3.5, "f8"), cupy.zeros(7, "f8")
    gpu.log.clear()
    comm.Allreduce(x, y, op)
    comm.Iscan(MPI.IN_PLACE, x, op).Wait()
    assert [kind for kind, *_ in gpu.log] == ["copy"] and (y.get() == 3.5).all()
    pair = MPI.DOUBLE.Create_contiguous(2).Commit()
    z = cupy.zeros(6, "f8")
    gpu.log.clear()
    comm.Reduce_scatter([x, 3, pair], [z, 3, pair], [3], op)
    assert [kind for kind, *_ in gpu.log] == ["copy"] and (z.get() == 3.5).all()
    pair.Free()
    op.Free()
    comm.Free()


def test_one_rank_with_memory_in_two_places(gpu):
    """Host and device, and elements with gaps: staged as by several ranks."""
    comm, x, y = alone(), cupy.full(6, 2, "i4"), np.zeros(6, "i4")
    comm.Allreduce(x, y)
    assert (y == 2).all()
    column = MPI.INT.Create_vector(3, 1, 2).Commit()
    comm.Bcast([x, 1, column])
    comm.Allgather([x, 1, column], y[:3])
    column.Free()
    comm.Free()


def test_one_rank_copies_in_the_order_of_both_streams(gpu):
    """As by `follow` and `join`: after the work on the stream of either array, and before later work there."""
    comm, one, other = alone(), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.zeros(100, "f4"), cupy.zeros(100, "f4")
    shown = [Foreign(array, stream=stream) for array, stream in ((x, one), (y, other))]
    with one:
        x += 1
    comm.Allreduce(*shown)
    with other:
        y += 1
        assert (y.get() == 2).all()
    comm.Free()


def test_new_communicators_inherit_the_setting():
    for setting in (True, False, None):
        comm = alone(setting)
        others = [comm.Dup(), comm.Split(0), comm.Clone(), comm.Split_type(MPI.COMM_TYPE_SHARED)]
        expected = cuda_support.cuda_aware() if setting is None else setting
        assert [other._planner.transports.aware for other in others] == [expected] * 4
        for made in (*others, comm):
            made.Free()


def test_by_default_the_mpi_decides(monkeypatch):
    for answer in (True, False):
        monkeypatch.setattr(cuda_support, "cuda_aware", lambda answer=answer: answer)
        comm = alone()
        assert comm._planner.transports.aware is answer
        comm.Free()


@pytest.mark.parametrize("cuda_aware", [True, False])
def test_arrays_of_one_memory_overlap(cuda_aware):
    comm = alone(cuda_aware)
    x = cupy.zeros(10)
    for method in (comm.Allreduce, comm.Iallreduce, comm.Allreduce_init):
        with pytest.raises(ValueError, match="overlap"):
            method(x[:8], x[2:])
    comm.Free()


def test_host_memory_with_a_cuda_array_interface(monkeypatch):
    """CUDA knows the memory or does not; without a driver the CPU reads it or does not."""
    x = np.arange(3.0)
    interface = {"shape": x.shape, "typestr": x.dtype.str, "data": (x.ctypes.data, False)}
    shown = SimpleNamespace(__cuda_array_interface__=interface)
    assert not vector(shown, "x").device
    runtime = cupy.cuda.runtime
    for kind in range(4):  # unregistered, pinned, device, managed
        monkeypatch.setattr(runtime, "pointerGetAttributes", lambda _, kind=kind: SimpleNamespace(device=0, type=kind))
        assert vector(shown, "x").device == (kind > 0)


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    comm = alone()
    x = cupy.zeros(3)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(memory, "_readable", lambda address: False)  # as that of a GPU
    with pytest.raises(ImportError, match=r"array of type 'ndarray' is on a device.*pip install cupy-cuda12x"):
        comm.Allreduce(MPI.IN_PLACE, x)
    comm.Free()


# ------------------------------------------------------------------------------------------ asking the MPI


def test_the_mpi_of_this_process_is_found_and_asked():
    """The wheels that these tests run with are built without CUDA; another MPI may say what it likes."""
    assert cuda_support.cuda_aware() in (True, False)


MAPS = """\
7f1c-7f1d r-xp 00000000 08:01 11 /opt/lib/libmpi.so.12.0.0
7f1e-7f1f r--p 00000000 08:01 11 /opt/lib/libmpi.so.12.0.0
7f20-7f21 r--p 00000000 08:01 12 /opt/my libs/libmpi_abi.so.1
7f22-7f23 r--p 00000000 08:01 13 /opt/lib/libmpifort.so.12
7f24-7f25 r--p 00000000 08:01 14 /opt/lib/python/mpi4py/libmpi.cfg
7f26-7f27 rw-p 00000000 00:00 0
7f28-7f29 r--p 00000000 08:01 15 /opt/lib/libmpi.so.40 (deleted)
"""


def test_libraries_in_the_list_of_mapped_files(tmp_path):
    (tmp_path / "maps").write_text(MAPS)
    assert cuda_support.loaded(tmp_path / "maps") == ["/opt/lib/libmpi.so.12.0.0", "/opt/my libs/libmpi_abi.so.1"]
    assert cuda_support.loaded(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("answers", "aware"),
    [([[True]], True), ([[True, True]], True), ([[True, False]], False), ([[True], [False]], False), ([[]], False)],
)
def test_only_clear_answers_count(monkeypatch, answers, aware):
    left = list(answers)
    monkeypatch.setattr(cuda_support, "loaded", lambda maps: ["libmpi.so"] * len(answers))
    monkeypatch.setattr(cuda_support, "query_support", lambda path: left.pop(0))
    assert cuda_support.cuda_aware.__wrapped__() is aware


def test_a_library_that_is_not_loaded_is_not_asked():
    assert cuda_support.query_support("/nowhere/libmpi.so.12") == []

"""Descriptions of arguments, against what mpi4py itself makes of them.

One rank is enough to see mpi4py's blocks: on a graph communicator whose only rank is k times its own
neighbour, ``Neighbor_alltoall`` moves k blocks from a send argument to a receive argument. What arrives shows
which bytes mpi4py took for the argument.
"""

import array
import ctypes
import gc
import pickle
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from collectives.buffers import dlpack
from collectives.buffers.arguments import Buffer, blocks, blocks_v, numbers, vector
from collectives.buffers.datatypes import PAIRS, element_of, kind
from collectives.buffers.memory import view
from collectives.buffers.staging import PackedStaging
from collectives.errors import InvalidArgument, InvalidBuffer, InvalidType, UnknownDatatype

NUMERIC = [np.dtype(char) for char in "?bhilqBHILQefdgFDG"]
SMALL = [np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4)]


@pytest.fixture(scope="module")
def neighbours():
    """k -> a communicator on which this rank is k times its own neighbour."""
    made = {}

    def of(k):
        if k not in made:
            made[k] = MPI.COMM_SELF.Create_dist_graph_adjacent([0] * k, [0] * k)
        return made[k]

    yield of
    for comm in made.values():
        comm.Free()


@pytest.fixture(scope="module")
def datatypes():
    """Derived datatypes of every awkward kind."""
    struct = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.DOUBLE, MPI.INT])
    strided = MPI.INT.Create_vector(2, 1, 2)
    made = {
        "run": MPI.INT.Create_contiguous(2),
        "copy": MPI.DOUBLE.Dup(),
        "strided": strided,
        "padded": strided.Create_resized(0, 16),
        "swapped": MPI.INT.Create_indexed([1, 1], [1, 0]),
        "struct": struct,
        "late": MPI.INT.Create_hindexed([1], [4]),
    }
    for datatype in made.values():
        datatype.Commit()
    yield made
    for datatype in made.values():
        datatype.Free()


def payload(buffer):
    """The described bytes, one block after the other."""
    if not buffer.contiguous:
        packed = PackedStaging(buffer, load=True, store=False)
        packed.load()
        return packed.host.tobytes()
    if buffer.counts is None:
        return view(buffer.address, buffer.nbytes, np.dtype("u1")).tobytes()
    return b"".join(
        view(buffer.address + displ * buffer.extent, count * buffer.itemsize, np.dtype("u1")).tobytes()
        for count, displ in zip(buffer.counts, buffer.displs, strict=True)
    )


# --- plain arrays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (0,), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [*NUMERIC, *SMALL], ids=str)
def test_plain_array(dtype, shape):
    x = np.ones(shape, dtype)
    for order in (x, np.asfortranarray(x)):
        for _ in range(2):  # the second time from the cache
            b = vector(order, "x", writable=True)
            assert (b.count, b.block, b.nbytes, b.itemsize) == (x.size, x.size, x.nbytes, dtype.itemsize)
            assert b.dtype == dtype and b.extent == dtype.itemsize and b.counts is None is b.displs
            assert b.contiguous and not b.device and not b.readonly
            assert payload(b) == x.tobytes()
        if dtype not in SMALL:
            assert b.datatype.Get_size() == dtype.itemsize
            assert element_of(b.datatype).dtype == dtype
        elif dtype != np.dtype("e"):
            assert b.datatype is None


def test_kind_sees_through_small_types():
    assert [kind(np.dtype(t)) for t in (ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4, "i4", "?")] == [*"fiuib"]


def test_the_memory_lives_as_long_as_the_description():
    x = np.arange(4.0)
    alive = weakref.ref(x)
    b = vector(x, "x")
    del x
    gc.collect()
    assert alive() is not None and view(b.address, 4, b.dtype).tolist() == [0, 1, 2, 3]
    del b
    gc.collect()
    assert alive() is None


def test_a_view_writes_through():
    x = np.zeros(4, ml_dtypes.bfloat16)
    view(vector(x, "x").address, 4, x.dtype)[:] = 3
    assert (x == 3).all()
    assert view(0, 0, x.dtype).shape == (0,)


def test_repr_says_what_it_is():
    assert repr(vector(np.zeros(3, "f4"), "x")) == "<Buffer of 3 float32, host memory>"
    apart = blocks_v([np.zeros(3, "f4"), [2, 1]], 2, "x")
    assert repr(apart) == "<Buffer of 3 float32 in blocks (2, 1) at (0, 2), host memory>"


# --- other memory -------------------------------------------------------------------------------------------

BUFFERS = {
    "bytearray": lambda: bytearray(range(8)),
    "memoryview": lambda: memoryview(bytearray(range(8))).cast("i"),
    "memoryview 2-d": lambda: memoryview(bytearray(range(8))).cast("B", (2, 4)),
    "array": lambda: array.array("h", range(4)),
    "array of characters": lambda: array.array("u", "abc"),
    "ctypes": lambda: (ctypes.c_double * 3)(1, 2, 3),
    "ctypes bool": lambda: (ctypes.c_bool * 3)(True, False, True),
    "ctypes scalar": lambda: ctypes.c_int(7),
    "mpi4py": lambda: MPI.buffer.allocate(8, clear=True),
    "matrix": lambda: np.arange(4.0).reshape(2, 2).view(np.matrix),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "memmap": lambda: np.arange(4.0).view(np.memmap),
    "characters": lambda: np.array([b"a", b"b"], "S1"),
    "wide characters": lambda: np.array(["a", "b"], "U1"),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("name", BUFFERS)
def test_any_buffer(neighbours, name, writable):
    obj = BUFFERS[name]()
    b = vector(obj, "x", writable)
    expected = memoryview(obj).tobytes()
    assert payload(b) == expected and b.nbytes == len(expected) and b.contiguous
    assert b.dtype == element_of(b.datatype).dtype and b.dtype.itemsize == b.itemsize
    out = bytearray(b.nbytes)
    neighbours(1).Neighbor_alltoall(obj, [out, b.count, b.datatype])  # the same count and type for mpi4py
    assert out == expected


@pytest.mark.parametrize("obj", [b"abcd", np.float64(3), memoryview(b"abcd")], ids=lambda obj: type(obj).__name__)
def test_read_only_buffers_can_only_be_sent(obj):
    assert vector(obj, "sendbuf").readonly
    with pytest.raises(InvalidBuffer, match=r"recvbuf: an object of type .* is read-only"):
        vector(obj, "recvbuf", writable=True)


class Exports:
    """Offers an array by DLPack and by nothing else."""

    def __init__(self, x, version):
        self.x, self.version = x, version

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        if self.version == 0 and options:
            raise TypeError("unexpected keyword")
        return self.x.__dlpack__(**options)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("dtype", [d for d in NUMERIC if d.char not in "gG"], ids=str)
def test_dlpack(dtype, version):
    x = np.ones((2, 3), dtype)
    b = vector(Exports(x, version), "x", writable=True)
    assert b.dtype == dtype and b.count == 6 and b.address == MPI.Get_address(x) and not b.device
    gc.collect()
    assert payload(b) == x.tobytes()
    assert blocks([Exports(x, version), (1, 2), b.datatype], 3, "x").address == b.address + 2 * dtype.itemsize


_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Pairs:
    """Offers complex numbers by DLPack as pairs of floats, as mpi4py does: their bits may not fit DLPack's field."""

    def __init__(self, x, lanes=2):
        self.x, self.shape = x, (ctypes.c_int64 * 1)(x.size)
        self.tensor = dlpack._Tensor(x.ctypes.data, (1, 0), 1, (2, x.itemsize * 8 // lanes, lanes), self.shape, None, 0)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self):
        return _capsule(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize("char", "FDG")
def test_dlpack_with_two_lanes_is_complex(char):
    x = np.arange(4).astype(char)
    for spec, count in ((Pairs(x), 4), ([Pairs(x), 3], 3), ([Pairs(x), (2, 1), char], 2)):
        b = vector(spec, "x", writable=True)
        assert b.dtype == x.dtype and b.count == count
    b = blocks_v([Pairs(x), ([1, 2], [0, 2])], 2, "x")
    assert b.dtype == x.dtype and b.counts == (1, 2) and b.displs == (0, 2)


def test_dlpack_with_other_lanes_has_no_type():
    x = np.arange(4, dtype="D")
    with pytest.raises(UnknownDatatype, match="have no MPI datatype"):
        vector(Pairs(x, lanes=4), "x")
    assert vector([Pairs(x, lanes=4), MPI.C_DOUBLE_COMPLEX], "x").count == 4


def test_dlpack_refuses_what_cannot_be_used():
    x = np.arange(12.0).reshape(3, 4)
    with pytest.raises(InvalidBuffer, match=r"x: array of shape \(3,\), strides \(32,\) is not contiguous"):
        vector(Exports(x[:, 0], 1), "x")
    assert vector(Exports(x.T, 1), "x").count == 12
    x.flags.writeable = False
    assert vector(Exports(x, 1), "x").readonly
    with pytest.raises(InvalidBuffer, match="read-only"):
        vector(Exports(x, 1), "x", writable=True)

    class Refuses(Exports):
        def __dlpack__(self, **options):
            raise BufferError("requires grad")

    with pytest.raises(InvalidBuffer, match="x: requires grad"):
        vector(Refuses(x, 1), "x")


class OnCuda:
    """Shows memory at an address by the CUDA array interface and by nothing else."""

    def __init__(self, x, address=None):
        data = (x.ctypes.data if address is None else address), not x.flags.writeable
        self.__cuda_array_interface__ = {"version": 3, "shape": x.shape, "typestr": x.dtype.str, "data": data}


def test_host_memory_with_a_cuda_array_interface():
    """mpi4py gives such addresses to the MPI; its own tests do."""
    x = np.arange(6.0)
    b = vector(OnCuda(x), "x", writable=True)
    assert not b.device and b.count == 6 and payload(b) == x.tobytes()
    assert not vector(OnCuda(x[:0]), "x").device
    x.flags.writeable = False
    with pytest.raises(InvalidBuffer, match="read-only"):
        vector(OnCuda(x), "x", writable=True)
    assert vector(OnCuda(x, address=64), "x").device, "the CPU cannot read it"


# --- datatypes ----------------------------------------------------------------------------------------------


def test_every_predefined_datatype():
    for name in dir(MPI):
        datatype = getattr(MPI, name)
        if not isinstance(datatype, MPI.Datatype) or datatype == MPI.DATATYPE_NULL:
            continue
        if datatype.Get_size() == 0:  # Open MPI has names for some Fortran types that it lacks
            with pytest.raises(InvalidType, match="this MPI library has no"):
                element_of(datatype)
            continue
        dtype = element_of(datatype).dtype
        assert dtype.itemsize == datatype.Get_size(), name
        assert (dtype.names is None) == (
            not name.endswith(("_INT", "TWOINT")) or name in ("UNSIGNED_INT", "SIGNED_INT", "F_INT")
        ), name
        b = vector([np.zeros(64, "u1"), 2, datatype], name)
        assert b.contiguous == (datatype.Get_size() == datatype.Get_extent()[1])
    assert (
        element_of(MPI.INT).dtype == "i4" and element_of(MPI.BYTE).dtype == "u1" and element_of(MPI.CHAR).dtype == "S1"
    )
    assert (
        element_of(MPI.AINT).dtype == "i8"
        and element_of(MPI.C_BOOL).dtype == "?"
        and element_of(MPI.REAL8).dtype == "f8"
    )
    assert element_of(MPI.Datatype.Create_f90_real(15, 300)).dtype == "f8"


def test_derived_datatypes(datatypes):
    x = np.zeros(16, "i4")
    seen = {name: vector([x, 1, datatype], name) for name, datatype in datatypes.items()}
    assert {name for name, b in seen.items() if b.contiguous} == {"run", "copy"}
    assert {name for name, b in seen.items() if b.dtype is not None} == {"copy"}
    assert (seen["padded"].itemsize, seen["padded"].extent) == (8, 16)
    assert all(b.datatype == datatypes[name] for name, b in seen.items())


def test_a_datatype_may_reach_beyond_its_extent(datatypes):
    assert datatypes["late"].Get_extent() == (4, 4)
    with pytest.raises(InvalidBuffer, match=r"x: count 3 of .* needs 16 bytes, the buffer has 12"):
        vector([np.zeros(3, "i4"), datatypes["late"]], "x")  # mpi4py writes one past the end here
    assert vector([np.zeros(3, "i4"), 2, datatypes["late"]], "x").count == 2


def test_a_duplicate_of_a_predefined_type_is_that_type():
    twice = MPI.DOUBLE_INT.Dup()
    again = twice.Dup()
    assert element_of(again).dtype == element_of(MPI.DOUBLE_INT).dtype
    twice.Free()
    again.Free()


@pytest.mark.parametrize("pair", PAIRS)
def test_structured_arrays_like_mpi_pairs(pair):
    value, location = PAIRS[pair]
    x = np.zeros(3, np.dtype([("x", value), ("i", location)], align=True))
    b = vector(x, "x")
    assert b.count == 3 and b.datatype == getattr(MPI, pair) and b.dtype.names == ("val", "loc")


WRONG_TYPES = [
    (np.zeros(2, object), UnknownDatatype, "x: an array of Python objects"),
    ([np.zeros(2, object), MPI.BYTE], UnknownDatatype, "x: an array of Python objects"),
    (np.zeros(2, "f4,f4"), UnknownDatatype, "x: structured dtype .* is laid out like no MPI pair type"),
    (np.zeros(2, [("v", "f8"), ("i", "i4")]), UnknownDatatype, "structured dtype"),
    (
        np.zeros(2, "M8[s]"),
        UnknownDatatype,
        r"x: dtype datetime64\[s\].* has no MPI datatype; send its integers",
    ),
    (np.zeros(2, "S4"), UnknownDatatype, r"x: dtype bytes32 \('\|S4'\) has no MPI datatype"),
    (np.zeros(2, np.dtype("i4").newbyteorder()), UnknownDatatype, "not in native byte order"),
    ([np.zeros(2), "zz"], UnknownDatatype, "x: 'zz' names no MPI datatype"),
    ([np.zeros(2), 1, 2.5], UnknownDatatype, r"x: 2.5 names no MPI datatype"),
    ([np.zeros(2), MPI.DATATYPE_NULL], InvalidType, "x: the datatype is MPI.DATATYPE_NULL"),
    ([None, 0], UnknownDatatype, "needs an explicit datatype"),
    (17, InvalidType, "x: expected an array, a buffer, or .* found 'int'"),
    ("text", InvalidType, "x: expected an array, a buffer, or .* found 'str'"),
    ([np.zeros(2), 1.0, MPI.DOUBLE], InvalidType, "x: count: expected an integer, found 1.0"),
    ([np.zeros(2), (1, "a"), MPI.DOUBLE], InvalidType, "x: displacement: expected an integer, found 'a'"),
]


@pytest.mark.parametrize(("spec", "error", "message"), WRONG_TYPES)
@pytest.mark.parametrize("parse", [vector, lambda spec, name: blocks(spec, 1, name)], ids=["vector", "blocks"])
def test_wrong_types(parse, spec, error, message):
    with pytest.raises(error, match=message) as caught:
        parse(spec, "x")
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, MPI.Exception)


def test_ctypes_structures_have_no_datatype():
    class Point(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int),)

    with pytest.raises(UnknownDatatype):
        vector(Point(1), "x")


WRONG_VALUES = [
    (np.zeros((3, 4))[:, 1], MPI.ERR_BUFFER, r"x: array of shape \(3,\), strides \(32,\) is not contiguous"),
    (
        memoryview(bytes(8))[::2],
        MPI.ERR_BUFFER,
        r"x: array of shape \(4,\), strides \(2,\) is not contiguous",
    ),
    (
        [np.zeros(3), 4, MPI.DOUBLE],
        MPI.ERR_TRUNCATE,
        r"count 4 of MPI_DOUBLE needs 32 bytes, the buffer has 24 bytes \(3 el",
    ),
    ([np.zeros(3), (3, 1), MPI.DOUBLE], MPI.ERR_TRUNCATE, r"needs 32 bytes, the buffer has 24 bytes"),
    (
        [np.zeros(3), (0, 4), MPI.DOUBLE],
        MPI.ERR_BUFFER,
        "x: displacement 4 is behind the end of 3 MPI_DOUBLE",
    ),
    ([np.zeros(3), -1], MPI.ERR_COUNT, "x: negative count -1"),
    ([np.zeros(3), (1, -1)], MPI.ERR_ARG, "x: negative displacement -1"),
    ([np.zeros(3), 1 << 70], MPI.ERR_COUNT, "does not fit in 64 bits"),
    (
        [np.zeros(3, "i4"), MPI.DOUBLE],
        MPI.ERR_COUNT,
        "12 bytes are no multiple of the datatype's extent of 8 bytes",
    ),
    ([np.zeros(3)], MPI.ERR_ARG, r"x: expected \[array, ...\] of 2 to 4 items"),
    ([np.zeros(3), 1, 0, MPI.INT, 4], MPI.ERR_ARG, "found 5"),
    ([np.zeros(3), (1, 2, 3)], MPI.ERR_ARG, r"x: expected a pair \(count, displacement\)"),
    ([None, 2, MPI.INT], MPI.ERR_BUFFER, "x: the array is None but the count is 2"),
]


@pytest.mark.parametrize(("spec", "code", "message"), WRONG_VALUES)
def test_wrong_values(spec, code, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        vector(spec, "x")
    assert caught.value.Get_error_class() == code and isinstance(caught.value, ValueError)


def test_read_only_arrays():
    x = np.zeros(3)
    x.flags.writeable = False
    assert vector(x, "sendbuf").readonly
    for parse in (
        vector,
        lambda *a, **k: blocks(a[0], 3, *a[1:], **k),
        lambda *a, **k: blocks_v(a[0], 3, *a[1:], **k),
    ):
        with pytest.raises(InvalidBuffer, match="recvbuf: the array is read-only and cannot receive") as caught:
            parse(x, "recvbuf", writable=True)
    assert isinstance(caught.value, BufferError)


def test_blocks_must_divide():
    with pytest.raises(InvalidArgument, match="recvbuf: 7 elements cannot be divided into 3 equal blocks"):
        blocks(np.zeros(7), 3, "recvbuf")
    with pytest.raises(InvalidBuffer, match="3 blocks of 3 of MPI_DOUBLE needs 72 bytes, the buffer has 56"):
        blocks([np.zeros(7), 3, MPI.DOUBLE], 3, "recvbuf")


WRONG_BLOCKS = [
    ([np.zeros(6), [1, 2]], MPI.ERR_COUNT, "x: counts: expected 3 items, one per rank, found 2"),
    ([np.zeros(6), [1, 2, -3]], MPI.ERR_COUNT, r"x: counts: expected no negative number, found \(1, 2, -3\)"),
    ([np.zeros(6), ([1, 2, 3], [0, 1])], MPI.ERR_ARG, "x: displs: expected 3 items, one per rank, found 2"),
    (
        [np.zeros(6), [3, 2, 2]],
        MPI.ERR_TRUNCATE,
        r"block 2 \(count 2, displacement 5\) of MPI_DOUBLE needs 56 bytes",
    ),
    ([np.zeros(6), ([1, 1, 1], [0, -1, 0])], MPI.ERR_BUFFER, r"block 1 .* begins 8 bytes before the buffer"),
    ([np.zeros(6), (1, 2, 3)], MPI.ERR_ARG, "expected a pair .* give counts alone as a list"),
    ([None, [0, 1, 0], MPI.INT], MPI.ERR_BUFFER, "the array is None but the counts are"),
]


@pytest.mark.parametrize(("spec", "code", "message"), WRONG_BLOCKS)
def test_wrong_blocks(spec, code, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        blocks_v(spec, 3, "x")
    assert caught.value.Get_error_class() == code


def test_wrong_kinds_of_counts():
    for counts in ([1, 2.0, 3], 1.5, {"a": 1}):
        with pytest.raises((InvalidType, InvalidArgument), match="x: counts"):
            blocks_v([np.zeros(6), counts], 3, "x")


def test_numbers():
    assert numbers(np.array([3, 0, 2]), 3, "recvcounts") == (3, 0, 2)
    assert numbers(np.int8(2), 3, "recvcounts") == (2, 2, 2)
    with pytest.raises(InvalidArgument, match="recvcounts: expected 2 items"):
        numbers([1], 2, "recvcounts")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_v_forms_default_to_an_even_share(n, size):
    b = blocks_v(np.zeros(n), size, "x")
    assert sum(b.counts) == n and max(b.counts) - min(b.counts) <= 1 and b.counts == tuple(sorted(b.counts)[::-1])
    assert b.displs == tuple(sum(b.counts[:i]) for i in range(size))


def test_bottom():
    b = vector([MPI.BOTTOM, 0, MPI.INT], "x")
    assert (b.address, b.count, b.nbytes) == (0, 0, 0)
    assert vector([None, MPI.INT], "x").count == 0
    assert blocks_v([None, MPI.INT], 3, "x").counts == (0, 0, 0)


def test_errors_survive_pickling():
    with pytest.raises(InvalidBuffer) as caught:
        vector([np.zeros(3), 4, MPI.DOUBLE], "x")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.Get_error_class() == MPI.ERR_TRUNCATE
    assert type(again) is InvalidBuffer and "needs 32 bytes" in repr(again)


# --- the same as mpi4py -------------------------------------------------------------------------------------

ARRAYS = {
    "f8": lambda n: np.arange(n, dtype="f8"),
    "i4": lambda n: np.arange(n, dtype="i4"),
    "i2 matrix": lambda n: np.arange(2 * n, dtype="i2").reshape(2, n),
    "c8 Fortran": lambda n: np.asfortranarray(np.arange(2 * n, dtype="c8").reshape(2, n)),
    "strided": lambda n: np.arange(2 * n, dtype="i4")[::2],
    "reversed": lambda n: np.arange(n, dtype="i4")[::-1],
    "0-d": lambda n: np.array(n, dtype="i4"),
    "bool": lambda n: np.arange(n) % 2 == 0,
    "half": lambda n: np.arange(n, dtype="e"),
    "S4": lambda n: np.zeros(n, "S4"),
    "swapped": lambda n: np.zeros(n, np.dtype("i4").newbyteorder()),
    "structured": lambda n: np.zeros(n, "f4,f4"),
    "bytearray": lambda n: bytearray(range(4 * n)),
    "bytes": lambda n: bytes(range(4 * n)),
    "array": lambda n: array.array("i", range(n)),
    "read-only": lambda n: np.frombuffer(bytes(range(4 * n)), "i4") if n else np.zeros(0, "i4"),
    "list": lambda n: list(range(n)),
    "None": lambda n: None,
}
TYPES = [None, MPI.INT, MPI.DOUBLE, MPI.BYTE, MPI.DOUBLE_INT, MPI.SHORT_INT]
TYPES += ["f", "i4", "Zd", "zz", "run", "copy", "strided", "padded", "swapped", "struct", "late"]

integers = st.integers(-1, 6) | st.integers(0, 3).map(np.int64)
odd = st.sampled_from([1.5, "x", True, np.array(2), np.array([1]), 1 << 80])
count = st.none() | integers | integers | odd
series = st.lists(integers, min_size=0, max_size=4) | st.lists(st.integers(0, 3), min_size=1, max_size=4)
counts = st.none() | integers | series | series.map(np.array) | odd


@st.composite
def specifications(draw, number):
    """(how the array is made, its length, counts, displacements, datatype, how these are nested)."""
    return (
        draw(st.sampled_from(sorted(ARRAYS))),
        draw(st.integers(0, 12)),
        draw(number),
        draw(number),
        draw(st.sampled_from(TYPES)),
        draw(st.sampled_from(["a", "at", "ac", "acd", "act", "acdt", "a(cd)t", "a(cd)", "a[cd]t", "accdt"])),
        draw(st.sampled_from([list, tuple])),
    )


def fenced(a):
    """The same array in the midst of other memory, and that memory."""
    if not isinstance(a, np.ndarray) or not a.flags.forc or not a.flags.writeable:
        return a, np.zeros(0, "u1")
    memory = np.full(a.nbytes + 256, 0xAA, "u1")
    order = "C" if a.flags.c_contiguous else "F"
    inside = np.ndarray(a.shape, a.dtype, memory.data, 128, order=order)
    inside[...] = a
    return inside, memory


def specified(a, spec, datatypes):
    _, _, c, d, t, form, outer = spec
    t = datatypes.get(t, t) if isinstance(t, str) else t
    if form == "a":
        return a
    parts = {"at": [a, t], "ac": [a, c], "acd": [a, c, d], "act": [a, c, t], "acdt": [a, c, d, t]}
    parts |= {
        "a(cd)t": [a, (c, d), t],
        "a(cd)": [a, (c, d)],
        "a[cd]t": [a, [c, d], t],
        "accdt": [a, c, c, d, t],
    }
    return outer(parts[form])


def dangerous(error):
    """Whether mpi4py would let it through, to read or write what is not ours."""
    past = error.Get_error_class() == MPI.ERR_TRUNCATE
    return past or "begins" in str(error) or "no negative number" in str(error) or "None but the counts" in str(error)


def same_as_mpi4py(comm, move, parse, spec, datatypes, writable):
    a, memory = fenced(ARRAYS[spec[0]](spec[1]))
    spec = specified(a, spec, datatypes)
    try:
        ours: Buffer | None = parse(spec, writable)
    except MPI.Exception as error:
        if dangerous(error):
            event("mpi4py would go out of bounds")
            return
        ours = None
    size = 0 if ours is None else ours.nbytes
    other = np.arange(100, 100 + size, dtype="u1") if writable else np.full(size, 0xEE, "u1")
    k = comm.Get_dist_neighbors_count()[0]
    if ours is not None and ours.counts is not None:
        other_spec = [other, [c * ours.itemsize for c in ours.counts], None, MPI.BYTE]
    else:
        other_spec = [other, size // k, MPI.BYTE]
    try:
        move(comm, *((other_spec, spec) if writable else (spec, other_spec)))
    except Exception as error:
        event("refused")
        assert not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_TRUNCATE, "not refused"
        assert ours is None, f"mpi4py refuses {spec!r}: {error!r}; we described {ours}"
        return
    assert ours is not None, f"mpi4py takes {spec!r}"
    event("taken")
    assert (memory[:128] == 0xAA).all() and (memory[-128:] == 0xAA).all(), f"mpi4py writes beyond {ours} for {spec!r}"
    if writable and overlapping(ours):
        return
    assert payload(ours) == other.tobytes()


def overlapping(buffer):
    spans = zip(buffer.counts or (), buffer.displs or (), strict=True)
    covered = [place for c, d in spans for place in range(d, d + c)]
    return len(covered) != len(set(covered))


relaxed = settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_blocks_as_mpi4py(neighbours, datatypes, k, writable):
    @relaxed
    @given(specifications(count))
    @example(("f8", 6, 2, 1, MPI.DOUBLE, "acdt", list))
    def check(spec):
        same_as_mpi4py(
            neighbours(k),
            MPI.Distgraphcomm.Neighbor_alltoall,
            lambda s, w: blocks(s, k, "x", w),
            spec,
            datatypes,
            writable,
        )

    check()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_blocks_v_as_mpi4py(neighbours, datatypes, k, writable):
    @relaxed
    @given(specifications(counts))
    def check(spec):
        same_as_mpi4py(
            neighbours(k),
            MPI.Distgraphcomm.Neighbor_alltoallv,
            lambda s, w: blocks_v(s, k, "x", w),
            spec,
            datatypes,
            writable,
        )

    check()


def test_vector_as_mpi4py(datatypes):
    @relaxed
    @given(specifications(count))
    def check(spec):
        spec = specified(ARRAYS[spec[0]](spec[1]), spec, datatypes)
        try:
            ours = vector(spec, "x", writable=False)
        except MPI.Exception as error:
            if dangerous(error):
                return
            ours = None
        try:
            MPI.COMM_SELF.Bcast(spec, 0)
        except Exception as error:
            assert ours is None, f"mpi4py refuses {spec!r}: {error!r}"
            return
        assert ours is not None, f"mpi4py takes {spec!r}"
        out = np.zeros(ours.nbytes, "u1")
        MPI.COMM_SELF.Sendrecv(spec, 0, 0, [out, MPI.BYTE], 0, 0)
        assert payload(ours) == out.tobytes()

    check()

"""Random collective call on one rank: arrays with random contents, passed in various argument forms."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers.datatypes import PAIRS
from fuzzing.presentations import allocate_plain, is_plain, presented
from fuzzing.sequences import MOVING, Step

ROOTED = ("Bcast", "Reduce", "Scatter", "Gather", "Scatterv", "Gatherv")
"""Methods in which ranks differ in the arrays that they have, while making a shared array is collective."""

KINDS = {
    **dict.fromkeys(("Allreduce", "Reduce", "Scan", "Exscan"), ("vector", "vector")),
    "Scatter": ("blocks", "vector"),
    **dict.fromkeys(("Gather", "Allgather"), ("vector", "blocks")),
    "Alltoall": ("blocks", "blocks"),
    "Scatterv": ("unequal", "own"),
    **dict.fromkeys(("Gatherv", "Allgatherv"), ("own", "unequal")),
    **dict.fromkeys(("Alltoallv", "Alltoallw"), ("unequal", "unequal")),
}
"""Send and receive buffers: a vector, a block of each rank, the own one of unequal blocks, or all of these."""

GUARD = 3
"""Elements before and after what a call may touch."""

MAKERS: dict[str, Callable[[MPI.Datatype], MPI.Datatype]] = {
    "contiguous": lambda base: base.Create_contiguous(3),
    "dup": lambda base: base.Dup(),
    "struct": lambda base: MPI.Datatype.Create_struct([2], [0], [base]),
    "vector": lambda base: base.Create_vector(2, 1, 2),
    "indexed": lambda base: base.Create_indexed([1, 2], [0, 2]),
    "resized": lambda base: base.Create_resized(0, 2 * base.Get_extent()[1]),
    "nested": lambda base: base.Create_vector(2, 1, 3).Create_contiguous(2),
}


class Element(NamedTuple):
    """Datatype of a buffer, its extent in elements of the array, and how many of it hold one of the step's datatype."""

    datatype: MPI.Datatype
    extent: int = 1
    number: int = 1


class DrawnCall:
    """One rank's arguments of one random call, and its request if it may end later than the step that began it.

    A `native` call, the MPI's own, may use all of a receive buffer where ours must not. `turn`: repetitions before.
    """

    def __init__(self, step: Step, comm: Any, seed: int, op: MPI.Op | None, native: bool, turn: int = 0) -> None:
        self.step, self.comm, self.native, self.turn = step, comm, native, turn
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._seed = (seed, step.thread, step.number)
        changes = turn if "other counts" in step.flags else 0
        self._common = np.random.default_rng([*self._seed, 1, changes // 3])
        self._own = np.random.default_rng([*self._seed, 2, self.rank, turn])
        if step.dtype in PAIRS:
            value, location = PAIRS[step.dtype]
            self.dtype = np.dtype([("val", value), ("loc", location)], align=True)
            base = getattr(MPI, step.dtype)
        else:
            self.dtype = np.dtype(step.dtype or "i")
            base = MPI._typedict[self.dtype.char]
        self.datatype: MPI.Datatype = base
        self.derived = bool(step.datatype)
        if self.derived:
            self.datatype = MAKERS[step.datatype](base).Commit()
        self.sent = self.received = Element(self.datatype, self.datatype.Get_extent()[1] // self.dtype.itemsize)
        self.root = step.pick % self.size
        self.in_place = "in place" in step.flags
        if self.derived and "derived on one side" in step.flags and step.method in MOVING and not self.in_place:
            self.received = Element(base, 1, self.datatype.Get_size() // self.dtype.itemsize)
        self._wholes: list[tuple[np.ndarray, bool]] = []
        self._ignored: list[np.ndarray] = []
        self.positional: list[Any] = []
        self.request: Any = None
        self.keywords: dict[str, Any] = {} if op is None else {"op": op}
        n = step.n
        self._lengths = self._common.choice([0, n, n // 2 + 1, n], (self.size, self.size))  # of unequal blocks
        if "equal blocks" in step.flags:
            self._lengths[...] = n
        if self.in_place:
            self._lengths = np.minimum(self._lengths, self._lengths.T)
        getattr(self, f"_{step.method.lower()}", self._arrays)()
        self.refill()

    def _allocate(self, count: int, is_input: bool, element: Element | None = None) -> np.ndarray:
        """Allocate `count` elements between guard elements; return them without the guards."""
        count *= (element or self.sent).extent
        if is_plain(self.step.flags, self.dtype):
            whole = self._inner = allocate_plain(count, self.dtype)
            self._wholes.append((whole, is_input))
            return whole
        shared = "shared" in self.step.flags and not (self.native or self.dtype.names or self.step.method in ROOTED)
        length = count + 2 * GUARD
        whole = self.comm.empty(length, self.dtype) if shared else np.zeros(length, self.dtype)
        self._wholes.append((whole, is_input))
        self._inner = whole[GUARD : GUARD + count]
        return self._inner

    def refill(self) -> None:
        """Fill all arrays anew: inputs with random values, others with a constant."""
        for whole, is_input in self._wholes:
            if not is_input:
                whole[...] = np.zeros(1, self.dtype) if self.dtype.names else np.asarray(77).astype(self.dtype)
            elif self.dtype.names:
                whole["val"], whole["loc"] = self._own.integers(0, 5, (2, len(whole)))
            elif self.step.op == "affine":
                whole[...] = self._own.integers(0, 2**63, len(whole), np.uint64)
            else:
                high = 3 if self.step.op == "PROD" else 2 if self.dtype == bool else 11
                whole[...] = self._own.integers(self.step.op == "PROD", high, len(whole)).astype(self.dtype)
        self._before = [(array, array.copy()) for array in self._ignored]

    def result(self) -> list[bytes]:
        """Bytes of each array with its guards; parts that MPI leaves undefined are restored and checked for changes."""
        kept = [True if self.native else bool((array == before).all()) for array, before in self._before]
        for array, before in self._before:
            array[...] = before
        parts = []
        for whole, _ in self._wholes:
            if self.dtype.names:
                parts += [whole["val"].tobytes(), whole["loc"].tobytes()]
            else:
                parts.append((whole.astype("d") if self.dtype.char == "g" else whole).tobytes())
        return [*parts, repr(kept).encode()]

    def free_type(self) -> None:
        if self.derived and self.datatype != MPI.DATATYPE_NULL:
            self.datatype.Free()

    def _spelled(self, array: np.ndarray, count: int, datatype: MPI.Datatype) -> Any:
        """Buffer argument for a vector, or blocks of `count` elements each, in the form that the step's flags name."""
        flags = self.step.flags
        obj = presented(array, flags)
        if self.derived or self.dtype.names or "count given" in flags:
            return [obj, count, datatype] if "packed" in flags else [obj, (count, 0), datatype]
        return [obj, datatype] if "type given" in flags else obj

    def _spelled_v(self, array: np.ndarray, lengths: Any, displs: Any, datatype: MPI.Datatype) -> Any:
        flags = self.step.flags
        obj = presented(array, flags)
        if "equal blocks" in flags and "one number" in flags:
            lengths = lengths[0]
        elif "arrays of counts" in flags:
            lengths, displs = np.array(lengths, "i8"), None if displs is None else np.array(displs, "i4")
        if self.derived or "type given" in flags:
            return [obj, lengths, displs, datatype]
        return [obj, lengths] if displs is None else [obj, (lengths, displs)]

    def _spelled_w(self, array: np.ndarray, lengths: list[int], displs: Any, datatype: MPI.Datatype) -> Any:
        """As `_spelled_v`, with a datatype for each block."""
        extent = datatype.Get_extent()[1]
        starts = list(accumulate(lengths[:-1], initial=0)) if displs is None else displs
        if isinstance(starts, int):
            starts = [block * starts for block in range(len(lengths))]
        places, types = [start * extent for start in starts], [datatype] * len(lengths)
        obj = presented(array, self.step.flags)
        return [obj, lengths, places, types] if "packed" in self.step.flags else [obj, (lengths, places), types]

    def _in_place(self) -> Any:
        return None if "None for in place" in self.step.flags else MPI.IN_PLACE

    def _rooted(self) -> None:
        self.keywords["root"] = np.array(self.root) if "root as an array" in self.step.flags else self.root

    def _displs(self, lengths: list[int], may_overlap: bool) -> tuple[Any, int]:
        """Displacements of blocks, and the number of elements spanned.

        Packed (None), overlapping, or with gaps: in order if one number stands for all, else in reverse order.
        """
        if "packed" in self.step.flags:
            return None, sum(lengths)
        if may_overlap and "overlapping" in self.step.flags:
            displs = [block % 2 for block in range(self.size)]
            return displs, max(displ + length for displ, length in zip(displs, lengths))
        if "equal blocks" in self.step.flags and "one number" in self.step.flags:
            return lengths[0] + 1, (lengths[0] + 1) * self.size
        ends = list(accumulate(length + 1 for length in reversed(lengths)))
        return [end - length - 1 for end, length in zip(ends, reversed(lengths))][::-1], ends[-1]

    def _side(self, kind: str, sends: bool, is_input: bool) -> Any:
        """Allocate a send or receive buffer of a kind in `KINDS` and return the argument that describes it."""
        lengths = self._lengths[:, 0].tolist()
        if self.step.method in ("Alltoallv", "Alltoallw"):
            lengths = (self._lengths[self.rank] if sends else self._lengths[:, self.rank]).tolist()
        element = self.sent if sends else self.received
        lengths, n = [length * element.number for length in lengths], self.step.n * element.number
        if kind == "unequal":
            displs, count = self._displs(lengths, sends and not self.in_place)
            array = self._view(self._allocate(count, is_input, element), sends and is_input)
            spelled = self._spelled_w if self.step.method == "Alltoallw" else self._spelled_v
            return spelled(array, lengths, displs, element.datatype)
        count = {"vector": n, "blocks": n * self.size, "own": lengths[self.rank], "total": sum(lengths)}[kind]
        array = self._view(self._allocate(count, is_input, element), sends and is_input)
        return self._spelled(array, n if kind == "blocks" else count, element.datatype)

    def _view(self, array: np.ndarray, is_read: bool) -> np.ndarray:
        """View of an array as the call gets it: of another shape in every other turn, read-only."""
        view = array.reshape((-1, 1) if self.turn % 2 and "other shapes" in self.step.flags else -1)
        view.flags.writeable = not (is_read and "read-only" in self.step.flags)
        return view

    def _arrays(self) -> None:
        """Make send and receive arguments, for all methods of `KINDS`; other methods have functions below."""
        sent, received = KINDS[self.step.method]
        rooted, scatters = self.step.method in ROOTED, self.step.method.startswith("Scatter")
        if rooted:
            self._rooted()
        here = self.rank == self.root or not rooted
        in_place = self.in_place and here
        send = recv = None
        if here or not scatters:
            send = self._in_place() if in_place and not scatters else self._side(sent, True, True)
        if scatters and in_place:
            recv = self._in_place()
        elif here or scatters:
            recv = self._side(received, False, in_place)
        self.positional = [send, recv]
        if self.step.method == "Exscan" and self.rank == 0:
            self._ignored.append(self._inner)

    def _barrier(self) -> None:
        pass

    def _bcast(self) -> None:
        self._rooted()
        self.positional = [self._side("vector", self.rank == self.root, self.rank == self.root)]

    def _reduce_scatter_block(self) -> None:
        n, total = self.step.n, self.step.n * self.size
        plain = not self.derived and "type given" not in self.step.flags and self.dtype.names is None
        send = None if self.in_place else self._allocate(total, True)
        recv = self._allocate(total if self.in_place else n, self.in_place)
        if send is None:
            self._ignored.append(recv[n * self.sent.extent :])
        spelled = [array if plain else [array, self.datatype] for array in (send, recv) if array is not None]
        self.positional = [self._in_place(), *spelled] if send is None else spelled

    def _reduce_scatter(self) -> None:
        send = self._in_place() if self.in_place else self._side("total", True, True)
        recv = self._side("total" if self.in_place else "own", False, self.in_place)
        if self.in_place:
            mine = int(self._lengths[self.rank, 0])
            self._ignored.append(self._inner[mine * self.sent.extent :])
        self.positional = [send, recv, self._lengths[:, 0].tolist()]

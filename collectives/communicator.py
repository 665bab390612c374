"""`Communicator`: mpi4py's Intracomm with collectives of our own, from argument to wire."""

# mypy: disable-error-code="override"
# The collectives take two keywords more than mpi4py's and give requests of our own.

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import index
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from collectives import buffers
from collectives.runtime import call as calls
from collectives.algorithms import catalog
from collectives.runtime import native
from collectives.selection import select
from collectives.runtime.persistent_agreement import BLIND, Sight
from collectives.runtime.call import Call
from collectives.runtime.desync_check import Checker
from collectives.errors import Invalid, InvalidArgument, InvalidType
from collectives.kept import NEW
from collectives.selection.timing_table import BLOCKING, NATIVE, Choice, Form, Table
from collectives.runtime.ops import is_commutative
from collectives.runtime.planner import Plans
from collectives.runtime.point_to_point import PointToPoint
from collectives.runtime.requests import Request, until
from collectives.selection.select import Decision, Selector
from collectives.schedule.semantics import MEANINGS
from collectives.selection.timing_file import agreed

_open: dict[int, Communicator] = {}
"""Communicators that hold resources, by the order in which they were made, the same on all of their ranks."""


def _close_all() -> None:
    """At exit give back what is still held, so that MPI ends without leaks."""
    if not MPI.Is_finalized():
        for comm in list(_open.values()):
            try:
                comm._close()
            except InvalidArgument:  # tell, and give back the rest: the other ranks are at it too
                sys.excepthook(*sys.exc_info())
                comm._close(whatever=True)


atexit.register(_close_all)


def _nothing_again(*_: Any) -> tuple[Any, ...]:
    """In place of `Kept.again` where every call must take the long way."""
    return NEW


def _named(comm: MPI.Intracomm, nodes: Sequence[int] | None) -> tuple[int, ...] | None:
    """The nodes as the user names them, if all ranks say the same. Collective, and so are its errors."""
    said: object = None
    try:
        if nodes is not None:
            said = tuple(index(node) for node in nodes)
    except TypeError:
        said = f"nodes: expected the number of every rank's node, found {nodes!r}"
    everyone = comm.allgather(said)
    for rank, other in enumerate(everyone):
        if isinstance(other, str):
            raise InvalidType(MPI.ERR_ARG, f"{other} on rank {rank}")
        if other != everyone[0]:
            raise InvalidArgument(MPI.ERR_ARG, f"nodes: {everyone[0]} on rank 0, but {other} on rank {rank}")
    first = everyone[0]
    if first is not None and len(first) != len(everyone):
        raise InvalidArgument(MPI.ERR_ARG, f"nodes: expected a number for each of {len(everyone)} ranks, found {first}")
    return first


def _shaped(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the dtype of an array in shared memory.

    Raises
    ------
    InvalidArgument, InvalidType
        If there can be no such array.
    """
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidType(MPI.ERR_TYPE, f"dtype: {error}") from None
    if kind.hasobject or not kind.itemsize or kind.subdtype is not None:
        raise InvalidType(MPI.ERR_TYPE, f"dtype: expected elements of one known size, without references, found {kind}")
    try:
        lengths = tuple(map(index, shape)) if isinstance(shape, Iterable) else (index(shape),)
    except TypeError:
        raise InvalidType(MPI.ERR_ARG, f"shape: expected a number or several, found {shape!r}") from None
    if min(lengths, default=0) < 0:
        raise InvalidArgument(MPI.ERR_ARG, f"shape: expected no negative lengths, found {lengths}")
    return lengths, kind


class Communicator(PointToPoint):
    """An intracommunicator whose collectives on arrays are Chorus's; all else is inherited from mpi4py.

    Making one is collective over `comm`. The two share their ranks and their point-to-point messages; the messages
    of collectives travel apart from both.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator to work on. It stays the caller's.
    debug : bool, optional
        Whether every collective first compares what all ranks call, and raises on all of them if that differs. By
        default the environment's ``CHORUS_DEBUG`` decides.
    cuda_aware : bool, optional
        Whether arrays on a GPU are handed to MPI as they are; if not, they travel through host memory. By default only
        where the MPI says that it can take them, on all ranks. All messages are then MPI's, also those of arrays that
        are not on a GPU and would have travelled through the node's shared memory.
    shared : bool, optional
        Whether ranks of one node talk through memory that they share, which is the default; if not, all messages are
        MPI's.
    nodes : sequence of int, optional
        The number of the node that each of the p ranks is on, the same on all ranks; by default the MPI says who shares
        one. Hierarchical algorithms go by it, and ranks on different nodes share no memory. On one machine it makes
        a cluster to try things on.
    tuning : bool or path, optional
        The table of times, measured by ``scripts/tune.py``, that ``algorithm="auto"`` goes by: by default the one that
        is kept for this user, machine and MPI, if there is one; a file; or none, for False or None. What rank 0 says
        and finds counts for all.

    Raises
    ------
    InvalidArgument, InvalidType
        On all ranks, if `nodes` is not a number for every rank, or not the same on all of them.

    Notes
    -----
    Every collective of the upper-case kind takes mpi4py's arguments in all of mpi4py's forms, and two more keywords:

    algorithm : str
        A name from `collectives.algorithms`, the same on all ranks; ``"auto"`` takes the one that should be fastest,
        ``"native"`` the MPI's own collective.
    segments : int, optional
        Into how many segments the data is cut and pipelined through the algorithm.

    Errors in the arguments are raised before anything is sent, as `collectives.errors` that are at once mpi4py's
    ``MPI.Exception`` and Python's ``ValueError`` or ``TypeError``.

    Non-blocking collectives make progress inside the calls of this package and its blocking point-to-point methods,
    whichever operation these wait for.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np
    >>> comm = Communicator(MPI.COMM_SELF)
    >>> total = np.empty(3)
    >>> comm.Allreduce(np.arange(3.0), total)
    >>> total.tolist()
    [0.0, 1.0, 2.0]
    """

    _plans: Plans | None = None
    _checker: Checker | None = None
    _again: Callable[..., tuple[Any, ...]] = staticmethod(_nothing_again)

    def __new__(
        cls,
        comm: MPI.Intracomm | None = None,
        *,
        debug: bool | None = None,
        cuda_aware: bool | None = None,
        shared: bool = True,
        nodes: Sequence[int] | None = None,
        tuning: bool | str | os.PathLike[str] | Table | None = True,
    ) -> Self:
        return super().__new__(cls, comm)

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        debug: bool | None = None,
        cuda_aware: bool | None = None,
        shared: bool = True,
        nodes: Sequence[int] | None = None,
        tuning: bool | str | os.PathLike[str] | Table | None = True,
    ) -> None:
        if comm is None or not isinstance(comm, MPI.Intracomm):
            raise InvalidType(MPI.ERR_COMM, f"comm: expected an MPI.Intracomm, found {comm!r}")
        if comm == MPI.COMM_NULL:
            raise InvalidArgument(MPI.ERR_COMM, "comm: MPI.COMM_NULL has no ranks")
        if debug is None:
            debug = os.environ.get("CHORUS_DEBUG", "0") not in ("", "0")
        plain = MPI.Intracomm(comm)
        named = _named(plain, nodes)
        self._plans = Plans(plain.Dup(), cuda_aware, shared, named)
        self._cuda_aware, self._shared, self._named = cuda_aware, shared, named
        self._checker = Checker(plain) if debug else None
        if self._checker is None:
            self._again = self._plans.kept.again
        self._rank, self._size = plain.Get_rank(), plain.Get_size()
        table = agreed(plain, tuning)
        self._selector = Selector(self._size, self._plans.nodes, table)
        self._native = table is not None and not self._plans.aware and native.accompanies(plain)
        self._number = max(_open, default=0) + 1
        _open[self._number] = self

    # -------------------------------------------------------------------------------- from a call to a program

    def _choose(self, call: Call, algorithm: str, segments: int | None, form: Form, sight: Sight = BLIND) -> Choice:
        if algorithm == "auto":
            natively = self._native and segments is None and native.refusal(call, form) is None
            choice = self._selector.choose(
                call.collective, call.nbytes, call.ordered, call.private, natively, form, call.uneven, *sight
            )
        elif not isinstance(algorithm, str):
            raise InvalidType(MPI.ERR_ARG, f"algorithm: expected a name, found {algorithm!r}")
        elif algorithm == NATIVE:
            native.check(call, form)
            choice = Choice(NATIVE)
        else:
            select.check(call.collective, algorithm, call.ordered, self.nodes)
            choice = Choice(algorithm)
        if segments is None:
            return choice
        if algorithm == NATIVE:
            raise InvalidArgument(MPI.ERR_ARG, "segments: the MPI's own collectives are not cut in any")
        if not isinstance(segments, (int, np.integer)):
            raise InvalidType(MPI.ERR_ARG, f"segments: expected a number, found {segments!r}")
        if segments < 1:
            raise InvalidArgument(MPI.ERR_ARG, f"segments: expected at least 1, found {segments}")
        return choice._replace(segments=int(segments)) if call.collective != "barrier" else choice

    def _living(self) -> Plans:
        if self._plans is None:
            raise InvalidArgument(
                MPI.ERR_COMM, "this communicator was freed, or never made by collectives.Communicator(comm)"
            )
        return self._plans

    def _run(
        self, call: Call, algorithm: str, segments: int | None, known: tuple[Any, ...] = NEW, *arguments: Any
    ) -> None:
        """Do a call now; `known` and the arguments are for `Kept.again` to know it by."""
        plans, choice = self._living(), self._choose(call, algorithm, segments, "blocking")
        if self._checker is not None:
            plans.kept.check_in_step()
            plans.skip()
            until(self._checker.check("blocking", call, choice))
        plans.run(call, choice, known, *arguments)

    def _begin(self, call: Call, algorithm: str, segments: int | None) -> Request:
        """Begin a call."""
        plans, choice = self._living(), self._choose(call, algorithm, segments, "nonblocking")
        gate = None if self._checker is None else self._checker.check("non-blocking", call, choice)
        return plans.begin(call, choice, gate)

    def _bind(self, call: Call, algorithm: str, segments: int | None) -> Request:
        """Bind a call for many starts."""
        plans, choice = self._living(), self._choose(call, algorithm, segments, "persistent")
        if self._checker is not None:
            plans.skip()
            until(self._checker.check("persistent", call, choice))
        sight = plans.sight(call)
        if sight.seen:
            choice = self._choose(call, algorithm, segments, "persistent", sight)
        return plans.init(call, choice, sight.seen)

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """The node of every rank, nodes numbered as they first appear; None if all ranks are on one."""
        return self._living().nodes

    def choice(
        self,
        collective: str,
        nbytes: int,
        op: MPI.Op = MPI.SUM,
        form: Form = BLOCKING,
        symmetric: bool = False,
        in_place: bool = False,
    ) -> Decision:
        """What ``algorithm="auto"`` takes for so many bytes in all, and why.

        Parameters
        ----------
        collective : str
            A name that `collectives.algorithms` knows.
        nbytes : int
            Bytes of the vector, or of all blocks together. Where ranks only know their own block's length, it does
            not matter.
        op : MPI.Op
            The reduction, where there is one, on elements that the MPI knows too.
        form : "blocking", "nonblocking" or "persistent"
        symmetric, in_place : bool
            Whether the arrays come from `empty`, and whether the call is in place, on all ranks. That counts for the
            persistent form, as ranks agree on it when a request is bound.

        Returns
        -------
        Decision
            ``(algorithm, segments, seconds, source)``: what the call should take, and whether that was ``"measured"``
            or is what the ``"model"`` expects.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> alone = Communicator(MPI.COMM_SELF, tuning=False)
        >>> alone.choice("barrier", 0)
        Decision(algorithm='linear', segments=1, seconds=0.0, source='model')
        """
        node, (base, private) = self._living().node, _base(collective)
        ordered = MEANINGS[base].reduces and not is_commutative(op)
        uneven = base != collective
        natively = self._native and native.unsound(native.METHODS[base][uneven], form) is None
        seen = symmetric and form == "persistent" and node is not None and node.reads
        return self._selector.decide(
            base, select.graded(nbytes), ordered, private, natively, form, uneven, seen, in_place
        )

    # -------------------------------------------------------------------------------- memory that neighbours see

    def empty(self, shape: Any, dtype: Any = float) -> np.ndarray:
        """An array that the ranks of the node read where it lies, instead of getting copies. Collective.

        It is an ordinary NumPy array in memory that this rank shares with its neighbours; collectives on such arrays
        move less data. Its memory is free again when the last array on it is gone (``del``). Where a system lets
        ranks share no memory, it is memory like any other.

        Parameters
        ----------
        shape : int or tuple of int
            Ranks may ask for different shapes.
        dtype : dtype, optional

        Raises
        ------
        InvalidArgument, InvalidType
            On all ranks, if one of them asks for a shape or a dtype that cannot be; the message says which.
        OutOfMemory
            On all ranks, if one of them cannot have its share.
        """
        plans = self._living()
        wanted: tuple[tuple[int, ...], np.dtype] | Invalid
        try:
            wanted = _shaped(shape, dtype)
        except Invalid as error:
            wanted = error
        until(plans.comm.Ibarrier().Test)  # others may have to wait before for what this rank has under way
        for rank, trouble in enumerate(plans.comm.allgather(wanted if isinstance(wanted, Invalid) else None)):
            if trouble is not None:
                raise type(trouble)(trouble.Get_error_class(), f"{trouble} on rank {rank}")
        assert not isinstance(wanted, Invalid)
        lengths, kind = wanted
        return plans.allocate(prod(lengths) * kind.itemsize).view(kind).reshape(lengths)

    def zeros(self, shape: Any, dtype: Any = float) -> np.ndarray:
        """As `empty`, filled with zeros."""
        return self.full(shape, 0, dtype)

    def full(self, shape: Any, fill_value: Any, dtype: Any = None) -> np.ndarray:
        """As `empty`, filled with a value, whose type is the array's unless another is given."""
        array = self.empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
        array[...] = fill_value
        return array

    def like(self, array: Any) -> np.ndarray:
        """As `empty`, with the shape, the type and the values of an array."""
        array = np.asarray(array)
        return self.full(array.shape, array, array.dtype)

    # -------------------------------------------------------------------------------- Barrier

    def Barrier(self, *, algorithm: str = "auto", segments: int | None = None) -> None:
        """Return when everyone has come here."""
        known = self._again("barrier", None, None, MPI.SUM, 0, algorithm, segments)
        if known:
            self._run(calls.barrier(), algorithm, segments, known, None, None, MPI.SUM)

    def Ibarrier(self, *, algorithm: str = "auto", segments: int | None = None) -> Request:
        """Begin `Barrier`."""
        return self._begin(calls.barrier(), algorithm, segments)

    def Barrier_init(
        self, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str = "auto", segments: int | None = None
    ) -> Request:
        """Bind `Barrier` for many starts."""
        return self._bind(calls.barrier(), algorithm, segments)

    # -------------------------------------------------------------------------------- Bcast

    def Bcast(self, buf: Any, root: int = 0, *, algorithm: str = "auto", segments: int | None = None) -> None:
        """Send the root's vector to everyone.

        Parameters
        ----------
        buf : buffer
            The vector: read at the root, written elsewhere. Equally many bytes on all ranks.
        root : int
        """
        known = self._again("broadcast", buf, buf, MPI.SUM, root, algorithm, segments)
        if known:
            self._run(
                calls.broadcast(buf, root, self._rank, self._size),
                algorithm,
                segments,
                known,
                buf,
                buf,
                MPI.SUM,
            )

    def Ibcast(self, buf: Any, root: int = 0, *, algorithm: str = "auto", segments: int | None = None) -> Request:
        """Begin `Bcast`."""
        return self._begin(calls.broadcast(buf, root, self._rank, self._size), algorithm, segments)

    def Bcast_init(
        self,
        buf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Bcast` for many starts."""
        return self._bind(calls.broadcast(buf, root, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Reduce

    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Combine everyone's vectors, element by element, into the root's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer
            n elements; ``MPI.IN_PLACE`` at the root, whose term is then in `recvbuf`.
        recvbuf : buffer or None
            n elements of the same type at the root; not looked at elsewhere.
        op : MPI.Op
            Predefined or of one's own; ranks are combined in order if it does not commute.
        root : int
        """
        known = self._again("reduce", sendbuf, recvbuf, op, root, algorithm, segments)
        if known:
            self._run(
                calls.reduce(sendbuf, recvbuf, op, root, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                op,
            )

    def Ireduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Reduce`."""
        return self._begin(calls.reduce(sendbuf, recvbuf, op, root, self._rank, self._size), algorithm, segments)

    def Reduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Reduce` for many starts."""
        return self._bind(calls.reduce(sendbuf, recvbuf, op, root, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Allreduce

    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Combine everyone's vectors, element by element, into everyone's `recvbuf`.

        All ranks get the same bits, unless the algorithm that is asked for says otherwise (``"census"``).

        Parameters
        ----------
        sendbuf : buffer
            n elements, or ``MPI.IN_PLACE`` on all ranks, whose terms are then in `recvbuf`.
        recvbuf : buffer
            n elements of the same type.
        op : MPI.Op
            Predefined or of one's own; ranks are combined in order if it does not commute.
        """
        known = self._again("allreduce", sendbuf, recvbuf, op, 0, algorithm, segments)
        if known:
            self._run(
                calls.allreduce(sendbuf, recvbuf, op, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                op,
            )

    def Iallreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Allreduce`."""
        return self._begin(calls.allreduce(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments)

    def Allreduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Allreduce` for many starts."""
        return self._bind(calls.allreduce(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Scatter

    def Scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Send every rank its block of the root's `sendbuf`, all blocks alike.

        Parameters
        ----------
        sendbuf : buffer or None
            p blocks at the root; not looked at elsewhere.
        recvbuf : buffer
            One block; ``MPI.IN_PLACE`` at the root leaves its block where it is.
        root : int
        """
        known = self._again("scatter", sendbuf, recvbuf, MPI.SUM, root, algorithm, segments)
        if known:
            self._run(
                calls.scatter(sendbuf, recvbuf, root, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                MPI.SUM,
            )

    def Iscatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Scatter`."""
        return self._begin(calls.scatter(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    def Scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Scatter` for many starts."""
        return self._bind(calls.scatter(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Gather

    def Gather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Collect a block of every rank in the root's `recvbuf`, all blocks alike.

        Parameters
        ----------
        sendbuf : buffer
            One block; ``MPI.IN_PLACE`` at the root, whose block is then in `recvbuf`.
        recvbuf : buffer or None
            p blocks at the root; not looked at elsewhere.
        root : int
        """
        known = self._again("gather", sendbuf, recvbuf, MPI.SUM, root, algorithm, segments)
        if known:
            self._run(
                calls.gather(sendbuf, recvbuf, root, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                MPI.SUM,
            )

    def Igather(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Gather`."""
        return self._begin(calls.gather(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    def Gather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Gather` for many starts."""
        return self._bind(calls.gather(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Allgather

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None) -> None:
        """Collect a block of every rank in everyone's `recvbuf`, all blocks alike.

        Parameters
        ----------
        sendbuf : buffer
            One block, or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.
        recvbuf : buffer
            p blocks.
        """
        known = self._again("allgather", sendbuf, recvbuf, MPI.SUM, 0, algorithm, segments)
        if known:
            self._run(
                calls.allgather(sendbuf, recvbuf, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                MPI.SUM,
            )

    def Iallgather(
        self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None
    ) -> Request:
        """Begin `Allgather`."""
        return self._begin(calls.allgather(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    def Allgather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Allgather` for many starts."""
        return self._bind(calls.allgather(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Reduce_scatter_block

    def Reduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Combine everyone's vectors and leave block r of the result at rank r, all blocks alike.

        Parameters
        ----------
        sendbuf : buffer
            p blocks; or ``MPI.IN_PLACE`` on all ranks, whose terms are then in `recvbuf`.
        recvbuf : buffer
            One block; in place p blocks, of which the first holds the result.
        op : MPI.Op
            Predefined or of one's own; ranks are combined in order if it does not commute.
        """
        known = self._again("reduce_scatter_block", sendbuf, recvbuf, op, 0, algorithm, segments)
        if known:
            self._run(
                calls.reduce_scatter_block(sendbuf, recvbuf, op, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                op,
            )

    def Ireduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Reduce_scatter_block`."""
        return self._begin(
            calls.reduce_scatter_block(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments
        )

    def Reduce_scatter_block_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Reduce_scatter_block` for many starts."""
        return self._bind(calls.reduce_scatter_block(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Reduce_scatter

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Combine everyone's vectors and leave block r of the result, of ``recvcounts[r]`` elements, at rank r.

        Parameters
        ----------
        sendbuf : buffer
            All blocks; or ``MPI.IN_PLACE`` on all ranks, whose terms are then in `recvbuf`.
        recvbuf : buffer
            One block; in place all blocks, and the result comes to lie at the beginning.
        recvcounts : sequence of int, optional
            Elements for each rank; by default what each rank's `recvbuf` holds.
        op : MPI.Op
            Predefined or of one's own; ranks are combined in order if it does not commute.
        """
        self._run(
            calls.reduce_scatter(
                sendbuf, recvbuf, self._counts(sendbuf, recvbuf, recvcounts), op, self._rank, self._size
            ),
            algorithm,
            segments,
        )

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Reduce_scatter`."""
        return self._begin(
            calls.reduce_scatter(
                sendbuf, recvbuf, self._counts(sendbuf, recvbuf, recvcounts), op, self._rank, self._size
            ),
            algorithm,
            segments,
        )

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Reduce_scatter` for many starts."""
        return self._bind(
            calls.reduce_scatter(
                sendbuf, recvbuf, self._counts(sendbuf, recvbuf, recvcounts), op, self._rank, self._size
            ),
            algorithm,
            segments,
        )

    # -------------------------------------------------------------------------------- Scatterv

    def Scatterv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Send every rank its block of the root's `sendbuf`, each block of its own length.

        Parameters
        ----------
        sendbuf : buffer or None
            ``[array, counts]``, ``[array, counts, displs, type]`` and so on at the root; not looked at elsewhere.
        recvbuf : buffer
            One block, as long as the root says; ``MPI.IN_PLACE`` at the root leaves its block where it is.
        root : int
        """
        self._run(calls.scatterv(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    def Iscatterv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Scatterv`."""
        return self._begin(calls.scatterv(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    def Scatterv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Scatterv` for many starts."""
        return self._bind(calls.scatterv(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Gatherv

    def Gatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> None:
        """Collect a block of every rank in the root's `recvbuf`, each block of its own length.

        Parameters
        ----------
        sendbuf : buffer
            One block, as long as the root says; ``MPI.IN_PLACE`` at the root, whose block is then in `recvbuf`.
        recvbuf : buffer or None
            ``[array, counts]``, ``[array, counts, displs, type]`` and so on at the root; not looked at elsewhere.
        root : int
        """
        self._run(calls.gatherv(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    def Igatherv(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Begin `Gatherv`."""
        return self._begin(calls.gatherv(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    def Gatherv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Gatherv` for many starts."""
        return self._bind(calls.gatherv(sendbuf, recvbuf, root, self._rank, self._size), algorithm, segments)

    # -------------------------------------------------------------------------------- Allgatherv

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None) -> None:
        """Collect a block of every rank in everyone's `recvbuf`, each block of its own length.

        Parameters
        ----------
        sendbuf : buffer
            One block, or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.
        recvbuf : buffer
            ``[array, counts]``, ``[array, counts, displs, type]`` and so on, the same counts on all ranks.
        """
        self._run(calls.allgatherv(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    def Iallgatherv(
        self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None
    ) -> Request:
        """Begin `Allgatherv`."""
        return self._begin(calls.allgatherv(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    def Allgatherv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Allgatherv` for many starts."""
        return self._bind(calls.allgatherv(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    # ---------------------------------------------------------------------------- Alltoall

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None) -> None:
        """Send every rank a block of one's own and receive one from each, all blocks alike.

        Parameters
        ----------
        sendbuf : buffer
            p blocks, block r for rank r; or ``MPI.IN_PLACE`` on all ranks, whose blocks are then in `recvbuf`.
        recvbuf : buffer
            p blocks, block r from rank r.
        """
        known = self._again("alltoall", sendbuf, recvbuf, MPI.SUM, 0, algorithm, segments)
        if known:
            self._run(
                calls.alltoall(sendbuf, recvbuf, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                MPI.SUM,
            )

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None) -> Request:
        """Begin `Alltoall`."""
        return self._begin(calls.alltoall(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    def Alltoall_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Alltoall` for many starts."""
        return self._bind(calls.alltoall(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    # ---------------------------------------------------------------------------- Alltoallv

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None) -> None:
        """Send every rank a block of one's own and receive one from each, each block of its own length.

        Parameters
        ----------
        sendbuf : buffer
            ``[array, counts]``, ``[array, counts, displs, type]`` and so on; or ``MPI.IN_PLACE`` on all ranks, whose
            blocks are then in `recvbuf`.
        recvbuf : buffer
            The same forms; block r is as long as rank r says.
        """
        self._run(calls.alltoallv(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    def Ialltoallv(
        self, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", segments: int | None = None
    ) -> Request:
        """Begin `Alltoallv`."""
        return self._begin(calls.alltoallv(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    def Alltoallv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Alltoallv` for many starts."""
        return self._bind(calls.alltoallv(sendbuf, recvbuf, self._rank, self._size), algorithm, segments)

    # ---------------------------------------------------------------------------- Scan

    def Scan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str = "auto", segments: int | None = None
    ) -> None:
        """Combine the vectors of ranks 0 to one's own, element by element and in this order.

        Parameters
        ----------
        sendbuf : buffer
            n elements, or ``MPI.IN_PLACE``, if they are in `recvbuf`.
        recvbuf : buffer
            n elements of the same type.
        op : MPI.Op
            Predefined or of one's own.
        """
        known = self._again("scan", sendbuf, recvbuf, op, 0, algorithm, segments)
        if known:
            self._run(
                calls.scan(sendbuf, recvbuf, op, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                op,
            )

    def Iscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str = "auto", segments: int | None = None
    ) -> Request:
        """Begin `Scan`."""
        return self._begin(calls.scan(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments)

    def Scan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Scan` for many starts."""
        return self._bind(calls.scan(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments)

    # ---------------------------------------------------------------------------- Exscan

    def Exscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str = "auto", segments: int | None = None
    ) -> None:
        """Combine the vectors of ranks 0 to the one before one's own; rank 0's `recvbuf` stays as it is.

        Parameters
        ----------
        sendbuf : buffer
            n elements, or ``MPI.IN_PLACE``, if they are in `recvbuf`.
        recvbuf : buffer
            n elements of the same type.
        op : MPI.Op
            Predefined or of one's own.
        """
        known = self._again("exscan", sendbuf, recvbuf, op, 0, algorithm, segments)
        if known:
            self._run(
                calls.exscan(sendbuf, recvbuf, op, self._rank, self._size),
                algorithm,
                segments,
                known,
                sendbuf,
                recvbuf,
                op,
            )

    def Iexscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str = "auto", segments: int | None = None
    ) -> Request:
        """Begin `Exscan`."""
        return self._begin(calls.exscan(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments)

    def Exscan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Request:
        """Bind `Exscan` for many starts."""
        return self._bind(calls.exscan(sendbuf, recvbuf, op, self._rank, self._size), algorithm, segments)

    def _counts(self, sendbuf: Any, recvbuf: Any, recvcounts: Any) -> Any:
        """The receive counts of a reduce-scatter: those given, or else what every rank's recvbuf holds."""
        if recvcounts is not None:
            return recvcounts
        plans = self._living()
        if calls.is_in_place(sendbuf):
            raise InvalidArgument(MPI.ERR_COUNT, "recvcounts: MPI.IN_PLACE needs them")
        if self._checker is not None:
            plans.skip()
            asking = Call("reduce_scatter", (0,), calls.BYTE)
            until(self._checker.check("asking for recvcounts", asking, Choice("auto")))
        return plans.comm.allgather(buffers.vector(recvbuf, "recvbuf", writable=True).count)

    # -------------------------------------------------------------------------------- new communicators, and the end

    def _plain(self) -> MPI.Intracomm:
        """The same communicator as mpi4py's own kind."""
        return MPI.Intracomm(self)

    def _adopt(self, comm: Any) -> Any:
        """A new communicator as one of ours, with the same settings; MPI.COMM_NULL as it is."""
        if comm == MPI.COMM_NULL:
            return comm
        debug, table = self._checker is not None, self._selector.table
        nodes = None
        if self._named is not None:
            group, mine = comm.Get_group(), self.Get_group()
            nodes = [self._named[rank] for rank in group.Translate_ranks(None, mine)]
            group.Free()
            mine.Free()
        aware, shared = self._cuda_aware, self._shared
        return type(self)(comm, debug=debug, cuda_aware=aware, shared=shared, nodes=nodes, tuning=table)

    def Clone(self) -> Any:
        """As mpi4py's; gives a `Communicator`."""
        return self._adopt(self._plain().Clone())

    def Dup(self, info: MPI.Info | None = None) -> Any:
        """As mpi4py's; gives a `Communicator`."""
        return self._adopt(self._plain().Dup(info))

    def Dup_with_info(self, info: MPI.Info) -> Any:
        """As mpi4py's; gives a `Communicator`."""
        return self._adopt(self._plain().Dup_with_info(info))

    def Idup(self, info: MPI.Info | None = None) -> Any:
        """As mpi4py's; gives mpi4py's own kind, since it is not ready yet, and a request."""
        return self._plain().Idup(info)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """As mpi4py's; gives a `Communicator`, or ``MPI.COMM_NULL`` for ``MPI.UNDEFINED``."""
        return self._adopt(self._plain().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """As mpi4py's; gives a `Communicator`, or ``MPI.COMM_NULL`` for ``MPI.UNDEFINED``."""
        return self._adopt(self._plain().Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> Any:
        """As mpi4py's; gives a `Communicator`, or ``MPI.COMM_NULL`` outside the group."""
        return self._adopt(self._plain().Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """As mpi4py's; gives a `Communicator`, or ``MPI.COMM_NULL`` outside the group."""
        return self._adopt(self._plain().Create_group(group, tag))

    def close(self) -> None:
        """Give back what Chorus holds and leave the MPI communicator as it was. Collective.

        ``with Communicator(comm) as ours: ...`` does so at the end. Collectives on arrays are refused from then on.

        Raises
        ------
        InvalidArgument
            If an operation is still under way.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def Free(self) -> None:
        """Free the MPI communicator and all that was bound to it. Collective.

        Raises
        ------
        InvalidArgument
            If an operation is still under way, or the communicator is MPI's own, such as ``MPI.COMM_WORLD``.
        """
        if self in (MPI.COMM_WORLD, MPI.COMM_SELF):
            raise InvalidArgument(MPI.ERR_COMM, f"{self.Get_name()} is MPI's own; close() gives back what Chorus holds")
        self._close()
        super().Free()

    def Disconnect(self) -> None:
        """As `Free`, after all communication has ended."""
        self._close()
        super().Disconnect()

    def _close(self, whatever: bool = False) -> None:
        if self._plans is None:
            return
        if self._plans.under_way and not whatever:
            raise InvalidArgument(MPI.ERR_PENDING, f"{self._plans.under_way} collectives are still under way")
        self._plans.free()
        self._plans = None
        self.__dict__.pop("_again", None)  # not there in debug mode
        if self._checker is not None:
            self._checker.free()
        _open.pop(self._number, None)


# ------------------------------------------------------------------------------------------ asking the catalogue

_V_FORMS = {
    "scatterv": ("scatter", True),
    "gatherv": ("gather", True),
    "allgatherv": ("allgather", False),
    "alltoallv": ("alltoall", True),
}


def _base(collective: str) -> tuple[str, bool]:
    """The catalogue's name for a collective, and whether ranks know only their own block's length."""
    return _V_FORMS.get(collective, (collective, False))


def algorithms(collective: str) -> list[str]:
    """Names of the algorithms that can be asked for, the naive one first, the MPI's own collective last.

    Parameters
    ----------
    collective : str
        ``"allreduce"``, ``"broadcast"``, ``"scatterv"`` ... in lower case.

    Raises
    ------
    ValueError
        If there is no such collective; the message lists those there are.

    Examples
    --------
    >>> algorithms("gatherv")
    ['linear', 'mst', 'direct', 'hierarchical', 'leaders', 'native']
    """
    return [*catalog.names(_base(collective)[0]), NATIVE]


def predict(collective: str, algorithm: str, size: int, nbytes: int, segments: int | None = None) -> float:
    """Seconds that the model expects a collective to take: see `collectives.selection.select.predict`."""
    return select.predict(_base(collective)[0], algorithm, size, nbytes, segments or 1)

"""`Communicator`: an mpi4py Intracomm whose collectives on arrays are Chorus's own."""

# mypy: disable-error-code="override"

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from itertools import count, product
from math import prod
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from collectives.buffers.arguments import vector
from collectives.buffers.datatypes import shape_and_dtype
from collectives.buffers.memory import on_gpu
from collectives.errors import InvalidArgument, InvalidInput, InvalidType, Mismatch, NotCopied, Timeout
from collectives.runtime.arguments.argument_keys import UNCACHEABLE, CallKey
from collectives.runtime.arguments.call import BYTE, Call, is_in_place
from collectives.runtime.builders.communicator_transports import Transports
from collectives.runtime.execution.progress import progress_thread, progress_until, request_moves, stall_requests
from collectives.runtime.methods.collective_forms import DECLARATIONS, FORMS, Declaration, method_name
from collectives.runtime.methods.object_methods import ObjectMethods
from collectives.runtime.planning.agreement import (
    Agreement,
    agree_on_gpu,
    agree_on_nodes,
    agree_on_timeout,
    common,
    counting_communicators,
    gather_or_raise,
    without_attributes,
)
from collectives.runtime.planning.algorithm_chooser import AlgorithmChooser
from collectives.runtime.planning.compiled_calls import call_functions
from collectives.runtime.planning.desync_check import DesyncChecker, is_wanted, others
from collectives.runtime.planning.planner import Planner
from collectives.runtime.record import watcher
from collectives.runtime.requests.program_end import close_all, open_communicators
from collectives.runtime.requests.request import Request
from collectives.selection.cost_model import Costs
from collectives.selection.select import Selection
from collectives.selection.timing_file import broadcast_table, warn_without_table
from collectives.selection.timing_table import BLOCKING, AlgorithmChoice, Form, TimingTable
from collectives.transport.memory.copy_speed import MessageSpeed
from collectives.transport.mpi import cuda_support
from collectives.transport.mpi.reduced import reduced
from collectives.transport.node.placement import NodePlacement, place_ranks
from collectives.transport.waits import Others, limited

Tuning = bool | str | os.PathLike[str] | TimingTable | None

_numbers = count(1)

PREDEFINED = {"COMM_WORLD": MPI.COMM_WORLD, "COMM_SELF": MPI.COMM_SELF}
"""mpi4py's constants by name: as they were at import, since programs may put a `Communicator` in their place."""

# Registered after the imports, hence called before the exit functions of all modules of this package.
atexit.register(close_all)


def _uncached(*_: Any) -> CallKey:
    """Stand-in for `run_cached` and `start_cached` in debug mode and after `close`, where every call is validated."""
    return UNCACHEABLE


def restore(name: str, number: int) -> Any:
    """Unpickled `Communicator`: the open one with this number, else another one of mpi4py's constant, else that."""
    made = {key: comm for key, comm in open_communicators.items() if comm.constant == name}
    return made.get(number) or next(iter(made.values()), PREDEFINED[name])


topology_classes: dict[int, type[Communicator]] = {}
"""Class of communicators with a topology, by its kind; see `collectives.topologies`."""


def adopting(name: str) -> Callable[..., Any]:
    """Method that calls mpi4py's method `name` and wraps its result in a `Communicator`, unless it is MPI.COMM_NULL."""

    @wraps(getattr(MPI.Intracomm, name, MPI.Intracomm.Dup))
    def create(self: Communicator, *arguments: Any, **keywords: Any) -> Any:
        with counting_communicators():
            return self._adopt(self._accompany(partial(getattr(self.plain, name), *arguments, **keywords)))

    return create


class Communicator(ObjectMethods):
    """Intracommunicator with Chorus's collectives on arrays, all else inherited from mpi4py. Creation is collective.

    It shares ranks and point-to-point messages with `comm`; messages of its collectives are separate.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The communicator to work on. It remains the caller's.
    debug : bool, optional
        Compare the calls of all ranks before every collective, and raise on all ranks if they differ. Default: the
        environment variable ``CHORUS_DEBUG`` (1, true, yes, on; or 0, false, no, off, empty). Enabled on all ranks if
        one enables it.
    cuda_aware : bool, optional
        Pass GPU arrays to MPI directly, and use MPI for all messages; otherwise GPU arrays are staged in host memory.
        Default: only if the MPI supports it on all ranks.
    shared : bool, optional
        Ranks of one node communicate through shared memory (default); if False, all messages use MPI.
    nodes : sequence of int, optional
        Node number of each of the p ranks, the same on all ranks; by default determined by MPI. Ranks on different
        nodes share no memory. On one machine it emulates a cluster for hierarchical algorithms.
    tuning : bool or path, optional
        Timing table for ``algorithm="auto"``, measured by ``chorus tune``: the one stored for this user, machine
        and MPI, if any (default); a file; or none, for False or None. Rank 0's table is used on all ranks.
    async_progress : bool, optional
        Copy messages from 128 KiB of non-blocking and persistent collectives in a thread while the program computes,
        instead of in their start. For machines with a core to spare for each rank. Enabled on all ranks if one
        enables it; default False.
    timeout : float, optional
        Time limit in seconds of every blocking collective and of every `Wait` for a request, if none is given: then
        `collectives.errors.Timeout` is raised. Default: the environment variable ``CHORUS_TIMEOUT``, else no limit. The
        least of all ranks holds.
    gpu : {"kernel", "pinned", "staged"}
        Best transfer of GPU arrays that may be used; the ranks find out at creation which is possible, if CuPy was
        imported on all of them before (`device_transfer`). "kernel" (default): ranks that share one GPU, or whose
        GPUs have peer access, read and write each other's memory there. "pinned": in parts of up to 4 MiB through
        pinned memory, which ranks of a node share, and which MPI sends between nodes; host arrays are cut into the same
        parts. "staged": through host memory. The least of all ranks holds.

    Raises
    ------
    InvalidArgument, InvalidType
        On all ranks, if `nodes`, `gpu` or `timeout` is invalid, `nodes` differs between ranks, or ``CHORUS_DEBUG`` or
        ``CHORUS_TIMEOUT`` is invalid on one of them; or with `async_progress` on several nodes, if the MPI does not
        support ``MPI.THREAD_MULTIPLE``.

    Notes
    -----
    Every upper-case collective takes mpi4py's arguments in all of mpi4py's forms (None is another name of
    ``MPI.IN_PLACE``), and two more keywords:

    algorithm : str
        A name from `collectives.algorithms`, the same on all ranks; ``"auto"`` selects the one expected to be fastest,
        ``"native"`` the MPI's own collective.
    segments : int, optional
        Number of segments into which the data is cut and pipelined through the algorithm.

    Blocking ones also take ``timeout`` in seconds; None is no limit. Of a call that may run the MPI's own collective,
    by ``algorithm="native"`` or by a timing table, all ranks must give one, or none.

    Invalid arguments are reported before anything is sent, as `collectives.errors` that are both mpi4py's
    ``MPI.Exception`` and Python's ``ValueError`` or ``TypeError``.

    Non-blocking collectives progress inside the calls of this package, including inherited blocking point-to-point
    methods and collectives; elsewhere a thread progresses them, sleeping up to a millisecond in between.

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

    constant: str | None = None
    """Name of mpi4py's constant of which this communicator was made, and whose place it takes; None otherwise."""

    _planner: Planner | None = None
    _closing: Planner
    """The planner to be freed once no operation is active."""

    _unread: Mismatch | None = None
    """The error of a message that was left unread, found as resources were released."""

    _has_left = False
    """An error has left a collective on this rank, so that messages of others may be unread."""

    _declarations: Sequence[Declaration] = DECLARATIONS
    _checker: DesyncChecker | None = None
    _run_cached: Callable[..., CallKey | tuple[()]] = staticmethod(_uncached)
    _start_cached: Callable[..., CallKey | Request] = staticmethod(_uncached)
    _calls: Mapping[str, Callable[..., int]] = call_functions()
    _starts: Mapping[str, Callable[..., int]] = call_functions()

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        debug: bool | None = None,
        cuda_aware: bool | None = None,
        shared: bool = True,
        nodes: Sequence[int] | None = None,
        tuning: Tuning = True,
        async_progress: bool = False,
        gpu: str = "kernel",
        timeout: float | None = None,
    ) -> None:
        if comm is None or not isinstance(comm, MPI.Intracomm):
            raise InvalidType(MPI.ERR_COMM, f"comm: expected an MPI.Intracomm, found {comm!r}")
        if comm == MPI.COMM_NULL:
            raise InvalidArgument(MPI.ERR_COMM, "comm: MPI.COMM_NULL has no ranks")
        if not MPI.Is_initialized():
            message = "comm: of a session, but MPI is not initialized, as mpi4py.rc.initialize or MPI.Init would do it"
            raise InvalidArgument(MPI.ERR_COMM, message)
        plain = MPI.Intracomm(comm)
        self.constant = next((name for name, constant in PREDEFINED.items() if comm is constant), None)
        # Also a barrier that progresses all active operations: no rank waits for them in the blocking calls below.
        bits = common(plain, (MPI.Query_thread() == MPI.THREAD_MULTIPLE) | (not async_progress) << 1)
        threads, has_thread = bool(bits & 1), not bits & 2
        checks = is_wanted(plain, debug, os.environ.get("CHORUS_DEBUG", ""))
        given, transfer = agree_on_nodes(plain, nodes), agree_on_gpu(plain, gpu)
        limit = agree_on_timeout(plain, timeout, os.environ.get("CHORUS_TIMEOUT", ""))
        aware = bool(reduced(plain, cuda_support.cuda_aware() if cuda_aware is None else cuda_aware, MPI.LAND))
        with counting_communicators():
            (table, unusable), private = broadcast_table(plain, tuning), without_attributes(plain)
        placement = place_ranks(private, shared and not aware, given)
        watcher.know(private, placement.nodes)
        if has_thread and placement.nodes is not None and not threads:
            private.Free()
            raise InvalidArgument(
                MPI.ERR_ARG, "async_progress: expected MPI.THREAD_MULTIPLE between several nodes, found less on a rank"
            )
        agreed = Agreement(threads, has_thread, checks, aware, shared, given, transfer, table, limit)
        self._open(private, placement, agreed)
        if unusable is not None and self._rank == 0:
            warn_without_table(unusable)

    def _open(self, private: MPI.Intracomm, placement: NodePlacement, agreed: Agreement) -> None:
        """Prepare for calls: with messages on `private`, of these ranks, and settings `agreed` by them. Collective."""
        self._agreed, self._threads, self.timeout = agreed, agreed.threads, agreed.timeout
        self._rank, self._size = private.Get_rank(), private.Get_size()
        transports = Transports(private, placement, agreed.aware, agreed.gpu)
        self._checker = DesyncChecker(private) if agreed.checks else None
        chooser = AlgorithmChooser(transports, agreed.table, agreed.threads)
        self._planner = Planner(transports, chooser, self._checker, agreed.async_progress, agreed.timeout)
        if self._checker is None:
            self._run_cached, self._start_cached = self._planner.cache.run_cached, self._planner.start_cached
            self._calls = self._planner.cache.compiled_calls.run
            self._starts = self._planner.nonblocking.compiled_calls.run
        else:
            self._report_refusals(self._checker)
        if agreed.timeout is not None:
            self._limit_calls(agreed.timeout)
        watcher.start(request_moves, stall_requests)
        self._number = next(_numbers)
        open_communicators[self._number] = self

    # -------------------------------------------------------------------------------- from a call to a program

    def __new__(cls, comm: MPI.Intracomm | None = None, *_: Any, **__: Any) -> Self:
        """Create an object of mpi4py, of the class for the topology that `comm` has."""
        if cls is Communicator and isinstance(comm, MPI.Intracomm) and comm != MPI.COMM_NULL:
            cls = topology_classes.get(comm.Get_topology(), cls)  # type: ignore[assignment]
        return super().__new__(cls, comm)

    @property
    def plain(self) -> MPI.Intracomm:
        """This communicator as an object of mpi4py's class, with the MPI's own collectives."""
        return MPI.Intracomm(self)

    def __getattr__(self, name: str) -> Any:
        """Attribute of one that a method of mpi4py's classes has made, which calls no `__init__`. Collective then."""
        if name not in ("_agreed", "_rank", "_size") or self == MPI.COMM_NULL:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        Communicator.__init__(self, MPI.Intracomm(self))
        return self.__dict__[name]

    def _open_planner(self) -> Planner:
        if self._planner is None and self != MPI.COMM_NULL:
            self._rank  # noqa: B018 (found by `__getattr__` where this was never opened)
        if self._planner is None:
            raise InvalidArgument(
                MPI.ERR_COMM, "this communicator was freed, or never made by collectives.Communicator(comm)"
            )
        return self._planner

    def _break_off(self, form: str, error: BaseException, name: str, *memory: object) -> None:
        """Refuse later calls of a form if an error has left a compiled one unfinished; mark the error.

        Its attribute `left_collective` tells callers that other ranks may be in a collective that this one has left.
        """
        error.left_collective = self._has_left = True  # type: ignore[attr-defined]
        if self._checker is not None and isinstance(error, Timeout):
            self._checker.is_left = True
        if self._planner is not None:
            cache = self._planner.cache if form == "blocking" else self._planner.nonblocking
            cache.break_off(error, name, *memory)

    def _report_refusals(self, checker: DesyncChecker) -> None:
        """Wrap every collective so that invalid arguments on this rank are reported to the other ranks (debug mode).

        The wrappers are attributes of this object, so that calls outside debug mode have no extra layer.
        """

        def reporting(name: str, form: str) -> Callable[..., Any]:
            method = getattr(self, method_name(name, form))

            def call(*args: Any, **keywords: Any) -> Any:
                checker.reported = False
                try:
                    return method(*args, **keywords)
                except Exception as error:
                    if self._planner is not None and not checker.reported:
                        self._planner.transports.consume_tag()  # as on the other ranks, which make the call
                        delivered = checker.refuse(form, name.lower(), error)
                        if form != "non-blocking" and not checker.is_left:
                            checker.is_left = True
                            with suppress(Timeout), limited(keywords.get("timeout"), self._rank):
                                progress_until(delivered)
                                checker.is_left = False
                    raise

            return call

        for declaration, form in product(self._declarations, FORMS):
            self.__dict__[method_name(declaration.name, form)] = reporting(declaration.name, form)

    def _limit_calls(self, timeout: float) -> None:
        """Give every blocking collective a default time limit: by attributes of this object, as in debug mode."""
        for name in (declaration.name for declaration in self._declarations):
            self.__dict__[name] = partial(getattr(self, name), timeout=timeout)

    def _counts(self, sendbuf: Any, recvbuf: Any, recvcounts: Any) -> Any:
        """Receive counts of a reduce-scatter: as given, else the elements of every rank's recvbuf (collective)."""
        if recvcounts is not None:
            return recvcounts
        planner = self._open_planner()
        if is_in_place(sendbuf):
            raise InvalidArgument(MPI.ERR_COUNT, "recvcounts: MPI.IN_PLACE needs them")
        mine = np.array([vector(recvbuf, "recvbuf", writable=True).count])  # raises before the other ranks wait for it
        counts = np.zeros(self._size, mine.dtype)
        if self._checker is not None:
            planner.transports.consume_tag()
            exchange = Call("reduce_scatter", (0,), BYTE)
            agreed = self._checker.check("asking for recvcounts", exchange, AlgorithmChoice("auto"), last=False)
            progress_until(agreed, others("reduce_scatter"))
            self._checker.start_native()
        progress_until(planner.comm.Iallgather(mine, counts).Test, Others("reduce_scatter", "for recvcounts"))
        return counts.tolist()

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """Node number of every rank, by first appearance; None if all ranks are on one node."""
        return self._open_planner().nodes

    @property
    def message_speed(self) -> MessageSpeed:
        """Speed of messages on the slowest node, measured when its ranks first share memory.

        Zeros if a node has no shared memory, or fewer cores than ranks.
        """
        return self._open_planner().transports.message_speed

    @property
    def costs(self) -> Costs:
        """Costs of messages within and between nodes that ``algorithm="auto"`` assumes; equal on all ranks."""
        return self._open_planner().chooser.selector.costs

    @property
    def device_transfer(self) -> str:
        """Transfer of GPU arrays: "direct", "kernel", "peer", or "pinned: " or "staged: " and why no better one.

        "none: one rank" where a rank is alone: its calls copy within the GPU's memory, or do nothing.
        """
        return self._open_planner().transports.device_transfer

    def choice(
        self,
        collective: str,
        nbytes: int,
        op: MPI.Op = MPI.SUM,
        form: Form = BLOCKING,
        symmetric: bool = False,
        in_place: bool = False,
    ) -> Selection:
        """Algorithm that ``algorithm="auto"`` selects for a message size, with its predicted seconds and their source.

        Parameters
        ----------
        collective : str
            A name known to `collectives.algorithms`.
        nbytes : int
            Bytes of the vector, or of all blocks together. Ignored where ranks know only their own block's length.
        op : MPI.Op
            The reduction, if any, on elements that MPI supports too.
        form : "blocking", "nonblocking" or "persistent"
        symmetric, in_place : bool
            The arrays come from `empty`, and the call is in place, on all ranks; for the persistent form.

        Returns
        -------
        Selection
            ``(algorithm, segments, seconds, source)``: predicted seconds, from ``"measured"`` times or the ``"model"``.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> alone = Communicator(MPI.COMM_SELF, tuning=False)
        >>> alone.choice("barrier", 0)
        Selection(algorithm='linear', segments=1, seconds=0.0, source='model')
        """
        planner = self._open_planner()
        shared = symmetric and form == "persistent" and planner.node is not None and planner.node.reads
        return planner.chooser.select(collective, nbytes, op, form, shared, in_place)

    # -------------------------------------------------------------------------------- shared-memory arrays

    def empty(self, shape: Any, dtype: Any = float, like: Any = None) -> Any:
        """Allocate an array of this rank's own in memory that the ranks of its node share. Collective.

        Collectives on it copy less, as peers read it directly. The memory is freed with the last array on it (``del``),
        that of a GPU in a later call with `like`. Ordinary memory on systems without shared memory.

        Parameters
        ----------
        shape : int or tuple of int
            May differ between ranks.
        dtype : dtype, optional
        like : module or array, optional
            The module ``cupy``, or one of its arrays: allocate on the GPU. The same on all ranks.

        Raises
        ------
        InvalidArgument, InvalidType
            On all ranks, if the shape or dtype of one of them is invalid; the message names the rank.
        OutOfMemory
            On all ranks, if one of them cannot allocate.
        """
        planner, error = self._open_planner(), None
        try:
            lengths, element = shape_and_dtype(shape, dtype)
        except InvalidInput as invalid:
            error = invalid
        if self._checker is not None:
            self._checker.start_native()
        progress_until(planner.comm.Ibarrier().Test)  # peers may first need the active operations of this rank
        if like is not None and not on_gpu(like) and error is None:
            error = InvalidType(MPI.ERR_ARG, f"like: expected cupy, or one of its arrays, found {like!r}")
        if len(set(gather_or_raise(planner.comm, error or on_gpu(like)))) > 1:
            raise InvalidArgument(MPI.ERR_ARG, "like: a GPU on some ranks, and none on others")
        if like is not None:
            return planner.transports.allocate_on_gpu(lengths, element)
        return planner.transports.allocate(prod(lengths) * element.itemsize).view(element).reshape(lengths)

    def zeros(self, shape: Any, dtype: Any = float) -> np.ndarray:
        """Like `empty`, filled with zeros."""
        return self.full(shape, 0, dtype)

    def full(self, shape: Any, fill_value: Any, dtype: Any = None) -> np.ndarray:
        """Like `empty`, filled with `fill_value`; `dtype` defaults to that of `fill_value`."""
        array: np.ndarray = self.empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
        array[...] = fill_value
        return array

    def like(self, array: Any) -> np.ndarray:
        """Like `empty`, with the shape, dtype and values of an array."""
        array = np.asarray(array)
        return self.full(array.shape, array, array.dtype)

    # -------------------------------------------------------------------------------- new communicators and release

    def _adopt(self, comm: Any) -> Any:
        """Wrap a new mpi4py communicator in a `Communicator` with this one's settings; keep MPI.COMM_NULL as it is.

        It has what this one's ranks have agreed on, measured and mapped, if this one is not closed.
        """
        if comm == MPI.COMM_NULL:
            return comm
        is_alike = comm.Get_topology() == self.Get_topology()
        made = Communicator.__new__(type(self) if is_alike else Communicator, comm)
        try:
            private = without_attributes(MPI.Intracomm(comm))
        except MPI.Exception:
            MPI.Intracomm(comm).Free()
            raise
        group, mine = private.Get_group(), (self if self._planner is None else self._planner.comm).Get_group()
        ranks = group.Translate_ranks(None, mine)
        group.Free()
        mine.Free()
        agreed, placement = self._agreed.part(ranks), None
        if self._planner is not None:
            placement = self._planner.transports.placement.part(ranks)
        if placement is None:  # a closed one has none: all ranks find theirs anew
            placement = place_ranks(private, agreed.shared and not agreed.aware, agreed.nodes)
        made._open(private, placement, agreed)
        return made

    def Idup(self, info: MPI.Info | None = None) -> Any:
        """Non-blocking Dup: return a plain mpi4py communicator, usable once the request completes, and the request."""
        return MPI.Intracomm(self).Idup(info)

    def Idup_with_info(self, info: MPI.Info) -> Any:
        """Like `Idup`."""
        return MPI.Intracomm(self).Idup_with_info(info)

    Clone, Dup, Dup_with_info, Split, Split_type, Create = map(
        adopting, ("Clone", "Dup", "Dup_with_info", "Split", "Split_type", "Create")
    )

    Create_cart, Create_graph, Create_dist_graph, Create_dist_graph_adjacent = map(
        adopting, ("Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent")
    )

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Communicator of a group, as in mpi4py: a `Communicator`, or ``MPI.COMM_NULL`` outside the group."""
        progress_thread.wake()  # no barrier in place of it, since this is collective over the group alone
        return self._adopt(MPI.Intracomm(self).Create_group(group, tag))

    def close(self) -> None:
        """Release Chorus's resources once no operation is active; the MPI communicator remains usable. Collective.

        No rank waits for another. So it is also the end of ``with Communicator(comm) as ours: ...``, after an exception
        on this rank alone too. Later collectives raise.

        Raises
        ------
        Mismatch
            If ranks have made different calls, so that a message was not read. Everything is released then, too.
        """
        if self._planner is None:
            return
        self._closing, self._planner = self._planner, None
        for name in ("_calls", "_starts", "_run_cached", "_start_cached"):  # absent in debug mode
            self.__dict__.pop(name, None)
        self._closing.close(self._release)
        if self._unread is not None and not self._has_left:
            raise self._unread

    def _release(self) -> None:
        self._unread = self._closing.free()
        if self._checker is not None:
            self._checker.free()
        open_communicators.pop(self._number, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Mismatch:  # after an exception on this rank, messages of others may well be unread
            if kind is None:
                raise

    def Free(self) -> None:
        """`close`, and free the MPI communicator; raise for predefined ones, such as ``MPI.COMM_WORLD``. Collective."""
        if self in PREDEFINED.values():
            raise InvalidArgument(MPI.ERR_COMM, f"{self.Get_name()} is MPI's own: close() releases Chorus's resources")
        try:
            self.close()
        finally:
            super().Free()

    def free(self) -> None:
        """`close`, and free the MPI communicator unless it is predefined. Collective.

        Does nothing if made of mpi4py's constant ``MPI.COMM_WORLD`` or ``MPI.COMM_SELF`` itself, as their `free`.
        """
        if self.constant is not None:
            return
        try:
            if self in PREDEFINED.values():
                self.close()
        finally:
            super().free()

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """The open `Communicator` with this MPI handle; without one mpi4py's communicator."""
        plain = MPI.Intracomm.fromhandle(handle)
        return next((comm for comm in open_communicators.values() if comm == plain), plain)

    def Disconnect(self) -> None:
        """Wait for all pending communication, then `close` and disconnect. Collective."""
        planner = self._planner
        if planner is not None:
            progress_until(lambda: not planner.active)
        self.close()
        self._accompany(super().Disconnect)

    def __copy__(self, memo: object = None) -> Self:
        """Return this object if it is predefined, such as ``MPI.COMM_WORLD``, as mpi4py does; else raise NotCopied."""
        if self in (*PREDEFINED.values(), MPI.COMM_NULL):
            return self
        raise NotCopied(MPI.ERR_COMM, "a Communicator cannot be copied by one rank alone: Dup() makes another one")

    __deepcopy__ = __copy__

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle by name if made of mpi4py's constant (unpickled by `restore`), else raise NotCopied."""
        if self.constant is not None:
            return restore, (self.constant, self._number)
        message = "a Communicator cannot be pickled, as all ranks make it together: Communicator(comm) makes one"
        raise NotCopied(MPI.ERR_COMM, message)

"""Hogwild!: all ranks of a node update the same weights in one shared window, without locks.

A rank reads the weights while others write, and adds its own updates. Of two concurrent writes of an element one is
lost. (Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS
2011.) Ranks synchronise only to evaluate, to save and to end.
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.asynchronous.decentralized.averaging_style import AveragingStyle, ReplicaSums
from parallel.engine.data_parallel.run_context import RunContext
from parallel.runtime.left_windows import SharedWindow
from parallel.runtime.vector_memory import VectorAllocator
from quant.types import Array

LINE = 128  # bytes before the weights in the window: one counter, in separate cache lines
ENDS = 1 << 48  # added to the counter by a request to end: larger than any number of steps


class WindowAllocator(VectorAllocator):
    """Allocator that places parameters in a window shared by all ranks. ValueError if they are not all on one node."""

    def __init__(self, comm: Communicator, device: str = "cpu"):
        super().__init__(comm, device)
        self.shared_window: SharedWindow | None = None
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        shares = comm.nodes is None and node.Get_size() == comm.Get_size()
        node.Free()
        if not comm.allreduce(shares, MPI.LAND):
            nodes = "several" if comm.nodes is None else len(set(comm.nodes))
            raise ValueError(f"hogwild: the ranks must share the memory of one node, and they are on {nodes}")

    def shared(self, kind: str, size: int, dtype: Any) -> Any:
        if kind != "parameters":
            return super().shared(kind, size, dtype)
        mine = LINE + size * np.dtype(dtype).itemsize if self.comm.Get_rank() == 0 else 0
        window = MPI.Win.Allocate_shared(mine, 8, comm=self.comm)
        self.shared_window = SharedWindow(self.comm, window)
        memory: Any = window.Shared_query(0)[0]
        whole: np.ndarray = np.frombuffer(memory, np.uint8)
        if mine:
            whole[...] = 0
        self.comm.Barrier()
        return self._count(kind, whole[LINE:].view(dtype))

    def leave(self) -> None:
        if self.shared_window is not None:
            self.shared_window.leave()


class Hogwild(AveragingStyle):
    """Hogwild: all ranks update the same shared weights without locks. No exchange of replicas is needed.

    Ranks may be in different steps. The counter in the window holds the largest number of steps of any rank. The first
    request to end adds `ENDS`. This freezes it: all ranks end with the following step.
    """

    def __init__(self, context: RunContext, vector: Array):
        super().__init__(context, vector)
        assert isinstance(context.memory, WindowAllocator) and context.memory.shared_window is not None
        self._shared = context.memory.shared_window

    def request_stop(self, step: int) -> None:
        if self._count(MPI.MAX, step) < ENDS:
            self._count(MPI.SUM, ENDS)
        self._publish(step)

    def begin_step(self) -> None:
        """Like in the base class. Ranks do not wait in steps, and may make different numbers of them."""
        self.point.expect_all()

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        self._publish(step + 1)
        return sums

    def drain(self) -> None:
        self.point.gather()

    def mean(self, out: Array) -> None:
        out[...] = self.vector

    def begin(self) -> None:
        self.point.gather()
        if self.rank == 0 and self._count(MPI.MAX, 0) < ENDS:  # steps may be fewer now, but a request to end stays
            self._count(MPI.REPLACE, 0)
        self.point.gather()

    def finish(self) -> None:
        super().finish()
        self.point.meet("step")
        if self.rank == 0:
            self._count(MPI.REPLACE, 0)
        self.point.gather()

    def close(self) -> None:
        self._shared.free()

    def _publish(self, steps: int) -> None:
        """Publish this rank's number of steps in the shared counter, and check it for stop requests of other ranks."""
        count = max(self._count(MPI.MAX, steps), steps)
        if count >= ENDS:
            self.last = count % ENDS

    def _count(self, op: MPI.Op, value: int) -> int:
        """Apply `op` with `value` to the shared counter atomically. Returns its previous value."""
        operand, previous = np.array([value], np.int64), np.empty(1, np.int64)
        window = self._shared.window
        assert window is not None
        window.Fetch_and_op([operand, MPI.INT64_T], [previous, MPI.INT64_T], 0, 0, op)
        window.Flush(0)
        return int(previous[0])

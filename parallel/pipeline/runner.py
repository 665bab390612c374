"""Execution of one stage's actions: computes, sends and receives in the order of the plan.

Sends and receives are started in plan order. A receive is completed before its data is needed, sends at the end, so
messages overlap with computation. An empty message indicates missing data: after a failure a stage and its successors
still exchange all messages, so no stage blocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

import numpy as np
from mpi4py import MPI

from collectives.runtime.requests import active_requests, progress
from collectives.transport.wire import pause
from parallel.nn.operator import ArraySpec
from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.pipeline.schedule.stage_placement import StagePlace
from parallel.runtime.profiler import Profiler
from parallel.runtime.vector_memory import to_host
from quant.types import Array

MANY_SENDS = 8
"""Number of pending sends from which completed ones are removed."""


SPIN_SECONDS, SLEEP_SECONDS = 500e-6, 50e-6
"""Seconds of busy waiting, and of sleep between later polls."""


class StageWork(Protocol):
    """Computations of a stage. None stands for missing arrays."""

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        """F: output of a chunk from the previous part's output; input and output are None at the ends of the model."""

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        """B, or BW if `whole`: gradient of the chunk's input from the gradient of its output."""

    def weights(self, chunk: int, microbatch: int) -> None:
        """W: gradients of the chunk's weights."""

    def update(self, chunk: int, number: int) -> None:
        """U: update of the chunk's weights."""

    def made(self, part: int, microbatch: int) -> ArraySpec:
        """Shape and dtype of a part's output, and of its gradient."""


@dataclass(frozen=True, slots=True)
class BoundAction:
    """Action with the data that the plan implies for its stage.

    Attributes
    ----------
    key : tuple
        Of messages: kind of the data, receiving chunk, microbatch.
    peer, tag : int
        Peer stage and tag of a message.
    part : int
        Part of the model whose output or output gradient a message carries.
    target : tuple or None
        Key of the result if the next part is on the same stage, so that there is no message.
    """

    action: Action
    label: str
    key: tuple[str, int, int]
    peer: int = -1
    tag: int = 0
    part: int = -1
    target: tuple[str, int, int] | None = None


def bind_actions(plan: PipelinePlan, stage: int, title: str = "") -> tuple[BoundAction, ...]:
    """Bind a stage's actions of a plan with messages; `title` is a prefix of their profiler labels."""
    return tuple(
        replace(bound, label=title + bound.label) for bound in (_bind_action(plan, a) for a in plan.actions[stage])
    )


def _bind_action(plan: PipelinePlan, action: Action) -> BoundAction:
    placement, here = plan.placement, StagePlace(action.stage, action.chunk)
    if action.kind in SENDS + RECEIVES:
        kind, peer = action.kind[1], plan.peer(action)
        receiver = peer if action.kind in SENDS else here
        part = placement.part[receiver] - 1 if kind == "F" else placement.part[receiver]
        key = kind, action.chunk if action.kind in SENDS else receiver.chunk, action.microbatch
        return BoundAction(action, str(action), key, peer.stage, 2 * receiver.chunk + (kind == "B"), part)
    kind = "F" if action.kind == "F" else "B"
    following = placement.after.get(here) if kind == "F" else placement.before.get(here)
    target = None
    if following is not None and following.stage == action.stage and action.kind in ("F", "B", "BW"):
        target = kind, following.chunk, action.microbatch
    return BoundAction(action, str(action), (kind, action.chunk, action.microbatch), target=target)


class ScheduleRunner:
    """Executor of one stage.

    Parameters
    ----------
    comm : MPI.Intracomm
        Of the stages of one pipeline, in order.
    recorder : Profiler
    xp : module
        NumPy, or CuPy with messages through host memory.

    Attributes
    ----------
    sent : Counter
        Messages of the last run, by receiving stage.
    """

    def __init__(self, comm: MPI.Intracomm, recorder: Profiler, xp: ModuleType = np):
        self._comm, self._recorder, self._xp = comm, recorder, xp
        self._status = MPI.Status()
        self._coming: dict[tuple[str, int, int], tuple[MPI.Request, np.ndarray]] = {}
        self._ready: dict[tuple[str, int, int], Array] = {}
        self._made: dict[tuple[str, int, int], Array] = {}
        self._leaving: list[tuple[MPI.Request, np.ndarray]] = []
        self.sent: Counter[int] = Counter()
        self._do = {
            "F": self._forward, "B": self._backward, "BW": self._backward, "W": self._weights, "U": self._update,
            "SF": self._send, "SB": self._send, "RF": self._receive, "RB": self._receive,
        }  # fmt: skip

    def run(self, line: Sequence[BoundAction], work: StageWork) -> None:
        """Execute the stage's actions, together with the other stages of the communicator.

        Parameters
        ----------
        line : sequence of BoundAction
            Of a simulated plan; it is not checked again.
        work : StageWork
        """
        self.sent.clear()
        for bound in line:
            self._do[bound.action.kind](bound, work)
        self._made.clear()
        began = time.perf_counter()
        for request, _ in self._leaving:
            progress_until(request.Test)
        self._leaving.clear()
        self._recorder.note("communication", "last sends", began, time.perf_counter())

    def progress(self) -> None:
        """Progress messages and gradient sums during a long computation."""
        if active_requests:
            progress()
        elif self._coming or self._leaving:
            self._comm.Iprobe()

    # ------------------------------------------------------------------------------------------ computations

    def _forward(self, bound: BoundAction, work: StageWork) -> None:
        action = bound.action
        x = self._taken(bound)
        with self._recorder("compute", bound.label):
            y = work.forward(action.chunk, action.microbatch, x)
        self._keep(bound, y)

    def _backward(self, bound: BoundAction, work: StageWork) -> None:
        action = bound.action
        dy = self._taken(bound)
        with self._recorder("compute", bound.label):
            dx = work.backward(action.chunk, action.microbatch, dy, action.kind == "BW")
        self._keep(bound, dx)

    def _weights(self, bound: BoundAction, work: StageWork) -> None:
        with self._recorder("compute", bound.label):
            work.weights(bound.action.chunk, bound.action.microbatch)

    def _update(self, bound: BoundAction, work: StageWork) -> None:
        with self._recorder("compute", bound.label):
            work.update(bound.action.chunk, bound.action.microbatch)

    def _keep(self, bound: BoundAction, result: Array) -> None:
        """Keep a result for the next part on this stage, or until it is sent."""
        if bound.target is not None:
            self._ready[bound.target] = result
        elif result is not None:
            self._made[bound.key] = result

    # ------------------------------------------------------------------------------------------ messages

    def _receive(self, bound: BoundAction, work: StageWork) -> None:
        form = work.made(bound.part, bound.action.microbatch)
        buffer = np.empty(form.shape, form.dtype)
        request = self._comm.Irecv([_bytes(buffer), MPI.BYTE], bound.peer, bound.tag)
        self._coming[bound.key] = request, buffer

    def _taken(self, bound: BoundAction) -> Array:
        """Input of a computation; None if it is missing or provided by the model."""
        if bound.key not in self._coming:
            return self._ready.pop(bound.key, None)
        request, buffer = self._coming.pop(bound.key)
        if not request.Test(self._status):
            began = time.perf_counter()
            progress_until(lambda: request.Test(self._status))
            self._recorder.note("communication", "wait", began, time.perf_counter(), action=bound.label)
        if self._status.Get_count(MPI.BYTE) != buffer.nbytes or not buffer.nbytes:
            return None
        return self._xp.asarray(buffer)

    def _send(self, bound: BoundAction, work: StageWork) -> None:
        made = self._made.pop(bound.key, None)
        payload = NOTHING if made is None else _bytes(np.ascontiguousarray(to_host(made)))
        self._leaving.append((self._comm.Isend([payload, MPI.BYTE], bound.peer, bound.tag), payload))
        self.sent[bound.peer] += 1
        if len(self._leaving) >= MANY_SENDS:
            self._leaving = [(request, array) for request, array in self._leaving if not request.Test()]


def progress_until(done: Callable[[], bool]) -> None:
    """Make progress until `done`; sleeps between polls after `SPIN_SECONDS`, as stages may wait long."""
    began = time.perf_counter()
    while not done():
        progress()
        if time.perf_counter() - began < SPIN_SECONDS:
            pause()
        else:
            time.sleep(SLEEP_SECONDS)


NOTHING = np.empty(0, np.uint8)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)

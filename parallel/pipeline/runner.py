"""Carries out one stage's line of a plan: computes what it is told, sends and receives beside it.

Receives and sends are started where the plan says. A receive is waited for when somebody needs what it brings, sends at
the end, so messages travel while the stage computes. An empty message says that the sender has nothing: a stage that
has failed, and all behind it, take part to the end, and nobody waits for them in vain.
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

from collectives.runtime.requests import progress, under_way
from collectives.transport.wire import pause
from parallel.runtime.vector_memory import to_host
from parallel.nn.operator import Array, Spec
from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action
from parallel.pipeline.schedule.stage_placement import Place
from parallel.pipeline.schedule.pipeline_plan import Plan
from parallel.runtime.profiler import Recorder

MANY_SENDS = 8
"""From so many on it is seen which of them are over."""


BUSY, NAP = 500e-6, 50e-6
"""Seconds: a wait that is longer naps, so long at a time."""


class Work(Protocol):
    """What a stage computes. Arrays come and go; None stands for nothing."""

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        """F: what the next part takes, from what the part before made; None at the ends of the model."""

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        """B, or BW for the `whole` of it: the gradient of `forward`'s input, from that of its result."""

    def weights(self, chunk: int, microbatch: int) -> None:
        """W."""

    def update(self, chunk: int, number: int) -> None:
        """U."""

    def made(self, part: int, microbatch: int) -> Spec:
        """What a part of the model makes of a micro-batch, and of what form its gradient is."""


@dataclass(frozen=True, slots=True)
class Deed:
    """An action, and what follows from the plan for the stage that does it.

    Attributes
    ----------
    key : tuple
        Of messages: the kind of what they carry, the receiving chunk, the micro-batch.
    peer, tag : int
        The stage at the other end of a message, and what tells it from others between the two.
    part : int
        Which part of the model has made, or is to have the gradient of, what a message carries.
    target : tuple or None
        The key of what is computed, where this stage has the next part as well and so there is no message.
    """

    action: Action
    label: str
    key: tuple[str, int, int]
    peer: int = -1
    tag: int = 0
    part: int = -1
    target: tuple[str, int, int] | None = None


def deeds(plan: Plan, stage: int, title: str = "") -> tuple[Deed, ...]:
    """A stage's line of a plan that has its messages, for a `Runner`; noted with a `title` before each action."""
    return tuple(replace(deed, label=title + deed.label) for deed in (_deed(plan, a) for a in plan.actions[stage]))


def _deed(plan: Plan, action: Action) -> Deed:
    placement, here = plan.placement, Place(action.stage, action.chunk)
    if action.kind in SENDS + RECEIVES:
        kind, peer = action.kind[1], plan.peer(action)
        receiver = peer if action.kind in SENDS else here
        part = placement.part[receiver] - 1 if kind == "F" else placement.part[receiver]
        key = kind, action.chunk if action.kind in SENDS else receiver.chunk, action.microbatch
        return Deed(action, str(action), key, peer.stage, 2 * receiver.chunk + (kind == "B"), part)
    kind = "F" if action.kind == "F" else "B"
    following = placement.after.get(here) if kind == "F" else placement.before.get(here)
    target = None
    if following is not None and following.stage == action.stage and action.kind in ("F", "B", "BW"):
        target = kind, following.chunk, action.microbatch
    return Deed(action, str(action), (kind, action.chunk, action.microbatch), target=target)


class Runner:
    """A stage at work.

    Parameters
    ----------
    comm : MPI.Intracomm
        Of the stages, in order, and of nobody else.
    recorder : Recorder
        Computations are noted by their actions, waiting by what was waited for.
    xp : module
        NumPy, or CuPy: messages travel through host memory then.

    Attributes
    ----------
    sent : Counter
        Messages of the last run, by the stage that they went to.
    """

    def __init__(self, comm: MPI.Intracomm, recorder: Recorder, xp: ModuleType = np):
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

    def run(self, line: Sequence[Deed], work: Work) -> None:
        """Do a line, while the other stages of the communicator do theirs of the same plan.

        Parameters
        ----------
        line : sequence of Deed
            Of a plan that was proved: nothing is looked after here.
        work : Work
        """
        self.sent.clear()
        for deed in line:
            self._do[deed.action.kind](deed, work)
        self._made.clear()
        began = time.perf_counter()
        for request, _ in self._leaving:
            patiently(request.Test)
        self._leaving.clear()
        self._recorder.note("communication", "last sends", began, time.perf_counter())

    def progress(self) -> None:
        """Let messages and sums of gradients go on, in the midst of a long computation."""
        if under_way:
            progress()
        elif self._coming or self._leaving:
            self._comm.Iprobe()

    # ------------------------------------------------------------------------------------------ computations

    def _forward(self, deed: Deed, work: Work) -> None:
        action = deed.action
        x = self._taken(deed)
        with self._recorder("compute", deed.label):
            y = work.forward(action.chunk, action.microbatch, x)
        self._keep(deed, y)

    def _backward(self, deed: Deed, work: Work) -> None:
        action = deed.action
        dy = self._taken(deed)
        with self._recorder("compute", deed.label):
            dx = work.backward(action.chunk, action.microbatch, dy, action.kind == "BW")
        self._keep(deed, dx)

    def _weights(self, deed: Deed, work: Work) -> None:
        with self._recorder("compute", deed.label):
            work.weights(deed.action.chunk, deed.action.microbatch)

    def _update(self, deed: Deed, work: Work) -> None:
        with self._recorder("compute", deed.label):
            work.update(deed.action.chunk, deed.action.microbatch)

    def _keep(self, deed: Deed, result: Array) -> None:
        """For this stage's next part, or until it is sent."""
        if deed.target is not None:
            self._ready[deed.target] = result
        elif result is not None:
            self._made[deed.key] = result

    # ------------------------------------------------------------------------------------------ messages

    def _receive(self, deed: Deed, work: Work) -> None:
        form = work.made(deed.part, deed.action.microbatch)
        buffer = np.empty(form.shape, form.dtype)
        request = self._comm.Irecv([_bytes(buffer), MPI.BYTE], deed.peer, deed.tag)
        self._coming[deed.key] = request, buffer

    def _taken(self, deed: Deed) -> Array:
        """What a computation begins with; None if it is nothing, or the model's own business."""
        if deed.key not in self._coming:
            return self._ready.pop(deed.key, None)
        request, buffer = self._coming.pop(deed.key)
        if not request.Test(self._status):
            began = time.perf_counter()
            patiently(lambda: request.Test(self._status))
            self._recorder.note("communication", "wait", began, time.perf_counter(), action=deed.label)
        if self._status.Get_count(MPI.BYTE) != buffer.nbytes or not buffer.nbytes:
            return None
        return self._xp.asarray(buffer)

    def _send(self, deed: Deed, work: Work) -> None:
        made = self._made.pop(deed.key, None)
        payload = NOTHING if made is None else _bytes(np.ascontiguousarray(to_host(made)))
        self._leaving.append((self._comm.Isend([payload, MPI.BYTE], deed.peer, deed.tag), payload))
        self.sent[deed.peer] += 1
        if len(self._leaving) >= MANY_SENDS:
            self._leaving = [(request, array) for request, array in self._leaving if not request.Test()]


def patiently(done: Callable[[], bool]) -> None:
    """Make progress until `done`. Stages wait for long: whose core others could use sleeps between two looks."""
    began = time.perf_counter()
    while not done():
        progress()
        if time.perf_counter() - began < BUSY:
            pause()
        else:
            time.sleep(NAP)


NOTHING = np.empty(0, np.uint8)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)

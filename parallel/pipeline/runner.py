"""Execution of one stage's actions: computes, sends and receives in the order of the plan.

Sends and receives are started in plan order. A receive is completed before its data is needed, sends at the end, so
messages overlap with computation. The passes of a pair are computed in turns, after the receives of both. An empty
message indicates missing data: after a failure a stage and its successors still exchange all messages, so no stage
blocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.runtime.execution.message_wait import wait_for
from collectives.runtime.execution.progress import active_requests, progress
from parallel.nn.array_checks import is_float
from parallel.nn.operator import ArraySpec, parts_of, spec_of
from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action
from parallel.pipeline.schedule.lowering import COMPUTED
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.runtime.interleaving import interleave
from parallel.runtime.profiler import Profiler
from parallel.runtime.vector_memory import to_host
from quant.types import Array

MANY_SENDS = 8
"""Number of pending sends from which completed ones are removed."""

NOTHING = np.empty(0, np.uint8)


class StageWork(Protocol):
    """Interface of a stage's computations. An array is None if missing, or at the model's input and loss.

    `forward` returns the output of a chunk (F), `backward` the gradient of its input (B, or BW if `whole`); `weights`
    computes its weight gradients (W) and `update` applies them (U). `output_spec` is that of a part's output.
    """

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array: ...
    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array: ...
    def weights(self, chunk: int, microbatch: int) -> None: ...
    def update(self, chunk: int, number: int) -> None: ...
    def output_spec(self, part: int, microbatch: int) -> ArraySpec: ...


@dataclass(frozen=True, slots=True)
class BoundAction:
    """Pipeline action with what its execution needs: label, key of its data, peer stage and tag of a message."""

    action: Action
    label: str
    key: tuple[str, int, int]  # kind of the data, chunk of this action, micro-batch
    peer: int = -1
    tag: int = 0
    part: int = -1  # of the model, whose output or output gradient a message carries
    target: tuple[str, int, int] | None = None  # key of the result if the next part is on the same stage: no message
    partner: BoundAction | None = None  # second action of a pair, of which this is the first


def bind_actions(plan: PipelinePlan, stage: int, title: str = "") -> list[BoundAction]:
    """Bound actions of one stage, from a plan with messages. `title` is a prefix of their profiler labels."""
    line, actions = [], iter(plan.actions[stage])
    for action in actions:
        bound = _bind_action(plan, action, f"{title}{action}")
        if action in plan.partners:
            partner = next(actions)
            bound = replace(bound, partner=_bind_action(plan, partner, f"{title}{partner}"))
        line.append(bound)
    return line


def actions_of(line: Iterable[BoundAction]) -> Iterator[Action]:
    """Actions of a line, those of pairs one after the other."""
    for bound in line:
        yield bound.action
        if bound.partner is not None:
            yield bound.partner.action


def _bind_action(plan: PipelinePlan, action: Action, label: str) -> BoundAction:
    placement, here = plan.placement, action.place
    if action.kind in SENDS + RECEIVES:
        kind, peer = action.kind[1], plan.peer(action)
        receiver = peer if action.kind in SENDS else here
        part = placement.part[receiver] - 1 if kind == "F" else placement.part[receiver]
        key = kind, action.chunk if action.kind in SENDS else receiver.chunk, action.microbatch
        # The tag is of the receiver's chunk, which both ends know.
        return BoundAction(action, label, key, peer.stage, 2 * receiver.chunk + (kind == "B"), part)
    kind = "F" if action.kind == "F" else "B"
    following = plan.target(action) if action.kind in COMPUTED else None
    target = None
    if following is not None and following.stage == action.stage:
        target = kind, following.chunk, action.microbatch
    return BoundAction(action, label, (kind, action.chunk, action.microbatch), target=target)


class ScheduleRunner:
    """Executor of one stage's actions. The ranks of `comm` are the stages of one pipeline, in order.

    With CuPy as `xp` messages pass through host memory. `sent` counts the messages of the last run by receiving stage.
    """

    def __init__(self, comm: MPI.Intracomm, recorder: Profiler, xp: ModuleType = np):
        self._comm, self._recorder, self._xp = comm, recorder, xp
        self._status = MPI.Status()
        self._receiving: dict[tuple[str, int, int], tuple[MPI.Request, ActivationMessage]] = {}
        self._ready: dict[tuple[str, int, int], Array] = {}
        self._computed: dict[tuple[str, int, int], Array] = {}
        self._sending: list[tuple[MPI.Request, np.ndarray, BoundAction]] = []
        self.sent: Counter[int] = Counter()
        self._execute = dict.fromkeys(("F", "B", "BW"), self._forward_or_backward)
        self._execute |= dict.fromkeys(("W", "U"), self._weights_or_update)
        self._execute |= dict.fromkeys(SENDS, self._send) | dict.fromkeys(RECEIVES, self._receive)

    def run(self, line: Sequence[BoundAction], work: StageWork) -> None:
        """Execute this stage's actions `line` until its sends complete, while other stages do theirs.

        The plan must have passed `simulate`.
        """
        self.sent.clear()
        for bound in line:
            self._execute[bound.action.kind](bound, work)
        self._computed.clear()
        began = time.perf_counter()
        for request, _, bound in self._sending:
            wait_for(request.Test, "pipeline", self._comm, bound.peer, bound.label)
        self._sending.clear()
        self._recorder.note("communication", "last sends", began, time.perf_counter())

    def progress(self) -> None:
        """Drive MPI progress of messages and gradient sums. Called during long computations."""
        if active_requests:
            progress()
        elif self._receiving or self._sending:
            self._comm.Iprobe()

    def _forward_or_backward(self, bound: BoundAction, work: StageWork) -> None:
        if bound.partner is None:
            self._keep(bound, self._compute(bound, self._taken(bound), work))
            return
        pair = bound, bound.partner
        passes = [partial(self._compute, one, self._taken(one), work) for one in pair]
        for one, result in zip(pair, interleave(*passes)):
            self._keep(one, result)

    def _compute(self, bound: BoundAction, received: Array, work: StageWork) -> Array:
        action = bound.action
        with self._recorder("compute", bound.label):
            if action.kind == "F":
                return work.forward(action.chunk, action.microbatch, received)
            return work.backward(action.chunk, action.microbatch, received, action.kind == "BW")

    def _keep(self, bound: BoundAction, result: Array) -> None:
        if bound.target is not None:
            self._ready[bound.target] = result
        elif result is not None:
            self._computed[bound.key] = result

    def _weights_or_update(self, bound: BoundAction, work: StageWork) -> None:
        with self._recorder("compute", bound.label):
            apply = work.weights if bound.action.kind == "W" else work.update
            apply(bound.action.chunk, bound.action.microbatch)

    def _receive(self, bound: BoundAction, work: StageWork) -> None:
        specs = work.output_spec(bound.part, bound.action.microbatch)
        message = ActivationMessage(specs, is_gradient=bound.key[0] == "B")
        request = self._comm.Irecv([message.buffer, MPI.BYTE], bound.peer, bound.tag)
        self._receiving[bound.key] = request, message

    def _taken(self, bound: BoundAction) -> Array:
        """Wait for a computation's input and return it. None if missing, or at the model's input and loss."""
        if bound.key not in self._receiving:
            return self._ready.pop(bound.key, None)
        request, message = self._receiving.pop(bound.key)
        if not request.Test(self._status):
            began = time.perf_counter()
            wait_for(lambda: request.Test(self._status), "pipeline", self._comm, bound.peer, bound.label)
            self._recorder.note("communication", "wait", began, time.perf_counter(), action=bound.label)
        count = self._status.Get_count(MPI.BYTE)
        expected = message.buffer.nbytes
        assert count in (0, expected), f"{bound.label}: expected {expected} bytes or none, found {count}"
        return message.arrays(self._xp) if count else None

    def _send(self, bound: BoundAction, work: StageWork) -> None:
        result = self._computed.pop(bound.key, None)
        payload = NOTHING if result is None else _payload(result)
        self._sending.append((self._comm.Isend([payload, MPI.BYTE], bound.peer, bound.tag), payload, bound))
        self.sent[bound.peer] += 1
        if len(self._sending) >= MANY_SENDS:
            self._sending = [sent for sent in self._sending if not sent[0].Test()]


ALIGNMENT = 64
"""Bytes at whose multiples the arrays of a message begin."""


class ActivationMessage:
    """Memory of a message with an array, or the arrays of a tuple one after another.

    A message of gradients, as is that of any array that is None, has no bytes for integers.
    """

    def __init__(self, specs: Any, is_gradient: bool):
        self._specs, places, length = specs, list[int | None](), 0
        for spec in parts_of(specs):
            is_there = is_float(spec) or not is_gradient or type(specs) is not tuple  # integers have no gradient
            places.append(length if is_there else None)
            length += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT if is_there and type(specs) is tuple else 0
        self._places = places
        self.buffer = np.empty(length if type(specs) is tuple else specs.nbytes, np.uint8)

    @property
    def views(self) -> list[Any]:
        """Arrays on the memory. None without bytes."""
        return [
            None if at is None else self.buffer[at : at + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            for spec, at in zip(parts_of(self._specs), self._places)
        ]

    def arrays(self, xp: ModuleType) -> Array:
        """Arrays of the message, as arrays of `xp`."""
        made = tuple(None if one is None else xp.asarray(one) for one in self.views)
        return made if type(self._specs) is tuple else made[0]


def _payload(result: Array) -> np.ndarray:
    """Bytes of a message with an array, or a tuple in which gradients of integers are None."""
    if type(result) is not tuple:
        return np.ascontiguousarray(to_host(result)).reshape(-1).view(np.uint8)
    there = tuple(one for one in result if one is not None)
    message = ActivationMessage(spec_of(there), is_gradient=False)
    for view, one in zip(message.views, there):
        view[...] = to_host(one)
    return message.buffer

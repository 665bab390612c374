"""Queue of the non-blocking calls on one mailbox channel, of which one at a time runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from collectives.engine.instructions import HELD
from collectives.runtime.execution.operation import Operation
from collectives.runtime.requests.request import Request


class ChannelQueue:
    """Requests of one channel: one that runs, and `waiting` ones, which start one after the other.

    `words` are those of the channels (`instructions.STARTED`), in which the requests of each channel are counted.
    ``check()`` raises once no call of the communicator can be trusted. The caller of all methods holds `progress_lock`.
    """

    def __init__(self, channel: int, words: Any, check: Callable[[], object]) -> None:
        self._channel, self._words, self._check = channel, words, check
        self.waiting: deque[tuple[Request, Callable[[], object]]] = deque()  # with the function that starts each
        self._running: Request | None = None
        self._starts = False

    def hold(self, request: Request) -> None:
        """Let a request that has started run on the channel."""
        request.channel, self._running = self._channel, request
        self._words[HELD + self._channel] += 1

    def catch_up(self) -> bool:
        """Advance the requests of the channel, without waiting. True if none is left.

        Otherwise a rank that has fallen behind once would queue all later calls, until it waits.
        """
        while (running := self._running) is not None and not self._starts:
            running._complete_if_ended()  # a frame that this one has interrupted may have been about to
            running._advance()
            if self._running is running:
                break
        return self._running is None and not (self.waiting or self._starts)

    def add(self, request: Request, start: Callable[[], object]) -> None:
        """Start a request, or let it wait for those before."""
        request.channel, request.is_queued = self._channel, True
        self._words[HELD + self._channel] += 1
        self.waiting.append((request, start))
        self._start_next()

    def release(self, request: Request) -> None:
        """Note that a request no longer uses the channel."""
        self._words[HELD + self._channel] -= 1
        if request is self._running:
            self._running = None
            self._start_next()

    def _start_next(self) -> None:
        """Start waiting requests while those before have ended. Not from within, as one that ends at once would."""
        if self._starts:
            return
        self._starts, outer = True, Operation.stepped
        try:
            while self.waiting and self._running is None:
                Operation.stepped = self.waiting[0][0]  # a signal handler that interrupts this cannot wait for it
                self._running, start = self.waiting.popleft()
                self._start(self._running, start)
        finally:
            self._starts, Operation.stepped = False, outer

    def _start(self, request: Request, start: Callable[[], object]) -> None:
        try:
            self._check()
            start()
        except BaseException as error:
            request._break_off(error)
            if not isinstance(error, Exception):
                raise
        finally:
            request.is_queued = False  # last: it is not complete before

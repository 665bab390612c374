"""Servers and workers in one process, over a network in which any of them dies at any message it sends or looks for."""

import random
import threading
from collections import deque
from functools import partial

import numpy as np

from parallel.asynchronous.server.consistency import rule_of
from parallel.asynchronous.server.event_order import EventOrder
from parallel.asynchronous.server.key_assignment import ServerKey
from parallel.asynchronous.server.messages import Envelope, MessageHandle, MessageKind, ServerMessage
from parallel.asynchronous.server.replication_chain import ReplicationChainLost
from parallel.asynchronous.server.retry import RetryQueue
from parallel.asynchronous.server.server_loop import ServerLoop
from parallel.asynchronous.server.server_replicas import ServerReplicas
from parallel.asynchronous.server.shard_store import AsyncStore, ShardState, SyncStore
from parallel.asynchronous.server.work_assignment import PartResult
from parallel.asynchronous.server.worker_client import Requeued, WorkerClient
from parallel.nn.flat_params import BLOCK, ParamSpan, Span
from parallel.nn.operator import Parameter, constant
from parallel.optim.optimizer_span import OptimizerSpan
from parallel.optim.optimizers import SGD
from parallel.runtime.consistency_check import TrainingFailed

RATE, KEYS = 0.5, 2
IN_VAIN = 3000
"""Looks of all ranks in a row that find nothing, after which they wait for ever."""


class Killed(BaseException):
    """Ends a rank's thread as kill -9 ends a process."""


class Mailbox:
    """A rank's post."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.accept = lambda source, message: ()
        self.vectors, self.landed = [], {}  # a worker's, and what came into them last

    def send(self, peer, message, *vectors):
        self.world.turn(self.rank)
        if peer not in self.world.dead:
            self.world.lines.setdefault((self.rank, peer), deque()).append((message, [v.copy() for v in vectors]))
            self.world.in_vain = 0
        return MessageHandle()

    def poll(self):
        self.world.turn(self.rank)
        return self.world.deliver(self)

    def idle(self, awaits):
        assert awaits() is not None


class World:
    """Ranks that take turns as a seed decides; `deaths` are {rank: after how many turns of all}."""

    def __init__(self, size, seed, deaths):
        self.rng, self.deaths = random.Random(seed), dict(deaths)
        self.lines, self.known, self.dead = {}, set(), set()
        self.turns = self.in_vain = 0
        self.go = [threading.Semaphore(0) for _ in range(size)]
        self.back = threading.Semaphore(0)
        self.ended, self.problems = set(), {}
        self.hung = False

    def run(self, programs):
        """Let all programs run to their end."""
        threads = [
            threading.Thread(target=self._thread, args=(rank, program), daemon=True)
            for rank, program in enumerate(programs)
        ]
        for thread in threads:
            thread.start()
        while len(self.ended) < len(threads):
            rank = self.rng.choice([rank for rank in range(len(threads)) if rank not in self.ended])
            self.go[rank].release()
            self.back.acquire()
        for thread in threads:
            thread.join()
        unexpected = [
            problem
            for problem in self.problems.values()
            if not isinstance(problem, (ReplicationChainLost, TrainingFailed))
        ]
        if unexpected:
            raise unexpected[0]

    def _thread(self, rank, program):
        self.go[rank].acquire()
        try:
            program()
        except Killed:
            pass
        except Exception as problem:
            self.problems[rank] = problem
        if rank not in self.dead:
            self._die(rank)  # whoever has ended hears no more
        self.ended.add(rank)
        self.back.release()

    def turn(self, rank):
        """Another rank's turn, or this one's end."""
        self.back.release()
        self.go[rank].acquire()
        self.turns += 1
        self.in_vain += 1
        if self.in_vain > IN_VAIN:
            self.hung = True
        if self.hung or self.turns >= self.deaths.get(rank, self.turns + 1):
            self._die(rank)
            raise Killed

    def _die(self, rank):
        self.dead.add(rank)
        self.lines = {pair: line for pair, line in self.lines.items() if pair[1] != rank}

    def deliver(self, box):
        """A letter, or that a rank is dead, from which nothing comes any more; or nothing, whatever is under way."""
        mine = [pair for pair in sorted(self.lines) if pair[1] == box.rank]
        news = [rank for rank in sorted(self.dead) if (box.rank, rank) not in self.known]
        choices = [("line", pair) for pair in mine] + [("lost", rank) for rank in news]
        if not choices or self.rng.random() < 0.3:
            return None
        self.in_vain = 0
        kind, which = self.rng.choice(choices)
        if kind == "lost":
            self.known.add((box.rank, which))
            self.lines.pop((which, box.rank), None)
            return Envelope(which, ServerMessage(MessageKind.LOST))
        message, vectors = self.lines[which].popleft()
        if not self.lines[which]:
            del self.lines[which]
        room = box.accept(which[0], message) if vectors else ()
        for here, vector in zip(room, vectors, strict=True):
            here[...] = vector
            if message.kind is MessageKind.WEIGHTS and any(np.shares_memory(here, mine) for mine in box.vectors):
                box.landed[message.key] = vector
        return Envelope(which[0], message, tuple(room))


class Training:
    """A toy: every part's gradient is one, so weights tell how often each was applied."""

    def __init__(self, servers, workers, replicas, consistency, steps, parts, seed, deaths):
        self.servers, self.workers = range(servers), range(servers, servers + workers)
        self.replicas, self.rule, self.steps, self.parts = replicas, rule_of(consistency), steps, parts
        self.world = World(servers + workers, seed, deaths)
        spans = [Span(at * BLOCK, (at + 1) * BLOCK) for at in range(servers * KEYS)]
        self.keys = [ServerKey(at, 0, at // KEYS, span, None) for at, span in enumerate(spans)]
        self.length = len(spans) * BLOCK
        self.hosted, self.done = {}, {}
        self.world.run(
            [partial(self.serve, rank) for rank in self.servers] + [partial(self.work, rank) for rank in self.workers]
        )

    def make(self, mail, shard):
        """The server of a shard."""
        place, cells = ParamSpan(Parameter((self.length,), constant(0.0)), Span(0, self.length)), []
        for key in (key for key in self.keys if key.server == shard):
            vectors = np.zeros(key.span.size), np.zeros(key.span.size)
            cells.append(ShardState(key, OptimizerSpan(key.span, *vectors, {}, [place])))
        kind = SyncStore if self.rule.synchronous else AsyncStore
        store = kind(cells, SGD(rate=RATE), None, True)
        return ServerLoop(mail, store, self.rule, self.workers, self.servers, shard, EventOrder())

    def serve(self, rank):
        """What `ParameterServer` does on a server."""
        box = Mailbox(self.world, rank)
        replicas = ServerReplicas(box, rank, self.servers, self.workers, self.replicas, self.make)
        own = replicas.servers[rank]
        for step in range(self.steps):
            own.until_made(step + 1)
        for _ in range(2):
            own.until_quiescent()
        replicas.until(lambda: all(server.rests >= own.rests for server in replicas.servers.values()))
        replicas.until_left()
        self.hosted[rank] = replicas.servers

    def work(self, rank):
        """What `ParameterServer` does on a worker."""
        box, dtype = Mailbox(self.world, rank), np.dtype(np.float64)
        mail = RetryQueue(box, self.servers, self.replicas, dtype, dtype)
        box.vectors = vectors = [np.zeros(self.length) for _ in range(1 if self.rule.synchronous else 2)]
        worker = WorkerClient(mail, self.rule, self.keys, self.servers, vectors)
        worker.landed = box.landed
        try:
            self.train(mail, worker, rank)
        except ReplicationChainLost:
            worker.give_up()
            raise

    def train(self, mail, worker, rank):
        """All steps, and what comes after them."""
        for step in range(self.steps):
            self.do(worker, step)
            worker.tick(step + 1, self.parts, False)
        self.rest(worker)
        self.done[rank] = worker.copy().copy()
        self.rest(worker)
        mail.leave()

    def rest(self, worker):
        """Wait until all parts are done."""
        while True:
            try:
                return worker.quiesce()
            except Requeued:
                self.do(worker, self.steps - 1)

    def do(self, worker, step):
        """All parts of a step that this worker comes to."""
        done = None
        while (part := worker.draw(step, self.parts, done, False)) is not None:
            done = None
            try:
                worker.read(part.clock, range(len(self.keys)), None)
                worker.need(range(len(self.keys)))
            except Requeued:
                continue
            for key in self.keys:
                used = worker.vector[key.span.start : key.span.stop]
                assert np.array_equal(used, worker.landed[key.number]), "not what was sent"
            gradient = np.ones(self.length)
            for key in self.keys:
                worker.push(key.number, part, self.parts, 1, 1.0, gradient[key.span.start : key.span.stop], None)
            worker.acknowledged()
            done = part, PartResult(0.0, 1, 1.0, 0)

    def check(self):
        """All updates were made once, unless there was nobody left to make them."""
        world, dead = self.world, set(self.world.deaths) & self.world.dead
        assert not world.hung, f"hung after {world.turns} turns"
        if set(self.workers) <= dead or world.problems:
            assert set(self.workers) <= dead or len(dead & set(self.servers)) >= self.replicas, world.problems
            return
        for rank in set(self.workers) - dead:
            assert np.array_equal(self.done[rank], np.full(self.length, -RATE * self.steps)), self.done[rank][::BLOCK]
        for rank in set(self.servers) - dead:
            for shard, server in self.hosted[rank].items():
                assert set(server.applied.values()) == {self.steps * self.parts}, (rank, shard, server.applied)

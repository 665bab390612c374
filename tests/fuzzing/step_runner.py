"""Runner of random steps on one rank, on mpi4py's communicators or on ours, that records their results."""

import copy
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator, algorithms, test_all, wait_all
from collectives.algorithms import catalog
from fuzzing.drawn_call import DrawnCall
from fuzzing.messages import pass_on
from fuzzing.refusals import refusal
from fuzzing.sequences import CREATING, Step

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

Results = dict[tuple[int, int], list[bytes]]


def compose(left: Any, inout: Any, _: MPI.Datatype) -> None:
    """Reduction function that composes affine maps ``x -> a x + b`` modulo 2**32, packed in uint64; not commutative."""
    first, second = np.frombuffer(left, "u8"), np.frombuffer(inout, "u8")
    factor = ((first >> HALF) * (second >> HALF)) & LOW
    second[:] = factor << HALF | (((first >> HALF) * (second & LOW) + (first & LOW)) & LOW)


def add(left: Any, inout: Any, _: MPI.Datatype) -> None:
    total = np.frombuffer(inout, "u8")
    total += np.frombuffer(left, "u8")


FUNCTIONS = {"affine": (compose, False), "add": (add, True)}


class StepRunner:
    """Runner of one thread's steps, with its communicators, operations, pending calls and recorded results.

    Steps may be left out: a step that needs a missing object does without it, in the same way on all ranks. `base` is a
    communicator of this thread's own; ours, or the MPI's, whose calls are all blocking. `begins` is called with each
    step as it begins.
    """

    def __init__(self, base: Any, seed: int, begins: Callable[[Step], object]) -> None:
        self.begins = begins
        self.native = not isinstance(base, Communicator)
        self.seed = seed
        self.rank = base.Get_rank()
        self.comms: list[Any] = [base]
        self.ops: dict[int, tuple[str, MPI.Op]] = {}
        self.pending: list[DrawnCall] = []
        self.kept: list[DrawnCall] = []
        self.results: Results = {}
        self.calls = 0
        self.now: Step | None = None

    def run(self, steps: Iterable[Step]) -> None:
        """Run the steps, complete all pending calls, and free all communicators and operations but the base."""
        for step in steps:
            self.now = step
            self.begins(step)
            comm = self.comms[step.comm % len(self.comms)]
            self._prepare_ops(step)
            if comm == MPI.COMM_NULL and step.kind in (
                "call",
                "object",
                "message",
                "refusal",
                "copied op",
                "copy",
                "neighbors",
            ):
                continue
            if step.kind not in CREATING:
                getattr(self, f"_{step.kind.replace(' ', '_')}")(step, comm)
            elif len(self.comms) < 5:
                self.comms.append(MPI.COMM_NULL if comm == MPI.COMM_NULL else self._made(step, comm))
        last = self.now or Step(0, -1, "end")
        self._complete(last, None)
        self._release()
        self._free_ops()
        for comm in self.comms[:0:-1]:
            if comm != MPI.COMM_NULL:
                comm.Free()
        del self.comms[1:]

    def _prepare_ops(self, step: Step) -> None:
        """Create the user-defined operation of a step, after freeing those that it replaces.

        Also on ranks outside of the step's communicator: freeing operations drops kept calls, of which all ranks of
        other communicators must keep the same ones.
        """
        if step.kind == "copied op":
            self._free_ops()
        if step.op not in FUNCTIONS:
            return
        place = step.pick // 3 % 2
        if place in self.ops and self.ops[place][0] != step.op:
            self._free_ops()
        if place not in self.ops:
            function, commutes = FUNCTIONS[step.op]
            self.ops[place] = step.op, MPI.Op.Create(function, commute=commutes)

    def _op(self, step: Step) -> MPI.Op | None:
        if step.op in FUNCTIONS:
            return self.ops[step.pick // 3 % 2][1]
        op = getattr(MPI, step.op) if step.op else None
        return MPI.Op(op) if "copied op" in step.flags and op is not None else op

    def _chosen(self, step: Step, comm: Any) -> dict[str, Any]:
        """Keyword arguments `algorithm` and `segments`, where the step's flags include them; none for mpi4py."""
        if self.native or "algorithm" not in step.flags or step.method == "Barrier":
            return {}
        name = step.method.lower()
        name = {"bcast": "broadcast", "reduce_scatter_block": "reduce_scatter"}.get(name, name)
        base = name.rstrip("vw")
        able = [one for one in algorithms(name.replace("allw", "allv")) if one != "native"]
        if step.op == "affine":
            able = [one for one in able if catalog.find(base, one).keeps_order(getattr(comm, "nodes", None))]
        chosen: dict[str, Any] = {"algorithm": able[step.pick % len(able)]}
        return chosen | ({"segments": 1 + step.pick % 3} if "segments" in step.flags else {})

    def _call(self, step: Step, comm: Any) -> None:
        if step.form in ("repeated", "begun again"):
            self._repeat(step, comm)
            return
        self.calls += 1
        call = DrawnCall(step, comm, self.seed, self._op(step), self.native)
        keywords = call.keywords | self._chosen(step, comm)
        method = getattr(comm, step.method)
        turns = 1 + step.pick % 3 if step.form == "bound" else 1
        if self.native or step.form == "blocking":
            for turn in range(turns):
                if turn:
                    call.refill()
                method(*call.positional, **keywords)
                self._record(call)
            if step.form == "kept":
                call.request = lambda: method(*call.positional, **keywords)
                self.kept.append(call)
            else:
                call.free_type()
            return
        persistent = step.form in ("bound", "kept")
        name = f"{step.method}_init" if persistent else f"I{step.method.lower()}"
        call.request = getattr(comm, name)(*call.positional, **keywords)
        if "type freed" in step.flags:
            call.free_type()
        if step.form == "pending":
            self.pending.append(call)
        elif not persistent:
            self._wait([call], step.pick)
        else:
            for turn in range(turns):
                if turn:
                    call.refill()
                call.request.Start()
                self._wait([call], step.pick // (turn + 1), ends=False)
            self.kept.append(call)
            if step.form == "bound":
                self._release(lambda other: other is call)

    def _repeat(self, step: Step, comm: Any) -> None:
        """Repeat a call on other arrays each time, more often than it takes to be compiled."""
        begun = step.form == "begun again" and not self.native
        method, keywords = getattr(comm, f"I{step.method.lower()}" if begun else step.method), self._chosen(step, comm)
        for turn in range(2 + step.pick % 19):
            self.calls += 1
            call = DrawnCall(step, comm, self.seed, self._op(step), self.native, turn)
            call.request = method(*call.positional, **call.keywords, **keywords)
            if begun:
                self._wait([call], step.pick)
            else:
                self._record(call)
                call.free_type()

    def _record(self, call: DrawnCall) -> None:
        self.results.setdefault((call.step.thread, call.step.number), []).extend(call.result())

    def _wait(self, calls: list[DrawnCall], pick: int, ends: bool = True) -> None:
        """Complete the calls by a variant of Wait or Test that `pick` chooses; record results; `ends` frees types."""
        requests = [call.request for call in calls]
        way = pick % 6 if all(isinstance(request, MPI.Request) for request in requests) else pick % 3
        if way == 0:
            for request in requests:
                request.Wait()
        elif way == 4:
            for _ in requests:
                MPI.Request.Waitany(requests)
        elif way in (1, 3):
            (wait_all if way == 1 else MPI.Request.Waitall)(requests)
        else:
            while not (test_all if way == 2 else MPI.Request.Testall)(requests):
                pass
        for call in calls:
            self._record(call)
            if ends:
                call.free_type()

    def _complete(self, step: Step, _: Any) -> None:
        """Complete all pending calls, or some of them, in an order of this rank's own."""
        if not self.pending:
            return
        chance = Random(f"{step.number} {self.rank}")
        calls = self.pending if step.kind != "complete" or step.pick % 2 else self.pending[::2]
        self.pending = [call for call in self.pending if call not in calls]
        chance.shuffle(calls)
        while calls:
            several = 1 + step.pick // 2 % len(calls)
            self._wait(calls[:several], step.pick // 4)
            calls = calls[several:]

    def _restart(self, step: Step, _: Any) -> None:
        """Restart all kept persistent requests, then wait for all; mpi4py's communicators repeat blocking calls."""
        for call in self.kept:
            self.calls += 1
            call.refill()
            if self.native:
                call.request()
                self._record(call)
            else:
                call.request.Start()
        if self.kept and not self.native:
            self._wait(list(self.kept), step.pick, ends=False)

    def _release(self, gone: Callable[[DrawnCall], bool] = lambda call: True) -> None:
        for call in self.kept:
            if gone(call):
                if not self.native:
                    call.request.Free()
                call.free_type()
        self.kept = [call for call in self.kept if not gone(call)]

    def _object(self, step: Step, comm: Any) -> None:
        """Run a collective on Python objects, such as `bcast`, and record its result."""
        rank, size = comm.Get_rank(), comm.Get_size()
        root, mine = step.pick % size, (step.number, rank, "x" * (step.pick % 7))
        self.calls += 1
        pairs = [(mine, other) for other in range(size)]
        arguments: dict[str, tuple[Any, ...]] = {
            "barrier": (),
            "bcast": (mine if rank == root else None, root),
            "gather": (mine, root),
            "scatter": (pairs if rank == root else None, root),
            "allgather": (mine,),
            "alltoall": (pairs,),
            "reduce": (rank + step.number, MPI.SUM, root),
        }
        sum_or_largest = rank * 7 % 5, (MPI.SUM, MPI.MAX)[step.pick % 2]
        found = getattr(comm, step.method)(*arguments.get(step.method, sum_or_largest))
        self.results[step.thread, step.number] = [repr(found).encode()]

    def _message(self, step: Step, comm: Any) -> None:
        self.calls += 1
        self.results[step.thread, step.number] = pass_on(comm, step.method, step.pick, step.number)

    def _neighbors(self, step: Step, comm: Any) -> None:
        """Exchange with the neighbours in a new topology in which no two are the same, where the MPIs agree."""
        rank, size = comm.Get_rank(), comm.Get_size()
        if step.pick % 2:
            made = comm.Create_cart([size], [size > 2])
        else:
            ahead = range(1, min(size, 4))
            made = comm.Create_dist_graph_adjacent(
                [(rank - by) % size for by in ahead], [(rank + by) % size for by in ahead], reorder=False
            )
        sources, destinations = (len(side) for side in made.inoutedges)
        sent = np.random.default_rng([self.seed, step.number, rank]).integers(
            0, 99, (destinations, step.pick % 700 + 1)
        )
        n, found = sent.shape[1], np.full((sources, sent.shape[1]), -1)
        block = MPI.INT64_T.Create_contiguous(n).Commit()
        out, into = ([[1] * k, [8 * n * place for place in range(k)], [block] * k] for k in (destinations, sources))
        calls: dict[str, tuple[Any, Any]] = {
            "allgather": (np.full(n, rank), found),
            "alltoall": (sent, found),
            "alltoallv": ([sent, [n] * destinations], [found, [n] * sources]),
            "alltoallw": ([sent, *out], [found, *into]),
        }
        name = list(calls)[step.pick // 2 % len(calls)]
        self.calls += 1
        if self.native or step.pick % 3:
            getattr(made, f"Neighbor_{name}")(*calls[name])
        else:
            getattr(made, f"Ineighbor_{name}")(*calls[name]).Wait()
        objects = made.neighbor_allgather((rank, "x" * (step.pick % 900)))
        self.results[step.thread, step.number] = [found.tobytes(), repr(objects).encode()]
        block.Free()
        made.Free()

    def _refusal(self, step: Step, comm: Any) -> None:
        """Make a call with a wrong argument, which all ranks refuse; record whether it was."""
        self.calls += 1
        wrong, found = refusal(step.pick, comm.Get_size()), b"accepted"
        form = ("", "I", "_init")[0 if self.native else step.pick % 3]
        name = f"I{wrong.method.lower()}" if form == "I" else f"{wrong.method}{form}"
        try:
            getattr(comm, name)(*wrong.arguments, **wrong.keywords)
        except wrong.error:
            found = b"refused"
        self.results[step.thread, step.number] = [found]

    def _made(self, step: Step, comm: Any) -> Any:
        """Create a communicator from `comm` in the way of the step's kind, one of `CREATING`."""
        rank, size = comm.Get_rank(), comm.Get_size()
        if step.kind == "split":
            color = Random(f"{self.seed} {step.number} {rank}").choice((0, 0, 1, MPI.UNDEFINED))
            return comm.Split(color, -rank if step.pick % 2 else rank)
        if step.kind == "create":
            group = comm.Get_group()
            part = group.Incl(range(size - step.pick % 2 or 1))
            created = comm.Create(part)
            part.Free()
            group.Free()
            return created
        if step.kind == "wrap":  # ours over a new one of the MPI's
            plain = MPI.Intracomm(comm).Dup()
            nodes = [rank % 2 for rank in range(size)] if step.pick % 3 == 1 else None
            options = {"shared": step.pick % 5 > 0, "debug": step.pick % 7 == 0, "async_progress": step.pick % 8 == 0}
            return plain if self.native else Communicator(plain, nodes=nodes, **options)
        return comm.Dup() if step.kind == "dup" else comm.Clone()

    def _copy(self, step: Step, comm: Any) -> None:
        """Check that a copy of the communicator object, if it can be copied, gives the right results."""
        try:
            twin = copy.copy(comm)
        except (TypeError, ValueError):
            return
        total = np.empty(3)
        twin.Allreduce(np.full(3, float(twin.Get_rank())), total)
        if total[0] != sum(range(twin.Get_size())):
            raise AssertionError(f"{step}: {total}")

    def _free(self, step: Step, _: Any) -> None:
        """Free the last one or three communicators but the base, in random order per rank, even with calls pending."""
        gone = self.comms[1:][-1 if step.kind == "free" else -3 :]
        self._release(lambda call: any(call.comm is comm for comm in gone))
        if step.pick % 2:
            self._complete(step, None)
        Random(f"{step.number} {self.rank}").shuffle(gone)
        for comm in gone:
            if comm != MPI.COMM_NULL:
                comm.Free()
        del self.comms[len(self.comms) - len(gone) :]

    _free_out_of_order = _free

    def _free_ops(self, *unused: Any) -> None:
        """Free all user-defined operations, after completing pending calls, and freeing kept ones, that use them."""
        if any(call.step.op in FUNCTIONS for call in self.pending):
            self._complete(Step(0, 0, "free op"), None)
        self._release(lambda call: call.step.op in FUNCTIONS)
        for _, op in self.ops.values():
            op.Free()
        self.ops.clear()

    _free_op = _free_ops

    def _copied_op(self, step: Step, comm: Any) -> None:
        """Reduce with a short-lived copy of MPI.SUM, then with a user-defined operation that may reuse its handle."""
        mine, total, found = np.full(3, 3 + comm.Get_rank(), np.uint64), np.empty(3, np.uint64), []
        for turn in range(2):
            op = MPI.Op(MPI.SUM)
            comm.Allreduce(mine, total, op)
            comm.Allreduce(mine, total, op)
            found.append(total.tobytes())
            del op
            op = MPI.Op.Create((compose, add)[turn], commute=bool(turn))
            comm.Allreduce(mine, total, op)
            found.append(total.tobytes())
            op.Free()
            del op
        self.calls += 6
        self.results[step.thread, step.number] = found

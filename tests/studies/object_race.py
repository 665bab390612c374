"""Time collectives of Python objects against mpi4py's own, in turns, with checked results. Run under mpiexec.

    mpiexec -n 2 python tests/studies/object_race.py
    mpiexec -n 4 python tests/studies/object_race.py --nodes 0,0,1,1 --calls bcast allgather

A row has the median latency of the slowest rank in microseconds, Chorus's and mpi4py's, their ratio, and the ratio of
the fastest calls. The last columns are the time of pickling alone, one `dumps` and the `loads` of one rank without
copies of arrays, and its share of mpi4py's.
"""

import argparse
import pickle
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.timing import Contestant, race

OBJECTS: dict[str, Callable[[int], Any]] = {
    "None": lambda turn: None,
    "int": lambda turn: turn,
    "10 floats": lambda turn: tuple(turn + i / 8 for i in range(10)),
    "100 strings": lambda turn: {f"key {i}": f"value {turn} of the key with the number {i}" for i in range(100)},
    "1000 dicts": lambda turn: [{"number": i, "name": f"n{i}", "turn": turn} for i in range(1000)],
    "3 arrays": lambda turn: {name: np.full(1 << 16, turn + 0.5) for name in ("weight", "bias", "mean")},
    "8 MiB": lambda turn: np.full(1 << 20, turn + 0.5),
}
"""Objects of one rank in a turn."""

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "bcast": lambda comm, value: comm.bcast(value),
    "gather": lambda comm, value: comm.gather(value),
    "allgather": lambda comm, value: comm.allgather(value),
    "allreduce": lambda comm, value: comm.allreduce(value, add),
    "scatter": lambda comm, value: comm.scatter([value] * comm.Get_size()),
    "alltoall": lambda comm, value: comm.alltoall([value] * comm.Get_size()),
    "reduce": lambda comm, value: comm.reduce(value, add),
    "scan": lambda comm, value: comm.scan(value, add),
}


def add(left: Any, right: Any) -> Any:
    """Sum of arrays, of numbers, and of the arrays in a dictionary; otherwise the right operand."""
    if isinstance(left, dict) and isinstance(right["weight" if "weight" in right else "key 0"], np.ndarray):
        return {name: left[name] + right[name] for name in left}
    return left + right if isinstance(left, (np.ndarray, int)) else right


def is_equal(found: Any, expected: Any) -> bool:
    """Equality of objects that may contain arrays."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_equal, found, expected))
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return bool(found == expected)


class ObjectCall:
    """One call of a communicator, with a new object in every turn."""

    def __init__(self, comm: MPI.Intracomm, call: str, make: Callable[[int], Any]):
        self._comm, self._call, self._plain, self._turn = comm, CALLS[call], MPI.Intracomm(comm), 0
        self._values = [make(turn) for turn in range(3)]
        self._expected = [self._call(self._plain, value) for value in self._values]
        self._result: Any = None

    def advance(self) -> None:
        """Take the next object; drop the last result, whose memory is free then."""
        self._turn, self._result = (self._turn + 1) % 3, None

    poison = advance

    def call(self) -> None:
        self._result = self._call(self._comm, self._values[self._turn])

    def wrong(self) -> int:
        return int(not is_equal(self._result, self._expected[self._turn]))


def pickling(value: Any, loads: int) -> float:
    """Seconds of a `dumps` and `loads` of an object, without copies of arrays."""
    times = []
    for _ in range(25):
        buffers: list[pickle.PickleBuffer] = []
        start = time.perf_counter()
        data = pickle.dumps(value, 5, buffer_callback=buffers.append)
        for _ in range(loads):
            pickle.loads(data, buffers=buffers)
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Time all calls with all objects, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="CALL")
    parser.add_argument("--objects", nargs="+", choices=OBJECTS, default=list(OBJECTS), metavar="OBJECT")
    parser.add_argument("--nodes", help="node number of each rank, as 0,0,1,1: emulates a cluster")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of a row (default 1)")
    args = parser.parse_args()
    plain = MPI.COMM_WORLD
    comm = Communicator(plain, nodes=None if args.nodes is None else [int(one) for one in args.nodes.split(",")])
    if comm.rank == 0:
        print(f"{'call':9}  {'object':11}  {'Chorus':>9}  {'mpi4py':>9}  ratio  fastest  {'pickling':>9}  of mpi4py")
    for name in args.calls:
        for label in args.objects:
            calls: list[Any] = [ObjectCall(one, name, OBJECTS[label]) for one in (comm, plain)]
            timings = race(plain, [Contestant("", one, one.call) for one in calls], seconds=args.seconds, warmup=40)
            ours, native = timings
            if ours.wrong or native.wrong:
                raise RuntimeError(
                    f"{name} of {label}: wrong results: {ours.wrong} of Chorus, {native.wrong} of mpi4py"
                )
            if comm.rank == 0:
                receives = 1 if name in ("bcast", "scatter", "reduce") else plain.size
                least = 1e6 * pickling(OBJECTS[label](0), receives)
                row = f"{name:9}  {label:11}  {ours.median:9.1f}  {native.median:9.1f}"
                row += f"  {ours.median / native.median:5.2f}  {ours.low / native.low:7.2f}"
                print(f"{row}  {least:9.1f}  {least / native.median:9.2f}", flush=True)


if __name__ == "__main__":
    main()

"""Run PyTorch's own tests of torch.distributed on one rank, over the backend "chorus" or "gloo".

    python -m torch_distributed_rank FOLDER BACKEND NAME SECONDS

Runs the tests that FOLDER/known does not name, and FOLDER/only names, if it names any. Writes lines of JSON and stacks
as mpi4py_rank does. The tests see NAME as the name of the backend, as many run only for certain names: "gloo", or
"mpi" for those of an exchange of all with all.
"""

import faulthandler
import os
import sys
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from mpi4py_rank import Case, Results
from torch.distributed import distributed_c10d

LIMIT = 20
"""Seconds that a call may take, unless PyTorch's table of the tests has another number."""


def substitute(name: str) -> None:
    """Make groups of backend `name` by "chorus", under that name."""
    import collectives.torch  # noqa: F401

    plain_init, named = dist.init_process_group, distributed_c10d.get_backend

    def renaming(function: Any) -> Any:
        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if keywords.get("backend", name if function is plain_init else None) == name:
                keywords["backend"] = "chorus"
            return function(*arguments, **keywords)

        return call

    for module in (dist, distributed_c10d):
        module.init_process_group = renaming(plain_init)
        module.new_group = renaming(distributed_c10d.new_group)
        module.get_backend = lambda group=None: {"chorus": name}.get(named(group), named(group))


def untraced() -> None:
    """Expect no events of asynchronous calls from the profiler: calls of this backend run inline."""
    from torch.testing._internal.distributed import distributed_test as tests

    tests.PROFILING_SUPPORTED_BACKENDS = tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []


EXCLUDED = {"test_ddp_logging_data_cpu": "the name of the backend in DDP's log is not the one that tests are shown"}
"""Tests left out, with reasons."""


class TorchResults(Results):
    """Results in which the exit of a test with one of PyTorch's codes for skipped ones is a skip."""

    def addError(self, test: Case, err: Any) -> None:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        codes = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if err[0] is SystemExit and err[1].code in codes:
            self.addSkip(test, codes[err[1].code])
        else:
            super().addError(test, err)

    def addFailure(self, test: Case, err: Any) -> None:
        super().addError(test, err)


def case_class() -> type[Any]:
    """Class of PyTorch's test cases, each with a process group of its own."""
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test as tests

    class OnRanks(TestCase, tests.DistributedTest._DistTestBase):
        """The tests, in processes that mpiexec has started."""

        world_size = str(MPI.COMM_WORLD.Get_size())
        init_method = "env://"

        def setUp(self) -> None:
            super().setUp()
            world = MPI.COMM_WORLD
            self.rank, size = world.Get_rank(), world.Get_size()
            if self.rank == 0:
                tests.Barrier.init()
            self.file_name = world.bcast(os.path.join(os.environ["TEMP_DIR"], self._testMethodName))
            tests.Barrier.barrier_id = 0
            limit = timedelta(seconds=tests.CUSTOM_PG_TIMEOUT.get(self._testMethodName, LIMIT))
            store = dist.FileStore(self.file_name, size)
            backend = os.environ["BACKEND"]
            dist.init_process_group(backend=backend, store=store, rank=self.rank, world_size=size, timeout=limit)

        def tearDown(self) -> None:
            if dist.is_initialized():
                dist.destroy_process_group()
            super().tearDown()

    return OnRanks


def main() -> None:
    """Run the tests on this rank; write outcomes and stacks to the rank's files."""
    folder, backend, name, seconds = sys.argv[1:]
    world, files = MPI.COMM_WORLD, Path(folder)
    rank = world.Get_rank()
    os.environ |= {"BACKEND": name, "WORLD_SIZE": str(world.Get_size()), "TEMP_DIR": folder, "RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29531", "LOCAL_RANK": str(rank)}
    for each in ("barrier", "test_dir", "init_dir"):
        Path(folder, each).mkdir(exist_ok=True)
    if backend == "chorus":
        substitute(name)
        untraced()
    made = case_class()
    known, only = ({*(files / each).read_text().splitlines()} for each in ("known", "only"))
    with open(files / f"rank-{rank}", "w") as lines, open(files / f"stack-{rank}", "w") as stack:
        results = TorchResults(lines, stack, float(seconds))
        for test in sorted(test for test in dir(made) if test.startswith("test")):
            if test in known or (only and test not in only):
                continue
            if backend == "chorus" and test in EXCLUDED:
                results.write(test=test, outcome="excluded", text=EXCLUDED[test])
                continue
            case = made(test)
            case.id = partial(str, test)
            world.Barrier()
            case.run(results)
        results.write(test="", outcome="end")
        world.Barrier()
    faulthandler.dump_traceback_later(float(seconds), exit=True)


if __name__ == "__main__":
    main()

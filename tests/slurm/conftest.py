"""Tests on a running Slurm: scripts/slurm starts one and runs them; elsewhere they are not collected."""

import os

import pytest
from support.slurm_jobs import call, wait_until

if "SLURM_CONF" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def mpi():
    """Word for the MPI that mpi4py loads."""
    from mpi4py import MPI

    version = MPI.Get_library_version()
    return next((name for name in ("Open MPI", "Intel") if name in version), "MPICH")


@pytest.fixture(scope="session", autouse=True)
def pmi(mpi):
    """Process-management interface of the MPI, in effect for every srun."""
    kind = {"MPICH": "pmi2", "Intel": "pmix", "Open MPI": "pmix"}[mpi]
    os.environ["SLURM_MPI_TYPE"] = kind
    return kind


@pytest.fixture(scope="module", autouse=True)
def no_jobs_left():
    yield
    call("scancel", "--user=root")
    wait_until(lambda: not call("squeue", "--noheader"), lambda: "the end of all jobs")

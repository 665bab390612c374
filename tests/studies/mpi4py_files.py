"""mpi4py's test files that concern communicators, and the few cases among them that are left out, with the reason."""

import os
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

FILES = (
    # collectives on buffers: blocking, non-blocking, persistent; of unequal blocks; between groups; among neighbours
    *("test_cco_buf", "test_cco_nb_buf", "test_cco_pr_buf"),
    *("test_cco_vec", "test_cco_nb_vec", "test_cco_pr_vec"),
    *("test_cco_buf_inter", "test_cco_vec_inter"),
    *("test_cco_ngh_buf", "test_cco_pr_ngh_buf", "test_cco_ngh_obj"),
    # collectives on objects
    *("test_cco_obj", "test_cco_obj_inter"),
    # communicators, what hangs on them, and classes derived from them
    *("test_comm", "test_comm_inter", "test_comm_topo", "test_subclass", "test_attributes", "test_group"),
    *("test_errhandler", "test_objmodel", "test_pickle", "test_handle", "test_op"),
    # requests and point-to-point
    *("test_request", "test_grequest", "test_threads"),
    *("test_p2p_buf", "test_p2p_obj", "test_p2p_buf_matched", "test_p2p_obj_matched", "test_p2p_buf_part"),
    *("test_msgspec", "test_msgzero", "test_util_pkl5", "test_util_sync"),
)
"""Modules of mpi4py's folder ``test``."""

EXCLUDED = (
    ("test_comm.TestComm[SW]*[fd].testPickle", "mpi4py's own COMM_WORLD is pickled by its name, which ours has here"),
    ("test_objmodel.TestObjModel.testCAPI", "the C interface gives mpi4py's class for objects of any derived class"),
    ("test_p2p_obj.TestP2PObj*.testCommLock", "it looks for the lock of mpi4py's own bcast of objects"),
)
"""Cases that are not run, as patterns of ``module.class.method``, each with the reason."""


def reason(name: str) -> str | None:
    """Reason for which a test case (``module.class.method``) is not run; None if it is run.

    >>> reason("test_comm.TestCommWorld.testSize") is None
    True
    """
    return next((text for pattern, text in EXCLUDED if fnmatchcase(name, pattern)), None)


def cache_folder() -> Path:
    """Folder of what is downloaded, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chorus"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def download(package: str, release: str, folder: Path) -> Path:
    """Archive of a package's source distribution, downloaded by pip into a folder; RuntimeError if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", package, "--dest", str(folder), f"{package}=={release}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        last = "\n".join(done.stdout.splitlines()[-5:])
        raise RuntimeError(f"pip cannot download the source distribution of {package} {release}:\n{last}")
    return archives[0]


def fetched() -> Path:
    """Folder of mpi4py's tests, downloaded by pip the first time into the user's cache; RuntimeError if that fails."""
    release = version("mpi4py")
    cache = cache_folder()
    tests = cache / f"mpi4py-{release}" / "test"
    if tests.is_dir():
        return tests
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        with tarfile.open(download("mpi4py", release, Path(folder))) as archive:
            archive.extractall(folder, filter="data")
        try:
            (Path(folder) / f"mpi4py-{release}").rename(tests.parent)
        except OSError:
            if not tests.is_dir():  # another process was not faster
                raise
    return tests

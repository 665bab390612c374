"""mpi4py's own tests, from the source distribution of the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path


def fetched() -> Path:
    """Folder with mpi4py's tests; downloaded with pip the first time and stored in the user's cache."""
    release = version("mpi4py")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chorus"
    tests = cache / f"mpi4py-{release}" / "test"
    if tests.is_dir():
        return tests
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", "mpi4py", "--dest", folder, f"mpi4py=={release}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
        archives = list(Path(folder).glob("mpi4py-*.tar.gz"))
        if done.returncode or not archives:
            last = "\n".join(done.stdout.splitlines()[-5:])
            raise RuntimeError(f"pip cannot download the source distribution of mpi4py {release}:\n{last}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, filter="data")
        tests.parent.parent.mkdir(parents=True, exist_ok=True)
        try:
            (Path(folder) / f"mpi4py-{release}").rename(tests.parent)
        except OSError:
            if not tests.is_dir():  # another process was not faster
                raise
    return tests

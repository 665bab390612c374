"""Compiled code on disk: a second process compiles nothing and writes nothing, for all kernels of the project."""

import importlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("numba")

from quant.kernels import jit
from quant.kernels.jit import CompilationLock, compiler

ROOT = Path(__file__).resolve().parents[3]
JITTED = re.compile(r"\b(njit|jit)\(([^)]*)\)")


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_second_process_compiles_and_writes_nothing(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run():
        done = subprocess.run(
            [sys.executable, ROOT / "tests/support/kernel_calls.py"],
            env=environment, capture_output=True, text=True, check=True, timeout=800,
        )  # fmt: skip
        return json.loads(done.stdout)

    first, kept = run(), files(tmp_path)
    assert first["compiled"] and first["never"] == [], "a kernel that nobody calls is not tested here"
    assert len(kept) >= len(first["called"]) and all(name.endswith(".nbc") for name in kept)
    second = run()
    assert second["compiled"] == [] and files(tmp_path) == kept
    assert second["kilobytes"] < first["kilobytes"] * 0.8


def test_all_kernels_keep_their_code_alike():
    """What numba compiles goes through `compiler`, but for what is inlined in it."""
    for package in ("collectives", "parallel", "quant"):
        for path in (ROOT / package).rglob("*.py"):
            for call in JITTED.finditer(path.read_text(encoding="utf-8")):
                assert "forceinline" in call[2] or path.name == "jit.py", f"{path}: {call[0]}"


FACTORY = """
from quant.kernels import jit
from quant.kernels.jit import CompilationLock, compiler


def made(number):
    def function(x):
        return x + number

    return compiler()(function)
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Maker of a function that adds a number; each time it is compiled or loaded anew."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "kernel_factory.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("kernel_factory").made
    del sys.modules["kernel_factory"]


def hits(function):
    return sum(function.stats.cache_hits.values())


def test_versions_do_not_meet_in_a_file(made, tmp_path):
    assert [made(n)(1) for n in (1, 2)] == [2, 3] and made(1)(1.5) == 2.5
    assert len(files(tmp_path / "kept")) == 3
    again = made(2)
    assert again(1) == 3 and hits(again) == 1 and len(files(tmp_path / "kept")) == 3


@pytest.mark.parametrize("damage", [b"", b"x" * 1000, "half", "flipped"])
def test_damaged_files_are_made_anew(made, tmp_path, damage):
    made(1)(1)
    (path,) = (tmp_path / "kept").rglob("*.nbc")
    sound = path.read_bytes()
    if damage == "half":
        damage = sound[: len(sound) // 2]
    elif damage == "flipped":
        damage = sound[:500] + bytes([sound[500] ^ 1]) + sound[501:]
    path.write_bytes(damage)
    again = made(1)
    assert again(1) == 2 and hits(again) == 0
    third = made(1)
    assert third(1) == 2 and hits(third) == 1


def test_one_of_several_processes_compiles(made, tmp_path):
    """The others wait for its file; a compilation that wrote none is done anew."""
    made(1)(1)
    (path,) = (tmp_path / "kept").rglob("*.nbc")
    for code in (path.read_bytes(), None):
        path.unlink()
        lock, waiting = CompilationLock(str(path)), made(1)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(waiting, 1)
            with pytest.raises(TimeoutError):
                call.result(0.3)
            if code is not None:
                path.write_bytes(code)
            lock.release()
            assert call.result(60) == 2 and hits(waiting) == (code is not None)
        assert files(tmp_path / "kept").keys() == {path.name}


def test_code_of_other_sources_is_made_anew(made, tmp_path):
    made(1)(1)
    (tmp_path / "kernel_factory.py").write_text(FACTORY + "# changed")
    again = made(1)
    assert again(1) == 2 and hits(again) == 0 and len(files(tmp_path / "kept")) == 1


def test_a_disk_that_takes_nothing(made, tmp_path, monkeypatch):
    """Neither a folder that vanishes nor a full disk is an error of the call."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert made(1)(1) == 2
    assert files(tmp_path / "kept") == {}


def test_constants_of_other_modules_count(tmp_path, monkeypatch):
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    other = tmp_path / "other.py"
    other.write_text("ONE = 1")

    module, between = ModuleType("module"), ModuleType(__name__)
    module.__file__, between.__file__ = str(other), __file__

    def function(x):
        return x + 1

    def version(*modules):
        made = compiler(*modules)(function)
        assert made(np.int64(1)) == 2
        return hits(made)

    for modules in ((module,), (between,)):  # the second depends on it through the function
        assert [version(*modules), version(*modules)] == [0, 1]
        other.write_text(f"ONE = 2  # {modules[0].__name__}")
        assert version(*modules) == 0


@pytest.mark.parametrize(("mode", "trusted"), [(0o644, True), (0o600, True), (0o664, False), (0o646, False)])
def test_files_that_others_may_write_are_not_read(tmp_path, mode, trusted):
    path = tmp_path / "kernel.nbc"
    path.touch()
    path.chmod(mode)
    assert jit.is_trusted(path.stat()) == trusted


def test_files_of_other_users_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "kernel.nbc"
    path.touch()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    status = os.stat_result((0o644, 1, 1, 1, 12, 12, 0, 0, 0, 0))
    assert not jit.is_trusted(status)
    assert jit.is_trusted(os.stat_result((0o644, 1, 1, 1, 4711, 12, 0, 0, 0, 0)))

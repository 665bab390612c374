"""Faults planted in the sources of the compiled engine: its unit tests fail for each of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from collectives.engine.extension import available

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not available() or shutil.which("gcc") is None, reason="needs GCC"),
]

ENGINES = "test_engines.py", "-m", "not full"
THREADS = "test_engine_threads.py", "-k", "pairwise or mst or (allreduce and ring)"


class Fault(NamedTuple):
    """A text in a source file, and the faulty one in its place; the tests that must fail, with a sanitizer or none."""

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = ENGINES
    sanitizer: str = "none"


FAULTS = {
    "missing release": Fault(
        "memory.h", "value, memory_order_release", "value, memory_order_relaxed", THREADS, sanitizer="thread"
    ),
    "missing acquire": Fault(
        "memory.h", "address, memory_order_acquire", "address, memory_order_relaxed", THREADS, sanitizer="thread"
    ),
    "acknowledged before it is read": Fault(
        "mailbox.c",
        "char *data = (char *)words;",
        "store_flag(link->my_ack, number); char *data = (char *)words;",
        THREADS,
        sanitizer="thread",
    ),
    "chunk taken twice": Fault(
        "mailbox.c",
        "return found - number * COUNTS;",
        "return found - number * COUNTS > 1 ? found - number * COUNTS - 1 : 1;",
        THREADS,
    ),
    "wrong label": Fault(
        "mailbox.c", "number * KIND + label_of(row, nbytes)", "number * KIND + label_of(row, nbytes) + 1"
    ),
    "wrong number of addresses": Fault("mailbox.c", "row->address_label + row->operands", "row->address_label + 1"),
    "wrong slot": Fault(
        "mailbox.c", "int64_t slot = number & (SLOTS - 1);", "int64_t slot = (number + 1) & (SLOTS - 1);"
    ),
    "slot used too early": Fault(
        "mailbox.c",
        "link->acknowledged = load_flag(link->their_ack);\n    return link->sent + 1 - link->acknowledged <= SLOTS",
        "link->acknowledged = load_flag(link->their_ack);\n    return link->sent - link->acknowledged <= SLOTS",
        THREADS,
    ),
    "length not compared": Fault("mailbox.c", "if (total != row->nbytes) return MISMATCH;", ""),
    "part at the wrong place": Fault(
        "mailbox.c", "left_of(program, operand) + start, out,", "left_of(program, operand), out,"
    ),
    "parts not begun anew": Fault(
        "mailbox.c", "} while (row->done < row->nbytes);\n    row->done = 0;", "} while (row->done < row->nbytes);"
    ),
    "read not waited for": Fault(
        "mailbox.c",
        "if (link->acknowledged >= sent->number) return DONE;",
        "if (link->acknowledged + 1 >= sent->number) return DONE;",
    ),
    "stream not waited for": Fault(
        "run.c", "stream->position - stream->first >= row->count", "stream->position - stream->first + 1 >= row->count"
    ),
    "operands beyond the buffer": Fault(
        "mailbox.c",
        "return (Run){operand, start, left < nbytes ? left : nbytes};",
        "return (Run){operand, start, nbytes};",
        sanitizer="address",
    ),
    "zeros of the wrong sign": Fault(
        "reduce.c", "ON_FLOATS(f64, double, >, <,", "ON_FLOATS(f64, double, >=, <=,", ("test_reductions.py",)
    ),
}


def run(folder, fault):
    """Exit status of the fault's tests, with the engine of the sources in a folder."""
    first, *rest = fault.tests
    command = ROOT / "scripts" / "sanitize", fault.sanitizer, "--", f"tests/unit/collectives/{first}", *rest, "-x"
    environment = os.environ | {"CHORUS_ENGINE_SOURCE": str(folder), "PYTHON": sys.executable}
    return subprocess.run(
        [*command, "--timeout", "60"], env=environment, cwd=ROOT, timeout=500, capture_output=True, text=True
    )


@pytest.fixture
def sources(tmp_path):
    """Copy of the engine's sources."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    for folder, names in (("collectives/engine", "*.[ch]"), ("quant/kernels", "*.h")):
        (tmp_path / folder).mkdir(parents=True)
        for path in (ROOT / folder).glob(names):
            shutil.copy(path, tmp_path / folder)
    return tmp_path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_the_tests_fail(sources, name):
    fault = FAULTS[name]
    path = sources / "collectives" / "engine" / fault.file
    text = path.read_text()
    assert text.count(fault.right) == 1, f"{fault.file} has changed"
    path.write_text(text.replace(fault.right, fault.wrong))
    done = run(sources, fault)
    assert "could not be built" not in done.stderr, done.stderr
    failed = done.returncode not in (0, 4, 5) and (" failed" in done.stdout or done.returncode > 5)
    assert failed, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["none", "address", "thread"])
def test_the_tests_pass_without_a_fault(sources, sanitizer):
    for tests in (ENGINES, THREADS) if sanitizer != "thread" else (THREADS,):
        done = run(sources, Fault("", "", "", tests, sanitizer))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

"""Errors at import where a file of the user hides a package of the distribution."""

import os
import subprocess
import sys

import pytest
from support.sources import SOURCES


@pytest.mark.parametrize(
    "package, hidden", [("collectives", "quant"), ("parallel", "collectives"), ("parallel", "quant")]
)
def test_a_hidden_package_is_named(tmp_path, package, hidden):
    (tmp_path / f"{hidden}.py").write_text("")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCES)])}
    program = f"import {package}.engine.settings" if package == "parallel" else f"import {package}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"needs the package {hidden} of chorus-mpi in {SOURCES}, found {tmp_path / hidden}.py" in done.stderr

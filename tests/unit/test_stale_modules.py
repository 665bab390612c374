"""Compiled modules beside other sources than those they were built from: one error that names the command."""

import shutil
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

MODULES = (
    "collectives.engine._engine", "quant.kernels._codecs", "parallel.nn.kernels._operators",
    "parallel.optim.kernels._updates",
)  # fmt: skip


def load(name, binary):
    spec = spec_from_file_location(name, binary)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_other_sources_is_refused(tmp_path, name, monkeypatch):
    found = find_spec(name)
    if found is None:
        pytest.skip("nothing is compiled")
    folder = Path(found.origin).parent
    root = folder.parents[name.count(".") - 1]
    if not list(folder.glob("*.c")):
        pytest.skip("the sources are not beside it")
    for each in {folder, root / "quant/kernels"}:
        shutil.copytree(each, tmp_path / each.relative_to(root), ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    binary = tmp_path / Path(found.origin).relative_to(root)
    monkeypatch.setitem(sys.modules, name, None)  # each load sets it
    assert load(name, binary)
    source = sorted(binary.parent.glob("*.c"))[0]
    source.write_text(source.read_text().replace(";", "; ", 1))
    again = shutil.copy(binary, binary.with_stem(f"{binary.stem}_"))  # another file: the first one remains loaded
    with pytest.raises(ImportError, match=rf"{name.rpartition('.')[2]} .* other sources.*setup.py build_ext"):
        load(name, again)

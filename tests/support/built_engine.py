"""Pytest plugin: modules in C of the build in the folder CHORUS_ENGINE_BUILD take the place of the installed ones."""

import importlib.util
import os
import sys
from pathlib import Path

NAMES = (
    "collectives.engine._engine",
    "quant.kernels._codecs",
    "parallel.nn.kernels._operators",
    "parallel.optim.kernels._updates",
)


def load(folder):
    """Import the modules of a build before anything else imports the installed ones. The engine must be there."""
    assert not set(NAMES) & set(sys.modules), "the plugin is loaded before the packages: -p support.built_engine"
    built = {name: [*Path(folder).rglob(f"{name.rpartition('.')[2]}.*.so")] for name in NAMES}
    assert built[NAMES[0]], f"{folder} has no engine"
    for name in (name for name in NAMES if built[name]):
        spec = importlib.util.spec_from_file_location(name, *built[name])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


load(os.environ["CHORUS_ENGINE_BUILD"])

"""Pytest plugin: the engine of the build in the folder CHORUS_ENGINE_BUILD takes the place of the installed one."""

import importlib.util
import os
import sys
from pathlib import Path

NAME = "collectives.engine._engine"


def load(folder):
    """Import the engine of a build before anything else imports the installed one."""
    assert NAME not in sys.modules, "the plugin is loaded before the package: -p support.built_engine"
    (path,) = Path(folder).rglob("_engine*.so")
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)


load(os.environ["CHORUS_ENGINE_BUILD"])

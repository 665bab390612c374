"""Early check that the files a program writes at its end can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg", ".jpg")
"""Suffixes of pictures."""


def check_folder(folder: Path) -> None:
    """Create a folder and write into it; OSError if either fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"1")


def check_writable(path: Path) -> None:
    """OSError if no file of this name can be written."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no plain file")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} may not be written")
    check_folder(path.parent)

"""Whether files that a program will write in the end can be written: found out before it begins."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg", ".jpg")
"""How the name of a picture may end."""


def room_for_files(folder: Path) -> None:
    """Make a folder, if need be, and see whether something can be written into it; raise OSError if not."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"1")


def room_for_file(path: Path) -> None:
    """See whether a file of this name can be written; raise OSError if not."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no plain file")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} may not be written")
    room_for_files(path.parent)

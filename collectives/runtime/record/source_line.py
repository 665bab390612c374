"""Source line of a program that uses this package."""

import linecache
import os
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep


def is_own(frame: FrameType) -> bool:
    """True for a frame of this package's code."""
    return os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE)


def caller(frame: FrameType | None = None) -> str:
    """Source line ``file:line in function`` of the innermost frame outside the package, by default of this thread."""
    frame = sys._getframe(1) if frame is None else frame
    while frame.f_back is not None and is_own(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def caller_with_text(frame: FrameType | None = None) -> str:
    """As `caller`, with the text of the line: in a call of another library it has the name of that."""
    found = caller(sys._getframe(1) if frame is None else frame)
    path, _, rest = found.rpartition(":")
    text = linecache.getline(path, int(rest.partition(" ")[0])).strip()
    return f"{found}: {text}" if text else found

"""Source line of a program that uses this package."""

import linecache
import os
import sys
from pathlib import Path
from types import FrameType

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep


def is_own(frame: FrameType) -> bool:
    """True for a frame of this package's code."""
    return os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE)


def is_inside(frame: FrameType) -> bool:
    """True if a frame is of this package's code, or of Python's library called by that."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        if "site-packages" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    return is_own(frame)


def _outside(frame: FrameType) -> FrameType:
    """Innermost frame outside the package."""
    while frame.f_back is not None and is_own(frame):
        frame = frame.f_back
    return frame


def caller(frame: FrameType | None = None) -> str:
    """Source line ``file:line in function`` of the innermost frame outside the package, by default of this thread."""
    found = _outside(sys._getframe(1) if frame is None else frame)
    return f"{found.f_code.co_filename}:{_line(found)} in {found.f_code.co_name}"


def _line(frame: FrameType) -> int:
    """Line of a frame. 0 if none of its lines runs: Python then has None."""
    return frame.f_lineno or 0


def caller_with_text(frame: FrameType | None = None) -> str:
    """`caller`, with the text of the line. In a call of another library the text names that."""
    found = _outside(sys._getframe(1) if frame is None else frame)
    text = linecache.getline(found.f_code.co_filename, _line(found)).strip()
    return f"{caller(found)}: {text}" if text else caller(found)

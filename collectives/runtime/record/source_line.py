"""Source line of a program that uses Chorus."""

import linecache
import os
import sys
from pathlib import Path
from types import FrameType

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep
_PACKAGES = tuple(str(Path(_PACKAGE).with_name(name)) + os.sep for name in ("collectives", "parallel", "quant"))
_PROGRAMS = str(Path(_PACKAGE).with_name("parallel") / "cli") + os.sep


def is_own(frame: FrameType) -> bool:
    """True for a frame of this package's code."""
    return os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE)


def is_inside(frame: FrameType) -> bool:
    """True if a frame is of this package's code, or of Python's library called by that."""
    while frame.f_code.co_filename.startswith(_LIBRARY) and "site-packages" not in frame.f_code.co_filename:
        if (outer := frame.f_back) is None:
            break
        frame = outer
    return is_own(frame)


def _outside(frame: FrameType) -> FrameType:
    """Innermost frame outside Chorus. In a program of Chorus itself, the innermost one outside this package."""
    while is_own(frame) and (outer := frame.f_back) is not None:  # read once: another thread's function may return
        frame = outer
    found, inner = frame, ""
    while (path := os.path.abspath(found.f_code.co_filename)).startswith(_PACKAGES):
        if (outer := found.f_back) is None:
            break
        found, inner = outer, path
    return frame if inner.startswith(_PROGRAMS) else found


def caller(frame: FrameType | None = None) -> str:
    """Source line ``file:line in function`` of the innermost frame outside Chorus, by default of this thread."""
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

"""Source line of a program that uses this package."""

import os
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep


def caller(frame: FrameType | None = None) -> str:
    """Source line ``file:line in function`` of the innermost frame outside the package, by default of this thread."""
    frame = sys._getframe(1) if frame is None else frame
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

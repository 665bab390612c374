"""Messages for people: an error in one line, with the name that was meant."""

import errno
import os
import re
from difflib import get_close_matches

from collectives.errors import InvalidArgument

ALIKE = 0.7
"""Least similarity of an option that is named in the place of an unknown one (`difflib`)."""

LONGEST_WORD = 400
"""Characters of a word in an error message. Of a longer one, such as a user's mistake, both ends are shown."""


LISTED = re.compile(r"(?:one of|some of|a size of|axes of|known:|choose from) ((?:(?!,? found | for )[^;)])+)")
"""Names in an error message, one of which is expected."""

WRONG = re.compile(r"'([^' ]+)'|found ([^' ,;:]+)")
"""Name in an error message that was found in their place."""


def one_line(message: str) -> str:
    """A message in one line that can be read. Of the names that it lists, the one most like the wrong name is added.

    >>> one_line("expected one of dp, zero1; found 'zero'")
    "expected one of dp, zero1; found 'zero' (perhaps zero1)"
    >>> one_line("loss: expected one of mse for teacher, found mze")
    'loss: expected mse for teacher, found mze'
    """
    words = (f"{w[:60]}...{w[-20:]}" if len(w) > LONGEST_WORD else w for w in message.split())
    line = " ".join(words)
    if (listed := LISTED.search(line)) and (wrong := WRONG.search(line)) and "(perhaps " not in line:
        names = re.findall(r"[\w.+-]+", listed[1].replace(wrong[0], ""))
        if len(names) == 1:
            return line.replace(f"one of {names[0]}", names[0])
        word = (wrong[1] or wrong[2]).rpartition(":")[2]
        begun = [name for name in names if name[:1] == word[:1]]  # cpu is not meant by gpu, but mlp by mpl
        if close := get_close_matches(word, names, 1, ALIKE) or get_close_matches(word, begun, 1):
            line += f" (perhaps {close[0]})"
    return line


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_message(error: BaseException) -> str | None:
    """One line for an error that the user causes. None for an error of the program.

    Such errors are files that cannot be opened, full disks, sizes beyond the memory, environment variables, and a
    ValueError in the form of this project: "expected ..., found ...".
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return one_line(f"{os.fsdecode(error.filename)}: {error.strerror}")
    if isinstance(error, MemoryError):
        return one_line(f"expected sizes that fit into memory: {str(error) or 'it is full'}")
    shared = getattr(error, "on_all_ranks", False)  # `parallel.runtime.collective_errors`, of a file on one rank
    is_usual = type(error) is ValueError and (shared or "expected " in str(error))
    is_usual |= isinstance(error, InvalidArgument) and str(error).startswith("CHORUS_")  # an environment variable
    is_usual |= isinstance(error, OSError) and error.errno in FULL
    return one_line(str(error)) if is_usual or isinstance(error, FileNotFoundError) else None

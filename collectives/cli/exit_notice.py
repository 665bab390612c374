"""What is still said when a program is killed: a process of its own waits, and speaks if it hears no good-bye.

Most launchers kill all ranks when one dies, some without a signal that could be caught. So the words are with somebody
whom they do not know: a shell in a session of its own, which reads what would be the last word now from a pipe, and
prints it if the pipe ends without an empty line.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Self

LISTENER = """
trap '' INT TERM HUP
while IFS= read -r line; do last=$line; done
[ -z "$last" ] || printf '%s\\n' "$last" >&2
"""


class LastWord:
    """A last word on standard error, should this process be killed. Within a `with`, whose end is the good-bye.

    Parameters
    ----------
    wanted : bool
        False says nothing, ever.
    """

    def __init__(self, wanted: bool = True):
        self._listener: subprocess.Popen[str] | None = None
        if wanted:
            with suppress(OSError):  # without a shell there are no last words
                start = ["sh", "-c", LISTENER]
                self._listener = subprocess.Popen(start, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def would_be(self, text: str) -> None:
        """What to say, instead of what was to be said before; one line."""
        if self._listener is not None and self._listener.stdin is not None:
            self._listener.stdin.write(text + "\n")
            self._listener.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            with suppress(BrokenPipeError):
                self.would_be("")
                self._listener.communicate()

"""Message that is printed if a program is killed, by a separate process that outlives it.

Most launchers kill all ranks when one dies, some by a signal that cannot be caught. The message therefore belongs to a
shell in its own session, unknown to the launcher: it reads the current message from a pipe, and prints it if the pipe
ends without an empty line.
"""

import subprocess
from contextlib import suppress
from typing import Self, TextIO

LISTENER = """
trap '' INT TERM HUP
while IFS= read -r line; do last=$line; done
[ -z "$last" ] || printf '%s\\n' "$last" >&2
"""


class ExitNotice:
    """Context manager: if this process is killed within it, the text last set by `set_text` is printed.

    The output is `stream`, otherwise standard error. A killed launcher may no longer forward that. No-op if not
    `enabled`, or without a shell.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None):
        self._listener: subprocess.Popen[str] | None = None
        if enabled:
            with suppress(OSError):  # no shell: no message
                self._listener = subprocess.Popen(
                    ["sh", "-c", LISTENER], stdin=subprocess.PIPE, stderr=stream, text=True, start_new_session=True
                )

    def set_text(self, text: str) -> None:
        """Replace the message, one line. None is printed if it is empty."""
        if self._listener is not None and self._listener.stdin is not None:
            self._listener.stdin.write(text + "\n")
            self._listener.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            with suppress(BrokenPipeError):
                self.set_text("")
                self._listener.communicate()

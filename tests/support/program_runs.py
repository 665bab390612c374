"""Command-line programs in the process of the tests."""

import contextlib
import io
import subprocess
import sys
from unittest import mock

from collectives.cli.messages import user_message


def call(main, *arguments):
    """Run `main` with these arguments: exit status and output, as from a process of its own."""
    out, err, words = io.StringIO(), io.StringIO(), [main.__module__, *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main() or 0
        except SystemExit as end:
            status = end.code
        except Exception as error:
            message = user_message(error)
            if message is None:
                raise
            print(message, file=err)
            status = 2
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

"""Griffe extension of the documentation site: doctests in docstrings become blocks of code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^ *>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class DoctestBlocks(Extension):
    """Griffe extension that puts doctests into code blocks, so that Markdown sees no links in lists of numbers."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = text.replace("][", "]\u200b[")  # a[i][j] is no link

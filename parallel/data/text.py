"""Text as numbers: bytes, or the tokens of a file of the library `tokenizers`; and text of files and folders."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np


def text_files(path: Path) -> list[Path]:
    """A file, or the files ``*.txt`` of a folder, by name. ValueError if there are none."""
    files = sorted(one for one in path.glob("*.txt") if one.is_file()) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: expected index.json, of shards, or files *.txt; found neither")
    return files


class TextBytes:
    """Text as the bytes of its UTF-8 form.

    >>> "".join(TextBytes().stream(TextBytes().encode("naïve".encode())))
    'naïve'
    """

    kind = "bytes"
    size = 256

    def encode(self, text: bytes) -> np.ndarray:
        """Numbers of a text."""
        return np.frombuffer(text, np.uint8)

    def stream(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yield the text of numbers as they come, whole characters at a time."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for number in numbers:
            yield decoder.decode(bytes([number]))
        yield decoder.decode(b"", final=True)


class TextTokens:
    """Text as tokens of a tokenizer's file (``tokenizer.json``); `size` is the number of different ones."""

    kind = "tokens"

    def __init__(self, file: str):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("tokenizer: it needs the library tokenizers: pip install 'chorus-mpi[text]'") from error
        if not Path(file).is_file():
            raise FileNotFoundError(f"tokenizer {file!r}: there is no such file")
        try:
            self._made: Any = Tokenizer.from_file(file)
        except Exception as error:  # of the library's own class
            raise ValueError(f"tokenizer {file!r}: expected a file of the library tokenizers ({error})") from error
        self.size: int = self._made.get_vocab_size()

    def encode(self, text: bytes) -> np.ndarray:
        """Numbers of a text, without those that mark its beginning or end."""
        return np.array(self._made.encode(text.decode(errors="replace"), add_special_tokens=False).ids, np.uint32)

    def stream(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yield the text of numbers as they come, whole characters at a time."""
        known, shown = list[int](), 0
        text = ""
        for number in numbers:
            known.append(number)
            text = self._made.decode(known, skip_special_tokens=False)
            if not text.endswith("\ufffd"):  # part of a character
                yield text[shown:]
                shown = len(text)
        yield text[shown:]


@lru_cache(maxsize=4)
def text_form(tokenizer: str) -> TextBytes | TextTokens:
    """Bytes for an empty name, else the tokens of a tokenizer's file."""
    return TextTokens(tokenizer) if tokenizer else TextBytes()

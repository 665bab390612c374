"""Objects of Python's own types, as the compiled engine of another rank has written them (``plain.c``)."""

import sys
from struct import Struct
from typing import Any

IS_NUMBERED = 0x80
"""Bit of the tag of an object to which later parts may refer by its number."""

ENCODINGS = {"a": ("ascii", 1), "1": ("latin-1", 1), "2": ("utf-16", 2), "4": ("utf-32", 4)}
"""Tags of strings: encoding, in the order of this machine's bytes, and bytes of a character."""

CONSTANTS = {"N": None, "T": True, "F": False}

_length, _integer, _real = Struct("=I"), Struct("=q"), Struct("=d")


def read_plain(data: Any) -> Any:
    """The object of these bytes."""
    return _Reader(bytes(data)).value()


class _Reader:
    """Reader of a value at a place, the next byte of the data."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._known: list[Any] = []

    def _take(self, kind: Struct) -> Any:
        (found,) = kind.unpack_from(self._data, self._at)
        self._at += kind.size
        return found

    def _text(self, tag: str, length: int) -> str | bytes:
        encoding, width = ENCODINGS.get(tag, ("", 1))
        part = self._data[self._at : self._at + length * width]
        self._at += len(part)
        if width > 1:
            encoding += "-le" if sys.byteorder == "little" else "-be"
        return part.decode(encoding, "surrogatepass") if encoding else part

    def value(self) -> Any:
        number = self._data[self._at]
        tag, is_numbered = chr(number & ~IS_NUMBERED), bool(number & IS_NUMBERED)
        self._at += 1
        if tag in CONSTANTS:
            return CONSTANTS[tag]
        if tag in "id":
            return self._take(_integer if tag == "i" else _real)
        length = self._take(_length)
        if tag == "r":
            return self._known[length]
        place = len(self._known)
        found: Any = {"l": [], "m": {}}.get(tag)
        if is_numbered:  # before its items, which may refer to it, but not to a tuple
            self._known.append(found)
        if tag == "l":
            found.extend(self.value() for _ in range(length))
        elif tag == "m":
            found.update((self.value(), self.value()) for _ in range(length))
        else:
            found = tuple(self.value() for _ in range(length)) if tag == "t" else self._text(tag, length)
        if is_numbered:
            self._known[place] = found
        return found

"""Parsing of message sizes, such as ``8:64M``, ``8:64M:4``, ``8,1K,64K,1M``."""

import argparse
import re

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


MOST = 1 << 50
"""Bytes. More are taken for a slip."""


def parse_size(text: str) -> int:
    """Bytes named by `text`: a whole number and an optional K, M or G (powers of 1024)."""
    match = re.fullmatch(r"([0-9]{1,30})([KMG]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"expected a number and perhaps K, M or G, as in 64K; found {text!r}")
    if (size := int(match[1]) * UNITS[match[2]]) > MOST:
        raise argparse.ArgumentTypeError(f"expected at most 2^50 bytes, found {text!r}")
    return size


def parse_sizes(text: str) -> list[int]:
    """Sizes in ascending order, from a list of sizes and ranges ``low:high[:factor]`` (factor 2 by default).

    >>> parse_sizes("8:64")
    [8, 16, 32, 64]
    >>> parse_sizes("8,1K:16K:4")
    [8, 1024, 4096, 16384]
    """
    found: set[int] = set()
    for item in text.split(","):
        first, *others = item.split(":")
        size, high = parse_size(first), parse_size(others[0] if others else first)
        factor = others[1] if len(others) == 2 else "2"
        if len(others) > 2 or not factor.isdigit() or int(factor) < 2 or (others and not 1 <= size <= high):
            expected = "low:high or low:high:factor with 1 <= low <= high and a factor of at least 2"
            raise argparse.ArgumentTypeError(f"expected {expected}, found {item!r}")
        while size <= high:
            found.add(size)
            # 0 times any factor stays 0, so a range from 0 goes on at 1
            size = size * int(factor) or 1
    return sorted(found)

"""Bytes by kind."""

from __future__ import annotations

from collections import Counter


class Ledger:
    """What was allocated."""

    def __init__(self, allocated: Counter[str]):
        self.allocated = allocated

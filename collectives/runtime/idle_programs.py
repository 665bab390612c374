"""Programs of completed non-blocking calls, for later calls with the same key."""

from __future__ import annotations

from collections.abc import Hashable

from collectives.runtime.program import Program


class IdlePrograms:
    """At most `limit` idle programs; the oldest are freed."""

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0
        self._by_key: dict[Hashable, list[Program]] = {}

    def __len__(self) -> int:
        return self._count

    def take(self, key: Hashable) -> Program | None:
        """Remove a program with this key, if there is one."""
        programs = self._by_key.get(key)
        if not programs:
            return None
        program = programs.pop()
        self._count -= 1
        if not programs:
            del self._by_key[key]
        return program

    def add(self, key: Hashable, program: Program) -> None:
        self._by_key.setdefault(key, []).append(program)
        self._count += 1
        if self._count > self._limit:
            oldest = self.take(next(iter(self._by_key)))
            assert oldest is not None
            oldest.free()

    def free(self) -> None:
        while self._by_key:
            program = self.take(next(iter(self._by_key)))
            assert program is not None
            program.free()

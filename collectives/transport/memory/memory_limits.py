"""Memory that this process may use: of the system, and of the Linux control groups of containers and batch jobs."""

import mmap
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

try:
    resource: Any = import_module("resource")
except ImportError:  # not a Unix
    resource = None

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    """Control group with a memory limit: its folder, and the files in it with the limit and the bytes in use."""

    folder: Path
    limit_file: str
    use_file: str

    @property
    def limit(self) -> int:
        """Bytes. OSError if the file cannot be read, ValueError if there is no limit."""
        return int((self.folder / self.limit_file).read_text())

    def available(self) -> int:
        """Bytes below the limit, including the file cache (the kernel can reclaim it).

        Raises the same errors as `limit`.
        """
        counts = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        cached = sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in ("active_file", "inactive_file"))
        return self.limit - int((self.folder / self.use_file).read_text()) + cached


def control_groups(groups: Path = GROUPS, mount: Path = MOUNT) -> Iterator[ControlGroup]:
    """Yield the possible memory control groups of this process, of versions 1 and 2: its own and their parents.

    In a container a path is as the host sees it, so that only some of the folders exist.
    """
    with suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = PurePosixPath(path.lstrip("/"))
            for group in (own, *own.parents):
                if controllers == "memory":
                    yield ControlGroup(mount / "memory" / group, "memory.limit_in_bytes", "memory.usage_in_bytes")
                elif not controllers:
                    yield ControlGroup(mount / group, "memory.max", "memory.current")


def available_memory() -> int | None:
    """Bytes available on this system, or in a control group of this process if less. None if unknown."""
    found = []
    with suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    for group in control_groups():
        with suppress(OSError, ValueError):
            found.append(group.available())
    return min(found, default=None)


def available_addresses() -> int | None:
    """Bytes of addresses that this process may still map (`ulimit -v`). None if unlimited or unknown."""
    limit = _limit("RLIMIT_AS")
    if limit is None:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return max(0, limit - pages * mmap.PAGESIZE)


def longest_file() -> int | None:
    """Most bytes of a file that this process may create (`ulimit -f`). None if unlimited or unknown."""
    return _limit("RLIMIT_FSIZE")


def _limit(name: str) -> int | None:
    if resource is None:
        return None
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else int(limit)

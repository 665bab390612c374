"""Memory limits of control groups, from files as Linux writes them."""

import pytest

from collectives.transport.memory import memory_limits
from collectives.transport.memory.memory_limits import available_memory, control_groups


@pytest.mark.parametrize(
    ("line", "mount", "limit", "use", "prefix"),
    [
        ("0::/job/step", "", "memory.max", "memory.current", ""),
        ("4:memory:/job/step", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_what_a_group_has_left(monkeypatch, tmp_path, line, mount, limit, use, prefix):
    """The file cache counts as free; a group without a limit, or that cannot be read, is left out."""
    groups, job = tmp_path / "groups", tmp_path / mount / "job"
    monkeypatch.setattr(memory_limits, "control_groups", lambda: control_groups(groups, tmp_path))
    assert available_memory() > 10**8  # of the system
    groups.write_text(f"7:cpu:/job/step\n{line}\n")
    (job / "step").mkdir(parents=True)
    (job / "step" / limit).write_text("max\n")
    for name, text in ((limit, "1000000\n"), (use, "700000\n")):
        (job / name).write_text(text)
    assert available_memory() > 10**8  # without memory.stat
    (job / "memory.stat").write_text(f"anon 5\n{prefix}active_file 1000\n{prefix}inactive_file 20000\n")
    assert available_memory() == 321_000


def test_no_groups(tmp_path):
    assert list(control_groups(tmp_path / "none", tmp_path)) == []

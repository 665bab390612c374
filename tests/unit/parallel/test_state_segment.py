"""Files in memory with one generation of a rank's state: checksum, torn writes, stale files, too little room."""

import errno
import os

import numpy as np
import pytest

from parallel.checkpoint import state_segment
from parallel.checkpoint.state_segment import HEADER, StateSegment, padded

ARRAYS = [np.arange(5, dtype=np.float32), np.full(3, 7, np.uint8), np.linspace(0, 1, 4), np.zeros(0, np.float32)]
FACTS = {"settings": {"lr": 0.1 + 0.2}, "text": "Größe"}


@pytest.fixture
def segment(tmp_path):
    return StateSegment(tmp_path / "rank-00000-0", 4096)


def test_a_state_returns(segment):
    assert segment.step == -1 and not segment.is_whole()
    segment.write(7, ARRAYS, FACTS)
    again = StateSegment(segment.path)
    assert again.is_whole() and again.step == 7 and again.facts() == FACTS
    found = [np.ones_like(one) for one in ARRAYS]
    again.read(found)
    assert all(np.array_equal(a, b) for a, b in zip(found, ARRAYS, strict=True))


def test_a_shorter_state_leaves_nothing_of_a_longer_one(segment):
    segment.write(1, [np.full(300, 255, np.uint8)], {"x": "y" * 100})
    segment.write(2, ARRAYS, {})
    assert segment.is_whole() and segment.facts() == {}


@pytest.mark.parametrize("field", HEADER.names)
def test_a_changed_header_is_found(segment, field):
    segment.write(3, ARRAYS, FACTS)
    at = HEADER.fields[field][1]
    segment.memory[at] ^= 1
    assert not StateSegment(segment.path).is_whole()


def test_every_changed_byte_is_found(segment):
    segment.write(3, ARRAYS, FACTS)
    header = segment.memory[: HEADER.itemsize].view(HEADER)[0]
    for at in range(HEADER.itemsize, HEADER.itemsize + padded(int(header["arrays"] + header["facts"]))):
        segment.memory[at] ^= 0x80
        assert not segment.is_whole(), at
        segment.memory[at] ^= 0x80
    assert segment.is_whole()


@pytest.mark.parametrize("number", range(len(ARRAYS)))
def test_a_write_that_is_broken_off(segment, number):
    """A process killed between two arrays leaves no state in this file."""
    segment.write(3, ARRAYS, FACTS)

    class Killed(BaseException):
        pass

    def arrays():
        yield from ARRAYS[:number]
        raise Killed

    with pytest.raises(Killed):
        segment.write(5, arrays(), FACTS)
    assert StateSegment(segment.path).step == -1 and not segment.is_whole()


def test_a_received_state(segment, tmp_path):
    segment.write(9, ARRAYS, FACTS)
    copy = StateSegment(tmp_path / "copy-00000-0", 4096)
    copy.memory[HEADER.itemsize :] = segment.memory[HEADER.itemsize :]
    assert copy.step == -1
    copy.receive(segment.memory[: HEADER.itemsize].copy())
    assert copy.is_whole() and copy.step == 9 and copy.facts() == FACTS


@pytest.mark.parametrize("content", [b"", b"short", bytes(HEADER.itemsize), os.urandom(200)])
def test_another_file(tmp_path, content):
    path = tmp_path / "rank-00000-0"
    path.write_bytes(content)
    if len(content) < HEADER.itemsize:
        with pytest.raises(OSError, match="shorter than its header"):
            StateSegment(path)
    else:
        assert StateSegment(path).step == -1 and not StateSegment(path).is_whole()


def test_a_file_of_another_size_is_replaced(segment):
    segment.write(3, ARRAYS, FACTS)
    assert StateSegment(segment.path, 4096).step == 3
    assert StateSegment(segment.path, 8192).step == -1


def test_facts_that_do_not_fit(segment):
    with pytest.raises(OSError, match=r"--survive: 4041 bytes of .* are left for .*, expected 5011"):
        segment.write(1, ARRAYS, {"text": "x" * 4999})
    assert not segment.is_whole()


def test_too_little_room(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_segment.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"^expected 1016 KiB more in .*, found .*B$"):
        StateSegment(tmp_path / "rank-00000-0", 1_040_000)
    assert not list(tmp_path.iterdir())

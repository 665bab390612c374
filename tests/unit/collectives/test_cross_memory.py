"""Copies between the memories of processes."""

import os
import threading

import numpy as np
import pytest

from collectives.engine.cross_memory import CrossMemoryAttach, permitted

TURNS = 3000


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("verb", ["read", "write"])
def test_threads_copy_at_the_same_time(verb):
    peer = CrossMemoryAttach(os.getpid())
    copy = getattr(peer, verb)
    if not permitted(copy, *[np.zeros(1).ctypes.data] * 2, 8):
        pytest.skip("this system does not permit it")
    wrong = []

    def work(number):
        there, here = np.zeros(number + 1, np.int64), np.zeros(number + 1, np.int64)
        source, target = (there, here) if verb == "read" else (here, there)
        for turn in range(TURNS):
            source[:] = number * TURNS + turn
            copy(here.ctypes.data, there.ctypes.data, here.nbytes)
            if (target != source).any():
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

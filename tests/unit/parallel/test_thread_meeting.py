"""Threads as ranks: requests of messages."""

import numpy as np
from conformance.thread_meeting import Meeting, Message
from mpi4py import MPI


class ArrivesDuringTest(Message):
    """Message that another thread completes between two looks at it."""

    looks = 0

    @property
    def done(self):
        self.looks += 1
        return self.looks > 1

    @done.setter
    def done(self, value):
        pass


def test_a_message_that_is_done_has_its_status():
    """Else a pipeline takes the data for missing: the length is that of the message before."""
    message, status = ArrivesDuringTest(Meeting(2, []), np.zeros(7, np.uint8)), MPI.Status()
    status.Set_elements(MPI.BYTE, 3)
    while not message.Test(status):
        pass
    assert status.Get_count(MPI.BYTE) == 7

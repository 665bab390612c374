"""Surcharge for messages between nodes that go both ways between two ranks in one round.

Rings receive from one neighbour and send to the other, so that none of their messages do so with three or more ranks.
They are faster than algorithms that exchange as many bytes: over TCP an allgather of 1 MiB by four ranks takes 0.95 of
the time under MPICH, 0.78 under Open MPI. Presumably control messages of the MPI wait behind data of the same
connection.
"""

from collectives.analysis.cost_functions import UniformNetwork
from collectives.selection.shared_cores import total_work

EXCHANGE = 0.1
"""Additional share of beta for these bytes: a value between those measured with the two MPIs."""

MOST_RANKS = 16
"""Most ranks for whose schedules exchanges are counted: counting takes longer than a formula."""

LONG_CALL = 1 << 18
"""Smallest call, in bytes, that the surcharge applies to."""


def exchange_seconds(collective: str, name: str, size: int, nbytes: int, wire: UniformNetwork) -> float:
    """Seconds that a call between nodes of one rank takes longer because of its exchanges, counted without segments.

    >>> exchange_seconds("allgather", "ring", 4, 1 << 20, UniformNetwork(1e-5, 1e-9, 0.0))
    0.0
    """
    if nbytes < LONG_CALL or size > MOST_RANKS:
        return 0.0
    return EXCHANGE * wire.beta * nbytes * total_work(collective, name, size).exchanged / size

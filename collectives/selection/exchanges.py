"""Cost of long messages between nodes that go both ways between two ranks in one round.

Rings, which receive from another rank than they send to, have none, and are faster than algorithms that move as many
bytes in exchanges: over TCP an allgather of 1 MiB by four ranks takes 0.95 of the time under MPICH, 0.78 under Open
MPI. Presumably control messages of the MPI wait behind data that goes the same way.
"""

from collectives.analysis.cost_functions import UniformNetwork
from collectives.selection.shared_cores import total_work

EXCHANGE = 0.1
"""Share by which such bytes take longer, between those measured with these two MPIs."""

MOST_RANKS = 64
"""Most ranks for whose schedules exchanges are counted."""

LONG_CALL = 1 << 18
"""Bytes of a call from which messages are long; short ones need no control messages."""


def exchange_seconds(collective: str, name: str, size: int, nbytes: int, wire: UniformNetwork) -> float:
    """Seconds that a call between nodes of one rank takes longer because of its exchanges.

    >>> exchange_seconds("allgather", "ring", 4, 1 << 20, UniformNetwork(1e-5, 1e-9, 0.0))
    0.0
    """
    if nbytes < LONG_CALL or size > MOST_RANKS:
        return 0.0
    return EXCHANGE * wire.beta * nbytes * total_work(collective, name, size).exchanged / size

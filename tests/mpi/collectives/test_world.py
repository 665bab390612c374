"""The ranks are there, each knows its place, and messages arrive."""


def test_every_rank_counts_once(world):
    assert world.allreduce(1) == world.size
    assert world.allgather(world.rank) == list(range(world.size))


def test_a_message_goes_round(world):
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    assert world.sendrecv(world.rank, dest=right, source=left) == left

"""Neighbourhood collectives: an exchange of blocks with the neighbours in a topology, in one round."""

from typing import NamedTuple

from collectives.schedule.steps import Copy, Recv, Rounds, Send, Step, one


class Neighbors(NamedTuple):
    """Neighbours of one rank in a topology, as ranks by the place of their blocks; -1 where there is none.

    A rank may be a neighbour several times. `order` lists the places in `sources` in the order in which a source sends
    the blocks that are received there.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of_grid(cls, neighbors: tuple[int, ...]) -> "Neighbors":
        """Neighbours in a Cartesian topology: in each dimension the one before this rank, and the one after it.

        What a rank sends to the one after it arrives there as of the one before it, also if both are the same rank.
        """
        return cls(neighbors, neighbors, tuple(place ^ 1 for place in range(len(neighbors))))

    @classmethod
    def of_graph(cls, sources: tuple[int, ...], destinations: tuple[int, ...]) -> "Neighbors":
        """Neighbours in a graph: several edges between two ranks are in the same order at both."""
        return cls(sources, destinations, tuple(range(len(sources))))


def exchange(rank: int, neighbors: Neighbors, sent: int) -> Rounds:
    """One round: each rank sends to its destinations and receives from its sources. Cost: d alpha + n beta.

    d is the larger number of neighbours of a rank, n the bytes of their blocks. Chunk k of the `sent` ones is for
    destination k, the only one for all; the chunks behind them are of the sources.
    """
    departures = [(peer, k if sent > 1 else 0) for k, peer in enumerate(neighbors.destinations) if peer >= 0]
    sources = neighbors.sources
    # MPI matches the messages of one source by their order
    arrivals = [(sources[place], sent + place) for place in neighbors.order if sources[place] >= 0]
    steps: list[Step] = [Send(peer, one(chunk)) for peer, chunk in departures if peer != rank]
    steps += [Recv(peer, one(chunk)) for peer, chunk in arrivals if peer != rank]
    own = [[chunk for peer, chunk in side if peer == rank] for side in (departures, arrivals)]
    steps += [Copy(one(source), one(target)) for source, target in zip(*own, strict=True)]
    if steps:
        yield steps

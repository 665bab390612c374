"""Choices of experts for tokens, balanced and limited to a number of nodes, to measure and draw dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_choices(
    tokens: int, choices: int, node_of_expert: Sequence[int], nodes_per_token: int, seed: int
) -> np.ndarray:
    """Experts of each token, of shape (tokens, choices): as many on each of `nodes_per_token` random nodes.

    Raises
    ------
    ValueError
        If the choices cannot be divided equally over this number of nodes, or a node has too few experts.
    """
    by_node = [np.flatnonzero(np.equal(node_of_expert, node)) for node in range(max(node_of_expert) + 1)]
    each, rest = divmod(choices, nodes_per_token)
    least = min(map(len, by_node))
    if rest or nodes_per_token > len(by_node) or each > least:
        raise ValueError(
            f"choices: expected {nodes_per_token} of {len(by_node)} nodes for a token, and as many of the experts of "
            f"each, at most {least}; found {choices} choices"
        )
    random = np.random.default_rng(seed)
    chosen = [
        [random.permutation(by_node[node])[:each] for node in random.permutation(len(by_node))[:nodes_per_token]]
        for _ in range(tokens)
    ]
    return np.array(chosen, int).reshape(tokens, choices)

"""Generation of sequences: tokens drawn one after the other from a model's scores of the next token."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import whole_number
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.embedding import PositionEmbedding
from parallel.nn.operator import Operator, PassMode, forward_of
from parallel.nn.pass_mode import Past
from parallel.nn.rewrite import operators_in
from quant.types import Array


def generate(
    model: Operator,
    prompt: Sequence[int],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    cached: bool = True,
    whole: Callable[[Array], Array] = lambda scores: scores,
) -> Iterator[int]:
    """Yield `length` tokens that continue a prompt, each as soon as it is drawn.

    The model has values (as `Operator.__call__` needs them). It reads at most as many of the last tokens as it has
    positions; beyond that number, it reads the last half of them again, at positions from 0 on.

    Parameters
    ----------
    model : Operator
        From tokens (1, positions) to scores of the next token at each position, (1, positions, tokens).
    prompt : sequence of int
        At least one token.
    length : int
    temperature : float
        Tokens are drawn with probabilities softmax(scores / temperature); 0 takes the token of the highest score.
    top_k : int, optional
        Draw from the `top_k` tokens with the highest scores.
    seed : int
        Of the random numbers, one for each token.
    cached : bool
        True to keep keys and values of earlier positions (`PassMode.past`), if all operators can use them.
    whole : callable
        Applied to the scores, such as to gather those of a vocabulary that is cut over ranks.

    Raises
    ------
    ValueError
        For options out of range, and scores that are not finite.
    """
    known = [whole_number("prompt", token) for token in prompt]
    if not known:
        raise ValueError("prompt: expected at least one token, found none")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a number from 0 on, found {temperature}")
    top_k = None if top_k is None else whole_number("top_k", top_k, 1)
    random, steps = np.random.default_rng(whole_number("seed", seed)), whole_number("length", length)

    def tokens() -> Iterator[int]:
        for scores in islice(_scores(model, known, cached), steps):
            known.append(next_token(whole(scores)[0, 0], temperature, top_k, random))
            yield known[-1]

    return tokens()


def _scores(model: Operator, known: Sequence[int], cached: bool) -> Iterator[Array]:
    """Yield scores of the token that follows the `known` ones, to which each next one has been added before."""
    operators = operators_in(model)
    positioned = [one for one in operators if isinstance(one, PositionEmbedding | BlockwiseAttention)]
    limits = [one.context for one in positioned if one.context is not None]
    cached = cached and all(one.continues for one in operators)
    start, past = 0, Past()
    while True:
        if limits and len(known) - start > min(limits):
            start, past = len(known) - max(min(limits) // 2, 1), Past()  # half: free positions for the next
        x = np.array([known[start + past.length :]])
        run = PassMode(training=False, samples=np.zeros(1, np.int64), past=past if cached else None)
        scores, _ = forward_of(model, x, run)
        if cached:
            past.end_pass(x.shape[1])
        yield scores[:, -1:]


def next_token(scores: Array, temperature: float, top_k: int | None, random: np.random.Generator) -> int:
    """Token drawn by its scores, one number for each token, with the options of `generate`."""
    logits = kernels.widen(scores).astype(np.float64)
    if not np.isfinite(logits).all():
        raise ValueError("scores: expected finite numbers, found others")
    best = np.argsort(-logits, kind="stable")[: 1 if temperature == 0 else top_k]
    chances = np.exp((logits[best] - logits[best[0]]) / (temperature or 1)).cumsum()
    return int(best[np.searchsorted(chances, random.random() * chances[-1], side="right")])

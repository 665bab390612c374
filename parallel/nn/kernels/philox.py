"""Random numbers by counting: what is drawn is a function of a key and a counter, and needs no state.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from parallel.nn.kernels.storage import array_namespace
from quant.types import Array

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def key_of(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two 32-bit words derived from seed, step and name.

    >>> key_of(0, 1, "2.dropout") == key_of(0, 1, "2.dropout")
    True
    """
    digest = blake2b(f"{int(seed)} {int(step)} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Four 32-bit words from a counter of four and a key of two: ten rounds.

    Parameters
    ----------
    counter : four arrays of uint64, below 2^32
        They are broadcast against each other.
    key : two int below 2^32

    Returns
    -------
    four arrays of uint64, below 2^32
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep(samples: Array, elements: int, rate: float, key: tuple[int, int]) -> Array:
    """Dropout mask of samples: each element is dropped with probability `rate`.

    Parameters
    ----------
    samples : array of int64, shape (batch,)
        Numbers of samples. Element e of sample s hangs on s, e, `rate` and `key`, and on nothing else.
    elements : int
        Elements per sample, below 2^34.
    rate : float
        From 0 to below 1, taken to a multiple of 2^-32.
    key : two int
        As `key_of` makes it.

    Returns
    -------
    array of bool, shape (batch, elements)
    """
    xp = array_namespace(samples)
    sample = samples.astype(xp.uint64)[:, None]
    block = xp.arange(-(-elements // 4), dtype=xp.uint64)[None]
    words = philox((block, xp.zeros_like(block), sample & 0xFFFFFFFF, sample >> 32), key)
    limit = np.uint64(round(rate * 2**32))
    kept = xp.empty((len(samples), block.shape[1], 4), bool)
    for lane, word in enumerate(words):
        kept[..., lane] = word >= limit
    kept = kept.reshape(len(samples), 4 * block.shape[1])
    return kept[:, :elements].copy() if elements % 4 else kept

"""Counter-based random numbers: functions of a key and a counter, without state.

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
    """Ten rounds: four 32-bit words from a counter of four (uint64 arrays, broadcast) and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep(samples: Array, elements: int, rate: float, key: tuple[int, int]) -> Array:
    """Dropout mask of shape (batch, elements), bool: each element is dropped with probability `rate`.

    Element e < 2^34 of the sample with number s (int64) depends only on s, e, `rate`, rounded to a multiple of 2^-32,
    and `key`.
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

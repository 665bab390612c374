"""Ways to quantise, as arguments name them."""

from __future__ import annotations

import argparse

from collectives.compressed import QuantCodec
from quant import PerGroup, PerTensor, QuantSpec, parse


def specs(text: str) -> dict[str, QuantSpec]:
    """Encodings of vectors by name, from names with commas.

    >>> list(specs("int8_g128,nf4"))
    ['int8_g128', 'nf4']
    """
    try:
        found = {name: parse(name) for name in text.split(",")}
        for spec in found.values():
            QuantCodec(spec, seed=0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def shareable(spec: QuantSpec) -> bool:
    """True if the spec describes integers with one scale shared by all ranks.

    >>> shareable(parse("int8")), shareable(parse("nf4")), shareable(parse("int8_g32_zero"))
    (True, False, False)
    """
    kinds = spec.linear, spec.symmetric, spec.signed, spec.bits > 1, isinstance(spec.granularity, (PerTensor, PerGroup))
    return all(kinds)

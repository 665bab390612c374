"""Quantisation kernels, each run by the fastest implementation available for its arrays.

`reference_codecs` and `reference_clusters` define the results. Other modules have tables of faster forms with the same
bits: `compiled_codecs` for host arrays (in C), `device_codecs` for CuPy arrays.
"""

from quant.kernels import reference_clusters, reference_codecs
from quant.kernels.dispatch import Kernels
from quant.kernels.dispatch import forms as forms
from quant.kernels.reference_codecs import Code, LinearCode, ScaleRule, array_namespace, minifloat_bits, surely_all

TABLE = Kernels(compiled="quant.kernels.compiled_codecs", device="quant.kernels.device_codecs")


def available(form: str) -> bool:
    """True if a faster implementation, `compiled` or `device`, can be imported."""
    return bool(TABLE.form(form))


absmax = TABLE.fastest(reference_codecs.absmax)
minmax = TABLE.fastest(reference_codecs.minmax)
peak = TABLE.fastest(reference_codecs.peak)
encode_linear = TABLE.fastest(reference_codecs.encode_linear)
encode_float = TABLE.fastest(reference_codecs.encode_float)
encode_table = TABLE.fastest(reference_codecs.encode_table)
quantize_groups = TABLE.fastest(reference_codecs.quantize_groups)
decode_linear = TABLE.fastest(reference_codecs.decode_linear)
decode_table = TABLE.fastest(reference_codecs.decode_table)
add_rows = TABLE.fastest(reference_codecs.add_rows)
multiply_rows = TABLE.fastest(reference_codecs.multiply_rows)
pack = TABLE.fastest(reference_codecs.pack)
unpack = TABLE.fastest(reference_codecs.unpack)
optimal_edges = TABLE.fastest(reference_clusters.optimal_edges)

__all__ = ["Code", "LinearCode", "ScaleRule", "array_namespace", "minifloat_bits", "surely_all"]

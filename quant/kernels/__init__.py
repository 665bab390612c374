"""Quantisation kernels, each run by the fastest implementation available for its arrays.

`reference_codecs` defines the results. Other modules have tables of faster forms with the same bits: `compiled_codecs`
for host arrays (in C), `device_codecs` for CuPy arrays.
"""

from quant.kernels import reference_codecs
from quant.kernels.dispatch import Kernels
from quant.kernels.dispatch import forms as forms
from quant.kernels.reference_codecs import LinearCode, ScaleRule, array_namespace, minifloat_bits, surely_all

TABLE = Kernels(reference_codecs, compiled="quant.kernels.compiled_codecs", device="quant.kernels.device_codecs")


def available(form: str) -> bool:
    """True if a faster implementation, `compiled` or `device`, can be imported."""
    return bool(TABLE.form(form))


absmax = TABLE.fastest("absmax")
minmax = TABLE.fastest("minmax")
peak = TABLE.fastest("peak")
encode_linear = TABLE.fastest("encode_linear")
encode_float = TABLE.fastest("encode_float")
encode_table = TABLE.fastest("encode_table")
quantize_linear = TABLE.fastest("quantize_linear")
decode_linear = TABLE.fastest("decode_linear")
decode_table = TABLE.fastest("decode_table")
add_rows = TABLE.fastest("add_rows")
multiply_rows = TABLE.fastest("multiply_rows")
pack = TABLE.fastest("pack")
unpack = TABLE.fastest("unpack")

__all__ = ["LinearCode", "ScaleRule", "array_namespace", "minifloat_bits", "surely_all"]

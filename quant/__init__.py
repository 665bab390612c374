"""Quantisation of NumPy and CuPy arrays for storage and communication."""

from quant.array import QuantizedArray
from quant.layout import layout, wire_nbytes
from quant.quantize import quantize
from quant.row_format import RowFormat
from quant.spec.granularity import PerChannel, PerGroup, PerTensor
from quant.spec.presets import INT4_G32, INT8, MXFP4, MXFP8, NF4, NVFP4, PRESETS, Q4_0, Q8_0, VSQ, grouped, parse
from quant.spec.quant_spec import QuantSpec, Scales

__all__ = [
    "INT4_G32",
    "INT8",
    "MXFP4",
    "MXFP8",
    "NF4",
    "NVFP4",
    "PRESETS",
    "Q4_0",
    "Q8_0",
    "VSQ",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "QuantSpec",
    "QuantizedArray",
    "RowFormat",
    "Scales",
    "grouped",
    "layout",
    "parse",
    "quantize",
    "wire_nbytes",
]

"""Post-training quantisation of weight matrices, calibrated on their inputs.

A weight matrix has shape (outputs, inputs), so groups along the last axis are groups of inputs. Samples enter only
through statistics of inputs that ranks can combine: X^T X, mean |x|, largest |x|.
"""

from quant.ptq.awq import awq
from quant.ptq.gptq import gptq
from quant.ptq.hqq import hqq
from quant.ptq.smoothquant import smoothing

__all__ = ["awq", "gptq", "hqq", "smoothing"]

"""Weights in few bits after training, with an eye on what goes into them: functions on matrices.

A weight matrix has shape (outputs, inputs), so that groups along the last axis are of inputs; of the samples, the
matrix of second moments X^T X is all that is needed, and those of several ranks add up.
"""

from quant.ptq.awq import awq
from quant.ptq.gptq import gptq
from quant.ptq.hqq import hqq
from quant.ptq.smoothquant import smoothing

__all__ = ["awq", "gptq", "hqq", "smoothing"]

"""Matrix product of a few activation rows with a large weight."""

from specjax.ops.linear.api import KernelLayout, linear, linear_group, preferred_layout
from specjax.ops.linear.quantized import (
    QuantizedKernel,
    check_group,
    dequantize_kernel,
    quantize_kernel,
)
from specjax.ops.linear.reference import linear_reference

__all__ = [
    "KernelLayout",
    "QuantizedKernel",
    "check_group",
    "dequantize_kernel",
    "linear",
    "linear_group",
    "linear_reference",
    "preferred_layout",
    "quantize_kernel",
]

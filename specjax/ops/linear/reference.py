"""The definition of the linear operation."""

import jax.numpy as jnp
from jax import lax

from specjax.ops.linear.quantized import QuantizedKernel, dequantize_kernel
from specjax.typing import Array, Float


def linear_reference(
    x: Float[Array, "*rows I"],
    kernel: Float[Array, "A C"] | QuantizedKernel,
    *,
    layout: str,
) -> Float[Array, "*rows O"]:
    """Multiplies rows by a kernel; products are summed in float32.

    Args:
      x: activations; rounded to the kernel's dtype before the product.
      kernel: ``[I, O]`` with layout ``in_out``, ``[O, I]`` with ``out_in``. A quantised
        one, always ``out_in``, stands for its float32 weights.
      layout: how the kernel is stored.

    Returns:
      ``x @ kernel`` in float32.
    """
    if isinstance(kernel, QuantizedKernel):
        kernel = dequantize_kernel(kernel)
    axis = 0 if layout == "in_out" else 1
    return lax.dot_general(
        x.astype(kernel.dtype),
        kernel,
        (((x.ndim - 1,), (axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )

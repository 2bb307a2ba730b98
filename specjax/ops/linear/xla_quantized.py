"""Rows times a quantised kernel as a matrix product, for TPUs and GPUs.

Integers become bfloat16 weights inside the product's own fusion: compiled for them,
no array of a kernel's size is made.
"""

import jax.numpy as jnp
from jax import lax

from specjax.ops.linear.quantized import (
    NIBBLE_ZERO,
    QuantizedKernel,
    halves,
    integers,
)
from specjax.typing import Array, Float


def quantized_dot(
    x: Float[Array, "N I"], kernel: QuantizedKernel
) -> Float[Array, "N O"]:
    """Multiplies rows by a quantised kernel; one product for each weight of a byte.

    Args:
      x: activation rows; rounded to bfloat16, as the scaled weights are.
      kernel: quantised.

    Returns:
      The product, summed in float32.
    """
    n_out, n_groups = kernel.scales.shape
    zero = 0.0 if kernel.bits == 8 else float(NIBBLE_ZERO)
    total = jnp.zeros((x.shape[0], n_out), jnp.float32)
    for numbers, rows in zip(integers(kernel), halves(x, kernel), strict=True):
        spread = (n_out, n_groups, numbers.shape[1] // n_groups)
        scales = jnp.broadcast_to(kernel.scales[:, :, None], spread)
        weights = (numbers.astype(jnp.float32) - zero) * scales.reshape(numbers.shape)
        total += lax.dot_general(
            rows.astype(jnp.bfloat16),
            weights.astype(jnp.bfloat16),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
    return total

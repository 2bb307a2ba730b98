"""Few rows times a quantised kernel, for TPUs and GPUs.

What matters is that the integers become floats inside the fusion that uses them, so
that no array of a kernel's size is made. Compiled for a v5e and an H200 (layers of
Llama-3-8B's shape, 1 to 8 rows):

- One scale a row is applied to the finished product, whose operand is then a mere
  conversion: a matrix product takes that in, of 4 bits on TPUs alone.
- Scales inside the sum would be a matrix product's undoing: GPUs write the scaled
  weights out first (1 GB for the head). A reduction takes them in.
- TPUs lay packed groups out anew each time, 0.26 GB for that head, in either form.
"""

import jax.numpy as jnp
from jax import lax

from specjax.ops.linear.quantized import (
    NIBBLE_ZERO,
    QuantizedKernel,
    halves,
    integers,
)
from specjax.ops.platform import current_platform
from specjax.typing import Array, Float

#: Rows that share one reading of the weights where they are reduced.
MOST_ROWS = 8


def quantized_product(
    x: Float[Array, "N I"], kernel: QuantizedKernel
) -> Float[Array, "N O"]:
    """Multiplies rows by a quantised kernel.

    Args:
      x: activation rows; rounded to bfloat16 where they meet one scale a row in a
        matrix product.
      kernel: quantised.

    Returns:
      The product, summed in float32.
    """
    in_place = kernel.bits == 8 or current_platform() == "tpu"
    if kernel.scales.shape[1] == 1 and in_place:
        return _dot(x, kernel)
    pieces = [
        _reduced(x[i : i + MOST_ROWS].astype(jnp.float32), kernel)
        for i in range(0, x.shape[0], MOST_ROWS)
    ]
    return jnp.concatenate(pieces)


def _dot(x: Float[Array, "N I"], kernel: QuantizedKernel) -> Float[Array, "N O"]:
    """Matrix products of the integers, one for each weight of a byte, then the scale.

    Integers of 8 bits are exact in bfloat16.
    """
    zero = jnp.bfloat16(0 if kernel.bits == 8 else NIBBLE_ZERO)
    total = jnp.zeros((x.shape[0], kernel.shape[0]), jnp.float32)
    for numbers, rows in zip(integers(kernel), halves(x, kernel), strict=True):
        total += lax.dot_general(
            rows.astype(jnp.bfloat16),
            numbers.astype(jnp.bfloat16) - zero,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
    return total * kernel.scales[:, 0][None]


def _reduced(x: Float[Array, "R I"], kernel: QuantizedKernel) -> Float[Array, "R O"]:
    """One sum of products a row, which compilers join into one fusion."""
    n_out, n_groups = kernel.scales.shape
    zero = 0.0 if kernel.bits == 8 else float(NIBBLE_ZERO)
    numbers = integers(kernel)
    spread = (n_out, n_groups, numbers[0].shape[1] // n_groups)
    scales = jnp.broadcast_to(kernel.scales[:, :, None], spread)
    scales = scales.reshape(numbers[0].shape)
    weights = [(n.astype(jnp.float32) - zero) * scales for n in numbers]
    parts = halves(x, kernel)
    sums = []
    for r in range(x.shape[0]):
        products = [w * p[r][None] for w, p in zip(weights, parts, strict=True)]
        sums.append(jnp.sum(sum(products[1:], products[0]), axis=1))
    return jnp.stack(sums)

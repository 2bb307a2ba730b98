"""Pairwise row sums in plain additions."""

import jax.numpy as jnp

from specjax.ops.platform import current_platform
from specjax.typing import Array, Float


def row_sum(x: Float[Array, "*rows W"]) -> Float[Array, "*rows 1"]:
    """Sums the last axis, on CPUs pairwise, keeping it with size 1.

    A ``sum`` leaves the order of addition to the backend, and XLA:CPU changes it with
    the number of rows (other kernels below 4096 elements and above), so that a token's
    norm would round differently in a pass of 7 rows and of 8. Additions of halves are
    elementwise: their order is the same in every shape, and their error is smaller.
    Elsewhere it is the backend's sum, which needs no moving of lanes.

    Args:
      x: rows of at least one element.

    Returns:
      The sums.
    """
    if current_platform() != "cpu":
        return jnp.sum(x, axis=-1, keepdims=True)
    odd = []
    while x.shape[-1] > 1:
        size = x.shape[-1]
        if size % 2:
            odd.append(x[..., size - 1 :])
        half = size // 2
        x = x[..., :half] + x[..., half : 2 * half]
    for rest in odd:
        x = x + rest
    return x

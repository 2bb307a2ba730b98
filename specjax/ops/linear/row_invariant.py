"""A product whose rows do not depend, in any bit, on how many rows there are."""

import jax.numpy as jnp
from jax import lax

from specjax.ops.linear.quantized import QuantizedKernel
from specjax.ops.linear.reference import linear_reference
from specjax.ops.linear.xla_quantized import quantized_product
from specjax.ops.platform import current_platform
from specjax.typing import Array, Float

# XLA:CPU with JAX 0.12, AVX-512: products of 4 to 32 rows round
# alike, at any row index, in float32 and bfloat16; fewer take other paths, and
# more than 32 another tiling. The tests pin this band.
_CPU_BAND = (4, 32)

# Elsewhere every product has the one shape [_TILE, in], so that whatever algorithm
# the compiler picks for the shape, it is the same one.
_TILE = 32


def linear_row_invariant(
    x: Float[Array, "N I"],
    kernel: Float[Array, "A C"] | QuantizedKernel,
    *,
    layout: str,
) -> Float[Array, "N O"]:
    """Multiplies rows by a kernel in pieces of a size that always rounds alike.

    Args:
      x: activation rows.
      kernel: see ``linear``; quantised ones not on the CPU.
      layout: see ``linear``.

    Returns:
      The product, float32.
    """
    rows = x.shape[0]
    if current_platform() == "cpu":
        least, most = _CPU_BAND
        n_pieces = -(-rows // most)
        size = max(least, -(-rows // n_pieces))
    else:
        n_pieces, size = -(-rows // _TILE), _TILE
    x = jnp.pad(x, ((0, n_pieces * size - rows), (0, 0)))
    # The barriers keep the compiler from trimming the padding off the product, or
    # from joining the pieces into one again.
    pieces = []
    for i in range(n_pieces):
        piece = lax.slice_in_dim(x, i * size, (i + 1) * size)
        piece = lax.optimization_barrier(piece)
        if isinstance(kernel, QuantizedKernel):
            y = quantized_product(piece, kernel)
        else:
            y = linear_reference(piece, kernel, layout=layout)
        pieces.append(lax.optimization_barrier(y))
    y = pieces[0] if n_pieces == 1 else jnp.concatenate(pieces)
    return y[:rows]

"""One bfloat16 row times a matrix, in the form that XLA:CPU makes fast.

Measured with JAX 0.12 on two AVX-512 cores: a one-row bfloat16 dot is lowered to
a float32 copy of the whole kernel (5 GB/s); the same product padded to two rows
packs the kernel on every call (25 GB/s). What streams at memory speed (36 to
44 GB/s) is a multiply-and-reduce inside a small loop: XLA:CPU compiles a small
loop as one LLVM function whose reductions may be reassociated, hence vectorised,
which it does not allow in stand-alone fusions. Several sums side by side keep
several vector accumulators in flight.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.typing import Array, Float

# Independent sums a loop trip computes side by side.
_LANES = 4


@jax.jit  # traced once a shape, not once a layer
def gemv_rows_bf16(
    x: Float[Array, " I"], kernel: Float[Array, "O I"]
) -> Float[Array, " O"]:
    """Multiplies one row by an ``[out, in]`` bfloat16 kernel.

    Args:
      x: one activation row; rounded to bfloat16 as the dot would.
      kernel: bfloat16 weights.

    Returns:
      float32 products.
    """
    n_out, n_in = kernel.shape
    # The barrier keeps the row's producer out of the loop below, where it would
    # be computed again for every output.
    x = lax.optimization_barrier(x.astype(kernel.dtype).astype(jnp.float32))
    step = 2 * _LANES
    main = n_out - n_out % step
    parts = []
    if main:
        parts.append(_blocked(x, lax.slice_in_dim(kernel, 0, main)))
    if main < n_out:
        tail = lax.slice_in_dim(kernel, main, n_out).astype(jnp.float32)
        parts.append(jnp.sum(tail * x[None, :], axis=1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _blocked(x: Array, kernel: Array) -> Array:
    n_out, n_in = kernel.shape
    # Two trips: a loop of one trip would be unrolled into a plain fusion.
    block = n_out // 2
    lane = block // _LANES

    def body(i: Array, y: Array) -> Array:
        rows = lax.dynamic_slice(kernel, (i * block, 0), (block, n_in))
        products = tuple(
            rows[k * lane : (k + 1) * lane].astype(jnp.float32) * x[None, :]
            for k in range(_LANES)
        )
        zero = (jnp.float32(0.0),) * _LANES
        sums = lax.reduce(
            products,
            zero,
            lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True)),
            (1,),
        )
        return lax.dynamic_update_slice(y, jnp.concatenate(sums), (i * block,))

    return lax.fori_loop(0, 2, body, jnp.zeros((n_out,), jnp.float32))

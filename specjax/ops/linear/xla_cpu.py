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

# A loop of one trip would be unrolled into plain fusions.
_TRIPS = 2


@jax.jit  # traced once a set of shapes, not once a layer
def gemv_rows_bf16(
    x: Float[Array, " I"], kernels: tuple[Float[Array, "O I"], ...]
) -> tuple[Float[Array, " O"], ...]:
    """Multiplies one row by some ``[out, in]`` bfloat16 kernels.

    Args:
      x: one activation row; rounded to bfloat16 as the dot would.
      kernels: bfloat16 weights, which share one loop.

    Returns:
      float32 products, one a kernel.
    """
    # The barrier keeps the row's producer out of the loop below, where it would
    # be computed again for every output.
    x = lax.optimization_barrier(x.astype(jnp.bfloat16).astype(jnp.float32))
    step = _TRIPS * _LANES
    mains = tuple(
        lax.slice_in_dim(kernel, 0, kernel.shape[0] - kernel.shape[0] % step)
        for kernel in kernels
    )
    parts = _blocked(x, mains)
    outputs = []
    for kernel, main, part in zip(kernels, mains, parts, strict=True):
        if main.shape[0] < kernel.shape[0]:
            tail = kernel[main.shape[0] :].astype(jnp.float32)
            part = jnp.concatenate([part, jnp.sum(tail * x[None, :], axis=1)])
        outputs.append(part)
    return tuple(outputs)


def _blocked(x: Array, kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    """Runs the loop; every kernel's rows are a multiple of trips times lanes."""

    def product(i: Array, kernel: Array, y: Array) -> Array:
        n_out, n_in = kernel.shape
        block = n_out // _TRIPS
        lane = block // _LANES
        if not lane:
            return y
        rows = lax.dynamic_slice(kernel, (i * block, 0), (block, n_in))
        products = tuple(
            rows[k * lane : (k + 1) * lane].astype(jnp.float32) * x[None, :]
            for k in range(_LANES)
        )
        sums = lax.reduce(
            products,
            (jnp.float32(0.0),) * _LANES,
            lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True)),
            (1,),
        )
        return lax.dynamic_update_slice(y, jnp.concatenate(sums), (i * block,))

    def body(i: Array, ys: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(product(i, k, y) for k, y in zip(kernels, ys, strict=True))

    start = tuple(jnp.zeros((k.shape[0],), jnp.float32) for k in kernels)
    return lax.fori_loop(0, _TRIPS, body, start)

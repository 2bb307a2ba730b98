"""Few rows times quantised kernels, in the form that XLA:CPU makes fast.

As in ``xla_cpu`` a small loop of sums, which LLVM vectorises: it widens eight weights,
scales them and multiplies them with each row. The scale is an operand of the one long
sum of a row, broadcast along its group. Sums of each group would end in a horizontal
sum for every group, which costs as much as its products (x1.4 for groups of 64). One
scale a row multiplies the finished sum.

Measured with JAX 0.12 on AVX-512 cores, one row of a 1536 x 576 kernel takes 0.65 of
its bfloat16 time in int8 and 0.8 in int4: arithmetic is the limit (21 billion weights a
second out of the cache), not memory. Two rows take 0.4 of the bfloat16 product's time,
four 0.55, eight as much as it does, on one core for its two.
"""

import jax
import jax.numpy as jnp
from jax import lax

from specjax.ops.linear.quantized import (
    NIBBLE_ZERO,
    QuantizedKernel,
    halves,
    integers,
)
from specjax.typing import Array, Float

#: Rows that share one reading of the weights.
MOST_ROWS = 8

# A loop of one trip would be unrolled into plain fusions.
_TRIPS = 2


def quantized_rows(
    x: Float[Array, "R I"], kernels: tuple[QuantizedKernel, ...], *, together: bool
) -> tuple[Float[Array, "R O"], ...]:
    """Multiplies rows by some quantised kernels of equal bits and groups.

    Args:
      x: activation rows.
      kernels: they share one loop.
      together: read the weights once for ``MOST_ROWS`` rows. Otherwise once a row,
        whose bits then do not depend on the number of rows.

    Returns:
      float32 products, one a kernel.
    """
    step = MOST_ROWS if together else 1
    pieces = [
        _piece(x[i : i + step].astype(jnp.float32), kernels)
        for i in range(0, x.shape[0], step)
    ]
    return tuple(jnp.concatenate(parts) for parts in zip(*pieces, strict=True))


@jax.jit  # traced once a set of shapes, not once a layer
def _piece(
    x: Float[Array, "R I"], kernels: tuple[QuantizedKernel, ...]
) -> tuple[Float[Array, "R O"], ...]:
    """Multiplies up to ``MOST_ROWS`` rows."""
    # The barrier keeps the rows' producer out of the loop, where it would be computed
    # again for every output.
    parts = halves(x, kernels[0])
    if len(parts) > 1:
        parts = (*parts, NIBBLE_ZERO * (parts[0] + parts[1]))
    parts = lax.optimization_barrier(parts)
    # Several sums side by side keep vector accumulators in flight.
    lanes = max(1, 4 // x.shape[0])
    step = _TRIPS * lanes
    ends = [k.shape[0] - k.shape[0] % step for k in kernels]

    def body(i: Array, ys: tuple[Array, ...]) -> tuple[Array, ...]:
        made = []
        for kernel, end, y in zip(kernels, ends, ys, strict=True):
            if end:
                block = end // _TRIPS
                rows = jax.tree.map(
                    lambda a, block=block: lax.dynamic_slice_in_dim(
                        a, i * block, block
                    ),
                    kernel,
                )
                part = _sums(parts, rows, lanes)
                y = lax.dynamic_update_slice(y, part, (0, i * block))
            made.append(y)
        return tuple(made)

    start = tuple(jnp.zeros((x.shape[0], k.shape[0]), jnp.float32) for k in kernels)
    ys = list(lax.fori_loop(0, _TRIPS, body, start))
    for n, (kernel, end) in enumerate(zip(kernels, ends, strict=True)):
        if end < kernel.shape[0]:
            tail = jax.tree.map(lambda a, end=end: a[end:], kernel)
            ys[n] = ys[n].at[:, end:].set(_sums(parts, tail, 1))
    return tuple(ys)


def _sums(
    parts: tuple[Array, ...], kernel: QuantizedKernel, lanes: int
) -> Float[Array, "R O"]:
    """Sums products over the inputs, ``lanes`` outputs side by side."""
    n_rows = parts[0].shape[0]
    n_out, n_groups = kernel.scales.shape
    lane = n_out // lanes
    summands = []
    for k in range(lanes):
        cut = jax.tree.map(lambda a, k=k: a[k * lane : (k + 1) * lane], kernel)
        summands += _products(parts, cut)
    sums = lax.reduce(
        tuple(summands),
        (jnp.float32(0.0),) * len(summands),
        lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True)),
        (1,),
    )
    y = jnp.stack([jnp.concatenate(sums[r::n_rows]) for r in range(n_rows)])
    return y if n_groups > 1 else y * kernel.scales[:, 0][None]


def _products(parts: tuple[Array, ...], kernel: QuantizedKernel) -> list[Array]:
    """Returns each row's summands; with one scale a row, that is left to the sums."""
    numbers = [n.astype(jnp.float32) for n in integers(kernel)]
    n_out, n_groups = kernel.scales.shape
    spread = (n_out, n_groups, numbers[0].shape[1] // n_groups)
    scales = jnp.broadcast_to(kernel.scales[:, :, None], spread)
    scales = scales.reshape(numbers[0].shape) if n_groups > 1 else None
    if kernel.bits == 8:
        (weights,) = numbers if scales is None else (numbers[0] * scales,)
        return [weights * row[None] for row in parts[0]]
    # The nibbles' zero is taken off the products of two, not off each weight.
    low, high = numbers
    found = [
        low * first[None] + (high * second[None] - zero[None])
        for first, second, zero in zip(*parts, strict=True)
    ]
    return found if scales is None else [product * scales for product in found]

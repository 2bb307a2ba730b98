"""``gather_path`` for XLA: slices, one of each array and batch row."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from specjax.typing import Array, Int


def gather_path_xla(
    caches: Sequence[Array],
    start: Int[Array, " B"],
    path: Int[Array, "B D"],
    n_nodes: int,
) -> tuple[Array, ...]:
    """Takes the nodes of a row as one slice and writes the path as another.

    Args:
      caches: arrays [B, K, S, M] or [B, K, S].
      start: slot of node 0 of each row.
      path: nodes from the top down, -1 after the end.
      n_nodes: of the pass.

    Returns:
      The arrays; node 0 stands in the slots of -1.
    """
    index = jnp.maximum(path, 0)

    def move(x: Array) -> Array:
        rest = (0,) * (x.ndim - 3)
        for r in range(path.shape[0]):
            at = (r, 0, start[r], *rest)
            size = (1, x.shape[1], n_nodes, *x.shape[3:])
            nodes = lax.dynamic_slice(x, at, size)
            # Fused with the write, the read would cost a copy of the cache.
            kept = lax.optimization_barrier(jnp.take(nodes, index[r], axis=2))
            x = lax.dynamic_update_slice(x, kept, at)
        return x

    return tuple(move(x) for x in caches)

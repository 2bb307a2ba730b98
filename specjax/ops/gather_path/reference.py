"""The definition of ``gather_path``."""

from collections.abc import Sequence

import jax.numpy as jnp

from specjax.typing import Array, Int


def gather_path_reference(
    caches: Sequence[Array], start: Int[Array, " B"], path: Int[Array, "B D"]
) -> tuple[Array, ...]:
    """Slot ``start + d`` gets what stood in slot ``start + path[:, d]``.

    Args:
      caches: arrays [B, K, S, M], or [B, K, S] of scales.
      start: slot of node 0 of each row.
      path: increasing nodes from the top down, -1 after the end.

    Returns:
      The arrays; slots of -1 and all others as they were.
    """
    depth = path.shape[1]

    def gather(x: Array) -> Array:
        slot = jnp.arange(x.shape[2])[None]
        at = slot - start[:, None]
        node = jnp.take_along_axis(path, jnp.clip(at, 0, depth - 1), axis=1)
        on_path = (at >= 0) & (at < depth) & (node >= 0)
        source = jnp.where(on_path, start[:, None] + node, slot)
        source = source[:, None, :, *[None] * (x.ndim - 3)]
        return jnp.take_along_axis(x, source, axis=2)

    return tuple(gather(x) for x in caches)

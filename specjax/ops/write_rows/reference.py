"""The definition of ``write_rows``."""

import jax.numpy as jnp

from specjax.typing import Array, Float, Int


def write_rows_reference(
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    new_keys: Float[Array, "R T K M"],
    new_values: Float[Array, "R T K M"],
    start: Int[Array, " R"],
    row: Int[Array, ""] | None = None,
) -> tuple[Array, Array]:
    """Slot ``start + t`` gets row t of the pass.

    Args:
      keys: cache.
      values: cache.
      new_keys: rows to write, cast to the cache's dtype.
      new_values: likewise.
      start: first slot of each row of the pass.
      row: the one batch row addressed (then R is 1), or None for the whole batch.

    Returns:
      The caches; all other slots as they were.
    """

    def write(cache: Array, new: Array) -> Array:
        new = new.transpose(0, 2, 1, 3).astype(cache.dtype)
        n_new = new.shape[2]
        at = jnp.arange(cache.shape[2])[None] - start[:, None]
        fresh = jnp.take_along_axis(
            new, jnp.clip(at, 0, n_new - 1)[:, None, :, None], axis=2
        )
        inside = ((at >= 0) & (at < n_new))[:, None, :, None]
        if row is None:
            return jnp.where(inside, fresh, cache)
        return cache.at[row].set(jnp.where(inside[0], fresh[0], cache[row]))

    return write(keys, new_keys), write(values, new_values)

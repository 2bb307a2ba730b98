"""``write_rows`` for XLA: a slice update of each array and batch row."""

from jax import lax

from specjax.typing import Array, Float, Int


def write_rows_xla(
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    new_keys: Float[Array, "R T K M"],
    new_values: Float[Array, "R T K M"],
    start: Int[Array, " R"],
    row: Int[Array, ""] | None = None,
) -> tuple[Array, Array]:
    """Writes each row of the pass as one slice.

    Args:
      keys: cache.
      values: cache.
      new_keys: rows to write, cast to the cache's dtype.
      new_values: likewise.
      start: first slot of each row of the pass.
      row: the one batch row addressed (then R is 1), or None for the whole batch.

    Returns:
      The caches.
    """
    return (
        _write(keys, new_keys, start, row),
        _write(values, new_values, start, row),
    )


def _write(cache: Array, new: Array, start: Array, row: Array | None) -> Array:
    new = new.transpose(0, 2, 1, 3).astype(cache.dtype)
    if row is not None:
        return lax.dynamic_update_slice(cache, new, (row, 0, start[0], 0))
    # One slice update a row: in place on every backend, where a scatter is not.
    for r in range(new.shape[0]):
        at = (r, 0, start[r], 0)
        cache = lax.dynamic_update_slice(cache, new[r : r + 1], at)
    return cache

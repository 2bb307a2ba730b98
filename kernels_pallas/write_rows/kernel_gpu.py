"""Writing a pass's keys and values on GPU: both arrays of a layer in one launch.

A block of the grid has one head of one row of the pass. The copy engine (TMA) brings
its new rows to shared memory and puts them at their slots; no thread touches a number.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.typing import Array, Float, Int

# The copy engine's units: of a row in memory, and most rows of a copy.
_ROW_BYTES = 16
_MOST_ROWS = 256

# Shared memory for new rows; a GB10 block may have 99 KiB, and smaller blocks share a
# core.
_SHARED_BYTES = 48 * 2**10


def supports(cache: Any, *, n_new: int) -> str | None:
    """Says why the kernel can't write such rows.

    Args:
      cache: array [B, K, S, M]; shape and dtype are looked at.
      n_new: rows of the pass, T.

    Returns:
      None if it can, else the reason.
    """
    del n_new
    row = cache.shape[3] * jnp.dtype(cache.dtype).itemsize
    if row % _ROW_BYTES:
        return f"{cache.shape[3]} x {cache.dtype} is no multiple of {_ROW_BYTES} bytes"
    if 2 * row > _SHARED_BYTES:
        return f"two rows of {row} bytes exceed {_SHARED_BYTES} of shared memory"
    return None


def write_rows(
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    new_keys: Float[Array, "R T K M"],
    new_values: Float[Array, "R T K M"],
    start: Int[Array, " R"],
    rows: Int[Array, " R"] | None = None,
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Writes row r of a pass to slots ``[start[r], start[r] + T)``, in place.

    Args:
      keys: cache; donate it, else it is copied.
      values: likewise, of the same shape and dtype.
      new_keys: rows to write, cast to the cache's dtype.
      new_values: likewise.
      start: first slot of each row; the slots are inside the array.
      rows: batch row that each row goes to; None: row r to batch row r.
      interpret: as in ``pallas_call``.

    Returns:
      The caches; all other slots are as they were.
    """
    n_rows, n_new, heads, width = new_keys.shape
    most = _SHARED_BYTES // (2 * width * keys.dtype.itemsize)
    piece = min(n_new, most, _MOST_ROWS)
    place = jnp.arange(n_rows, dtype=jnp.int32) if rows is None else rows
    given = (
        start.astype(jnp.int32),
        place.astype(jnp.int32),
        new_keys.astype(keys.dtype),
        new_values.astype(values.dtype),
    )
    # References, since what a kernel is given as arrays it may not write.
    launch: Any = pl.kernel(
        functools.partial(_kernel, piece=piece),
        mesh=plgpu.Mesh(grid=(n_rows, heads), grid_names=("row", "head")),
        interpret=interpret,
        name="write_rows",
    )
    write = pl.run_state(lambda caches: launch(*given, *caches))
    return write((keys, values))


def _kernel(
    start_ref: Any,
    row_ref: Any,
    new_keys: Any,
    new_values: Any,
    keys: Any,
    values: Any,
    *,
    piece: int,
) -> None:
    """Writes one head of one row of the pass."""
    n_new, width = new_keys.shape[1], new_keys.shape[3]
    r, head = lax.axis_index("row"), lax.axis_index("head")
    start, row = start_ref[r], row_ref[r]

    def write(keys_place, values_place, arrived):
        pairs = ((new_keys, keys_place, keys), (new_values, values_place, values))
        for begin in range(0, n_new, piece):
            n = min(piece, n_new - begin)
            for new, place, _ in pairs:
                source = new.at[r, pl.ds(begin, n), head]
                plgpu.copy_gmem_to_smem(source, place.at[pl.ds(0, n)], arrived)
            plgpu.barrier_wait(arrived)
            plgpu.commit_smem()  # no copy out before all have come in
            for _, place, cache in pairs:
                target = cache.at[row, head, pl.ds(start + begin, n)]
                plgpu.copy_smem_to_gmem(place.at[pl.ds(0, n)], target)
            plgpu.wait_smem_to_gmem(0)

    place = plgpu.SMEM((piece, width), keys.dtype)
    pl.run_scoped(write, place, place, plgpu.Barrier(num_arrivals=2))

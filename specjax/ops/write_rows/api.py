"""Chooses how a pass's keys and values are written into a layer's cache."""

from typing import Any

from specjax.ops.choose import Implementation, choose
from specjax.ops.write_rows.xla import write_rows_xla
from specjax.typing import Array, Float, Int


def write_rows(
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    new_keys: Float[Array, "R T K M"],
    new_values: Float[Array, "R T K M"],
    start: Int[Array, " R"],
    row: Int[Array, ""] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Array, Array]:
    """Writes a pass's rows at ``[start, start + T)`` of each addressed batch row.

    The definition is ``write_rows_reference``. A kernel writes keys and values of all
    rows in one launch, in place where the caches are donated, and on a mesh each device
    writes its own heads (and batch rows, where ``row`` is None).

    Args:
      keys: a layer's cached keys, any dtype.
      values: its values, of the same shape and dtype.
      new_keys: the pass's keys as the model makes them; cast to the cache's dtype.
      new_values: its values.
      start: first slot of each row of the pass, int32; ``start + T`` is within S.
      row: the one batch row addressed (then R is 1), or None for the whole batch.
      implementation: ``xla``, ``pallas_tpu`` or ``pallas_gpu``; None: the platform's
        kernel if it can take these arrays, else ``xla``.

    Returns:
      The caches with the rows written; all other slots are as they were.

    Raises:
      ValueError: shapes do not agree, or the implementation that was named can't take
        them.
    """
    batch, heads, slots, width = keys.shape
    n_rows, n_new = new_keys.shape[:2]
    if (
        new_keys.shape != (n_rows, n_new, heads, width)
        or new_values.shape != new_keys.shape
        or start.shape != (n_rows,)
        or n_rows != (batch if row is None else 1)
        or n_new > slots
    ):
        raise ValueError(
            f"{keys.shape=}, {new_keys.shape=}, {new_values.shape=}, {start.shape=} "
            f"and {row=} do not agree."
        )
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(f"{keys=} and {values=} differ in shape or dtype.")
    if not n_new:
        return keys, values

    def unsupported(kernel: Implementation) -> str | None:
        return _kernel(kernel).supports(keys, n_new=n_new)

    chosen = choose(implementation, unsupported)
    if chosen == "xla":
        return write_rows_xla(keys, values, new_keys, new_values, start, row)

    from kernels_pallas.write_rows.partition import partitioned

    given = (keys, values, new_keys, new_values, start)
    rows = () if row is None else (row[None],)
    return partitioned(_kernel(chosen).write_rows, *given, *rows)


def _kernel(implementation: Implementation) -> Any:
    """Imports a kernel's module; nothing of Pallas is looked for before."""
    if implementation == "pallas_tpu":
        from kernels_pallas.write_rows import kernel_tpu

        return kernel_tpu
    from kernels_pallas.write_rows import kernel_gpu

    return kernel_gpu

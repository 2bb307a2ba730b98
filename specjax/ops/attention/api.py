"""Chooses the implementation of cached attention."""

from specjax.ops.attention.xla import KV_BLOCK, blocked_attention
from specjax.ops.platform import is_row_invariant
from specjax.trees import PassLayout
from specjax.typing import Array, Float, Int

__all__ = ["KV_BLOCK", "cached_attention"]

# Query rows of a key/value head in one product, when rows must not depend on their
# number: every product then has this one shape.
_INVARIANT_ROWS = 32


def cached_attention(
    q: Float[Array, "R T H M"],
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    length: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    layout: PassLayout | None = None,
    row: Int[Array, ""] | None = None,
) -> Float[Array, "R T H M"]:
    """Attends from T new rows to the cache, touching only its live part.

    The definition is :func:`cached_attention_reference`. Keys are visited in
    blocks of ``KV_BLOCK`` slots anchored at position 0, so that a row's result
    depends neither on the other rows nor on how much of the cache lies beyond it.

    Args:
      q: queries, rotated.
      keys: cache after this pass's rows were written at [length, length + T);
        what lies beyond is never used, NaN included.
      values: as keys.
      length: committed tokens of each addressed row before this pass.
      scale: factor on the scores.
      window: sliding window in tokens, or None.
      sinks: with a window, first tokens of the text that are seen besides it.
      layout: of a pass over a tree: which of the new rows each new row sees, and how
        far behind ``length`` it stands. None: a chain, each one further than the last.
      row: which batch row of the cache the queries belong to (then R is 1);
        None when the queries are the whole batch (R is B).

    Returns:
      Attention output, float32.

    Raises:
      ValueError: shapes do not agree, or S is no multiple of the block.
    """
    n_rows, _, n_heads, width = q.shape
    batch, n_kv, slots, kv_width = keys.shape
    if keys.shape != values.shape or kv_width != width:
        raise ValueError(f"{q.shape=}, {keys.shape=} and {values.shape=} do not agree.")
    if n_heads % n_kv:
        raise ValueError(f"{n_heads=} is no multiple of {n_kv=}.")
    if slots % KV_BLOCK:
        raise ValueError(f"{slots=} is no multiple of {KV_BLOCK=}.")
    if n_rows != (batch if row is None else 1):
        raise ValueError(
            f"{n_rows=} queries address a cache of {batch} rows; pass row= for one."
        )
    return blocked_attention(
        q,
        keys,
        values,
        length,
        scale=scale,
        window=window,
        sinks=sinks if window is not None else 0,
        layout=layout,
        row=row,
        tile_rows=_INVARIANT_ROWS if is_row_invariant() else None,
    )

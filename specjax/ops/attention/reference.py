"""The definition of cached attention, whole and in float32."""

import jax.numpy as jnp

from specjax.typing import Array, Float, Int


def cached_attention_reference(
    q: Float[Array, "R T H M"],
    keys: Float[Array, "R K S M"],
    values: Float[Array, "R K S M"],
    length: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
) -> Float[Array, "R T H M"]:
    """Attends from T new rows to the cache, which holds them already.

    Row t of batch row r stands at position ``length[r] + t`` and sees the keys at
    positions ``<= length[r] + t``, and with a window only the last ``window`` of
    those, itself included.

    Args:
      q: queries, rotated.
      keys: cache after this pass's rows were written at [length, length + T).
      values: as keys.
      length: committed tokens in the cache before this pass.
      scale: factor on the scores.
      window: sliding window in tokens, or None.
      sinks: with a window, first tokens of the text that are seen besides it.

    Returns:
      Attention output, float32.
    """
    n_rows, n_new, n_heads, width = q.shape
    n_kv, slots = keys.shape[1], keys.shape[2]
    q = q.reshape(n_rows, n_new, n_kv, n_heads // n_kv, width).astype(jnp.float32)
    scores = jnp.einsum("rtkgm,rksm->rktgs", q, keys.astype(jnp.float32)) * scale
    slot = jnp.arange(slots)
    position = length[:, None] + jnp.arange(n_new)[None, :]
    seen = slot[None, None, :] <= position[:, :, None]
    if window is not None:
        near = slot[None, None, :] > position[:, :, None] - window
        seen &= near | (slot < sinks)
    scores = jnp.where(seen[:, None, :, None, :], scores, -jnp.inf)
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    live = slot[None, :] < (length + n_new)[:, None]
    values = jnp.where(live[:, None, :, None], values.astype(jnp.float32), 0.0)
    out = jnp.einsum("rktgs,rksm->rtkgm", weights, values)
    return out.reshape(n_rows, n_new, n_heads, width)

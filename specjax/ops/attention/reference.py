"""The definition of cached attention, whole and in float32."""

import jax.numpy as jnp

from specjax.trees import PassLayout
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
    layout: PassLayout | None = None,
    soft_cap: float | None = None,
    key_scale: Float[Array, "R K S"] | None = None,
    value_scale: Float[Array, "R K S"] | None = None,
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
      layout: of a pass over a tree. Row t then stands at ``length[r] + offsets[t]``,
        and of the new rows it sees those that its mask names.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)`` (Gemma 2,
        arXiv:2408.00118, section 2); None: they stay as they are.
      key_scale: factor of each slot and head of a quantised cache; None: 1.
      value_scale: likewise, of its values.

    Returns:
      Attention output, float32.
    """
    n_rows, n_new, n_heads, width = q.shape
    n_kv, slots = keys.shape[1], keys.shape[2]
    q = q.reshape(n_rows, n_new, n_kv, n_heads // n_kv, width).astype(jnp.float32)
    keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    if key_scale is not None:
        keys = keys * key_scale[..., None]
    if value_scale is not None:
        values = values * value_scale[..., None]
    scores = jnp.einsum("rtkgm,rksm->rktgs", q, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    slot = jnp.arange(slots)
    position = length[:, None] + jnp.arange(n_new)[None, :]
    stands = jnp.broadcast_to(slot, (n_rows, slots))
    seen = slot[None, None, :] <= position[:, :, None]
    if layout is not None:
        mask = jnp.broadcast_to(jnp.asarray(layout.mask), (n_rows, n_new, n_new))
        offsets = jnp.broadcast_to(jnp.asarray(layout.offsets), (n_rows, n_new))
        position = length[:, None] + offsets
        own = slot[None, :] - length[:, None]
        new, own = (own >= 0) & (own < n_new), jnp.clip(own, 0, n_new - 1)
        named = jnp.take_along_axis(mask, own[:, None, :], axis=2)
        seen = jnp.where(new[:, None], named, slot < length[:, None, None])
        stands = jnp.where(new, jnp.take_along_axis(position, own, axis=1), stands)
    if window is not None:
        near = stands[:, None, :] > position[:, :, None] - window
        seen &= near | (stands < sinks)[:, None, :]
    scores = jnp.where(seen[:, None, :, None, :], scores, -jnp.inf)
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    live = slot[None, :] < (length + n_new)[:, None]
    values = jnp.where(live[:, None, :, None], values, 0.0)
    out = jnp.einsum("rktgs,rksm->rtkgm", weights, values)
    return out.reshape(n_rows, n_new, n_heads, width)

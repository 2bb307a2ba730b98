"""Cached attention as a loop over key blocks, for any XLA backend."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from specjax.ops.rows import row_sum
from specjax.trees import PassLayout
from specjax.typing import Array, Float, Int

#: Cache slots a loop trip visits. Small enough that a short row costs little,
#: large enough that a trip's fixed cost is spread.
KV_BLOCK = 256

# Finite, so that a block that a row does not see leaves no NaN: its weights are
# wiped to exactly zero when the row's first visible key rescales the sums.
_MASKED = -1e30


@functools.partial(
    jax.jit, static_argnames=("scale", "window", "sinks", "soft_cap", "tile_rows")
)
def blocked_attention(
    q: Float[Array, "R T H M"],
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    length: Int[Array, " R"],
    *,
    scale: float,
    window: int | None,
    sinks: int,
    layout: PassLayout | None,
    row: Int[Array, ""] | None,
    tile_rows: int | None,
    soft_cap: float | None = None,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
) -> Float[Array, "R T H M"]:
    """Online-softmax attention; see ``cached_attention`` for most arguments.

    Jitted, so that it is traced once a shape and not once a layer. With ``tile_rows``
    the query rows of a key/value head are padded and cut into tiles of that many, and
    each tile is a product of its own: whatever algorithm the backend picks for the
    shape, and however that rounds, is then the same for every number of rows.

    The trip count follows the longest addressed row, so a pass over short rows
    in a large cache costs what it costs in a small one. With a window, trips go over
    the blocks of the sinks and then over those of each row's own window. A trip in
    which a row sees nothing changes none of its bits: it adds exact zeros and
    multiplies by exact ones, which is what makes rows independent of their neighbours.
    """
    n_rows, n_asked, n_heads, width = q.shape
    n_kv = keys.shape[1]
    group = n_heads // n_kv
    tile = max(1, tile_rows // group) if tile_rows else n_asked
    q = jnp.pad(q, ((0, 0), (0, -n_asked % tile), (0, 0), (0, 0)))
    n_new = q.shape[1]
    rows = n_new * group
    q = q.astype(jnp.float32).reshape(n_rows, n_new, n_kv, group, width)
    q = q.transpose(0, 2, 1, 3, 4).reshape(n_rows, n_kv, rows, width) * scale
    if layout is None:
        offsets = jnp.arange(n_new)[None, :]
    else:
        offsets = jnp.broadcast_to(jnp.asarray(layout.offsets), (n_rows, n_asked))
        offsets = jnp.pad(offsets, ((0, 0), (0, n_new - n_asked)))
        named = jnp.broadcast_to(jnp.asarray(layout.mask), (n_rows, n_asked, n_asked))
        if window is not None:
            apart = offsets[:, :n_asked, None] - offsets[:, None, :n_asked]
            stands = length[:, None] + offsets[:, :n_asked]
            named &= (apart < window) | (stands < sinks)[:, None, :]
        named = jnp.pad(named, ((0, 0), (0, n_new - n_asked), (0, 0)))
    position = length[:, None] + jnp.repeat(offsets, group, axis=1)
    end = length + n_asked

    n_sinks = -(-sinks // KV_BLOCK)
    first, last = jnp.zeros_like(length), (end + KV_BLOCK - 1) // KV_BLOCK
    if window is not None:
        # Where the trips after those of the sinks begin.
        first = jnp.maximum(length - window + 1, 0) // KV_BLOCK
        first = jnp.maximum(first - n_sinks, 0)

    def block(cache: Array, at: Array) -> Array:
        """Takes a block [R, K, KV_BLOCK, ...] of keys, values or scales."""
        size = (n_rows, n_kv, KV_BLOCK, *cache.shape[3:])
        rest = (0,) * (cache.ndim - 3)
        if row is not None or window is None or n_rows == 1:
            start = (0 if row is None else row, 0, at[0] * KV_BLOCK, *rest)
            return lax.dynamic_slice(cache, start, size).astype(jnp.float32)
        # One slice a row, as in the cache's writes: a gather is slow on the CPU.
        parts = [
            lax.dynamic_slice(cache, (r, 0, at[r] * KV_BLOCK, *rest), (1, *size[1:]))
            for r in range(n_rows)
        ]
        return jnp.concatenate(parts).astype(jnp.float32)

    def product(rows: Array, block: Array, axis: int) -> Array:
        """Multiplies rows [R, K, rows, X] by a block, contracting its axis."""
        dims = (((3,), (axis,)), ((0, 1), (0, 1)))
        if not tile_rows:
            return lax.dot_general(rows, block, dims)
        pieces = []
        for at in range(0, rows.shape[2], tile * group):
            piece = lax.slice_in_dim(rows, at, at + tile * group, axis=2)
            # The barriers keep the compiler from trimming the padding or joining tiles.
            piece = lax.dot_general(lax.optimization_barrier(piece), block, dims)
            pieces.append(lax.optimization_barrier(piece))
        return jnp.concatenate(pieces, axis=2)

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, peak, total, out = carry
        at = i + jnp.where(i < n_sinks, 0, first)
        slot = at[:, None] * KV_BLOCK + jnp.arange(KV_BLOCK)[None, :]
        k, v = block(keys, at), block(values, at)
        if value_scale is not None:
            v = v * block(value_scale, at)[..., None]
        # Slots beyond the row's end hold leftovers; zero times NaN is NaN.
        v = jnp.where((slot < end[:, None])[:, None, :, None], v, 0.0)
        scores = product(q, k, 3)
        if key_scale is not None:
            scores = scores * block(key_scale, at)[:, :, None, :]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if layout is None:
            seen = slot[:, None, :] <= position[:, :, None]
        else:
            seen = (slot < length[:, None])[:, None, :]
        if window is not None:
            near = slot[:, None, :] > position[:, :, None] - window
            seen &= near | (slot < sinks)[:, None, :]
        if layout is not None:
            own = slot - length[:, None]
            index = jnp.clip(own, 0, n_asked - 1)[:, None, :]
            new = jnp.take_along_axis(named, index, axis=2)
            new &= ((own >= 0) & (own < n_asked))[:, None, :]
            seen |= jnp.repeat(new, group, axis=1)
        scores = jnp.where(seen[:, None], scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        keep = jnp.exp(peak - new_peak)
        total = total * keep + row_sum(weights)[..., 0]
        mixed = product(weights, v, 2)
        return i + 1, new_peak, total, out * keep[..., None] + mixed

    n_trips = jnp.max(last - first)
    start = (
        jnp.int32(0),
        jnp.full((n_rows, n_kv, rows), _MASKED, jnp.float32),
        jnp.zeros((n_rows, n_kv, rows), jnp.float32),
        jnp.zeros((n_rows, n_kv, rows, width), jnp.float32),
    )
    _, _, total, out = lax.while_loop(lambda c: c[0] < n_trips, body, start)
    out = (out / total[..., None]).reshape(n_rows, n_kv, n_new, group, width)
    out = out.transpose(0, 2, 1, 3, 4)[:, :n_asked]
    return out.reshape(n_rows, n_asked, n_heads, width)

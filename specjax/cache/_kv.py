"""The full key/value cache, its write-ahead law and its capacity check.

The law: a forward pass writes its rows at ``[length, length + T)`` and does not
move ``length``; :func:`commit` moves it; rolling back is doing nothing. What lies
beyond ``length`` is never attended, so rejected rows need no erasing. Sliding
windows are a mask over the same full cache: a ring of exactly ``window`` slots
would let a rejected row overwrite a key that is still inside the window.
"""

import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from specjax.ops.gather_path import gather_path as move_path
from specjax.ops.write_rows import write_rows
from specjax.typing import Array, Float, Int

# Slots that a copy of a row moves at once.
_COPY_BLOCK = 256


class LayerKV(NamedTuple):
    """One layer's keys and values.

    The width is minor and slots come next, so that a head's keys are one
    contiguous matrix and attention needs no transposes.
    """

    keys: Float[Array, "B K S M"]
    values: Float[Array, "B K S M"]


class KVCache(flax.struct.PyTreeNode, kw_only=True):
    """Keys and values of every layer, and how much of each row is committed.

    Attributes:
      layers: one LayerKV a layer.
      length: committed tokens of each row that are in the cache, [B] int32. The
        row's pending token is not among them.
      capacity: most tokens a row may hold; static. The arrays are longer than
        this, by padding that only prefill's last bucket and rejected rows touch.
    """

    layers: tuple[LayerKV, ...]
    length: Int[Array, " B"]
    capacity: int = flax.struct.field(pytree_node=False)


def init_cache(
    *,
    batch: int,
    capacity: int,
    n_layers: int,
    n_kv_heads: int,
    head_width: int,
    dtype: jnp.dtype,
    block: int,
    slack: int,
) -> KVCache:
    """Makes an empty cache.

    Args:
      batch: rows.
      capacity: most tokens a row may hold.
      n_layers: layers.
      n_kv_heads: key/value heads a layer.
      head_width: width of a head.
      dtype: of keys and values.
      block: the slot count is rounded up to a multiple of this.
      slack: slots kept beyond the capacity, for a prefill bucket's padding.

    Returns:
      A cache of zeros with length 0.

    Raises:
      ValueError: batch or capacity is below 1.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"{batch=} and {capacity=} must be at least 1.")
    slots = -(-(capacity + slack) // block) * block
    shape = (batch, n_kv_heads, slots, head_width)
    layers = tuple(
        LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        for _ in range(n_layers)
    )
    return KVCache(
        layers=layers, length=jnp.zeros((batch,), jnp.int32), capacity=capacity
    )


def write(
    layer: LayerKV,
    keys: Float[Array, "R T K M"],
    values: Float[Array, "R T K M"],
    length: Int[Array, " R"],
    row: Int[Array, ""] | None = None,
) -> LayerKV:
    """Writes a pass's rows at ``[length, length + T)`` of each addressed row.

    The caller guarantees ``length + T`` within the slots (``check_capacity``
    before the first token, ``n_valid`` near the end): a slice update past the end
    would be moved back by JAX over committed entries.

    Args:
      layer: the layer's cache.
      keys: new keys.
      values: new values.
      length: committed tokens of each addressed row.
      row: the one batch row addressed (then R is 1), or None for the whole batch.

    Returns:
      The layer's cache with the rows written.
    """
    return LayerKV(*write_rows(*layer, keys, values, length, row))


def commit(cache: KVCache, n: Int[Array, " B"]) -> KVCache:
    """Moves each row's length forward by ``n`` of the rows just written."""
    return cache.replace(length=cache.length + n)


def gather_path(cache: KVCache, path: Int[Array, "B D"], n_nodes: int) -> KVCache:
    """Moves a pass's kept nodes to where a chain of them would stand.

    Of a pass that wrote a tree behind the length (the pending token, then the nodes),
    node ``path[b, i]`` goes to slot length + 1 + i. Whole rows move, in place, and
    nothing but the pass's own slots is touched.

    Args:
      cache: after the pass, its lengths not yet moved.
      path: nodes kept, from the top down; what stands at -1 entries is of no interest.
      n_nodes: of the pass.

    Returns:
      The cache; a commit of the path's length and one makes the path part of the text.
    """
    if not path.shape[1]:
        return cache
    moved = move_path(cache.layers, cache.length + 1, path, n_nodes)
    return cache.replace(layers=moved)


def copy_row(
    cache: KVCache,
    source: Int[Array, ""],
    row: Int[Array, ""],
    length: Int[Array, ""],
) -> KVCache:
    """Makes a row hold the first ``length`` tokens that another row holds.

    Copies block by block what the length covers, in place; length 0 copies nothing and
    empties the row.

    Args:
      cache: the cache.
      source: row that was filled with those tokens; what follows them there is
        beyond the length here.
      row: row to fill.
      length: committed tokens it has afterwards.

    Returns:
      The cache.
    """
    slots = cache.layers[0].keys.shape[2] if cache.layers else 0
    # A divisor of the slots, so that no block reaches beyond them and is moved back. A
    # cache without layers (a table of laws as the target) has only its lengths.
    size = math.gcd(slots, _COPY_BLOCK)

    def body(i: Array, layers: tuple[LayerKV, ...]) -> tuple[LayerKV, ...]:
        def copy(x: Array) -> Array:
            block = (1, x.shape[1], size, x.shape[3])
            piece = lax.dynamic_slice(x, (source, 0, i * size, 0), block)
            return lax.dynamic_update_slice(x, piece, (row, 0, i * size, 0))

        return jax.tree.map(copy, layers)

    n_blocks = (length + size - 1) // size
    layers = lax.fori_loop(0, n_blocks, body, cache.layers)
    return cache.replace(layers=layers, length=cache.length.at[row].set(length))


def reset_row(cache: KVCache, row: Int[Array, ""]) -> KVCache:
    """Empties one row, so that another sequence can be prefilled into it."""
    return cache.replace(length=cache.length.at[row].set(0))


def check_capacity(
    *, prompt_length: int, max_new_tokens: int, gamma: int, capacity: int
) -> None:
    """Checks that a request fits a row before any work is done for it.

    Args:
      prompt_length: tokens of the prompt.
      max_new_tokens: most tokens to generate.
      gamma: draft tokens a pass; a pass writes gamma + 1 rows ahead.
      capacity: tokens a row may hold.

    Raises:
      ValueError: the request does not fit; the message has the numbers.
    """
    need = prompt_length + max_new_tokens + gamma + 1
    if need > capacity:
        raise ValueError(
            f"The request needs {need} cache slots (prompt {prompt_length} + "
            f"max_new_tokens {max_new_tokens} + gamma {gamma} + 1) and a row holds "
            f"{capacity}. Shorten the prompt, ask for fewer tokens, or raise capacity "
            "where the model's context allows it."
        )

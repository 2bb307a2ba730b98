"""A target that is a table: compiles at once, and its sequences have a known law."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import CACHE_SLACK, Features, Target, TargetSpec
from specjax.testing.tiny import tiny_model
from specjax.typing import Array, Float, Int
from specjax.weights import Model


class TableCache(flax.struct.PyTreeNode, kw_only=True):
    """The tokens seen: a cache under the same laws as one of keys and values.

    Attributes:
      tokens: [B, S] int32; junk beyond the length.
      length: committed tokens that are in the cache. [B]
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]


def table_model(logits: np.ndarray, *, eos_ids: tuple[int, ...] = ()) -> Model:
    """Makes a model whose next token depends on the last two through a table.

    What it reads from its cache is the last token but one, so a cache that was rolled
    back wrongly changes its logits.

    Args:
      logits: of the next token, [V, V, V]: last but one, last, next. At a sequence's
        first token the last but one is token 0.
      eos_ids: ids that end a text.

    Returns:
      The model; its parameters are the table.
    """
    vocab_size = logits.shape[-1]
    host = tiny_model(vocab_size=vocab_size, eos_ids=eos_ids)
    return dataclasses.replace(
        host,
        name="table",
        target=_target(vocab_size),
        params={"table": jnp.asarray(logits, jnp.float32)},
    )


def sequence_law(
    laws: np.ndarray, prompt_ids: tuple[int, ...], n_tokens: int
) -> np.ndarray:
    """Returns the law of the tokens that follow a prompt of at least two.

    Args:
      laws: of the next token given the last two, float64 [V, V, V].
      prompt_ids: the prompt.
      n_tokens: tokens of a sequence.

    Returns:
      Probabilities, float64 [V] * n_tokens.
    """
    vocab_size = laws.shape[-1]
    law = laws[prompt_ids[-2], prompt_ids[-1]]
    if n_tokens == 1:
        return law
    pieces = [
        law[token] * sequence_law(laws, (prompt_ids[-1], token), n_tokens - 1)
        for token in range(vocab_size)
    ]
    return np.stack(pieces)


def _target(vocab_size: int) -> Target:
    def init_cache(batch: int, capacity: int) -> TableCache:
        return TableCache(
            tokens=jnp.zeros((batch, capacity + CACHE_SLACK), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def forward(params, tokens, cache, *, row=None, with_logits=True, layout=None):
        rows = jnp.arange(tokens.shape[0]) if row is None else row[None]
        position = cache.length[rows][:, None] + jnp.arange(tokens.shape[1])[None, :]
        stored = cache.tokens.at[rows[:, None], position].set(tokens)
        own, position = stored[rows], position - 1
        before = jnp.take_along_axis(own, jnp.maximum(position, 0), axis=1)
        before = jnp.where(position < 0, 0, before)
        if layout is not None:
            # The last of the others that a row sees is the one it follows.
            size = tokens.shape[1]
            mask = jnp.broadcast_to(layout.mask, (*tokens.shape, size))
            others = mask & ~jnp.eye(size, dtype=bool)[None]
            index = jnp.arange(size)[None, None, :]
            follows = jnp.max(jnp.where(others, index, -1), axis=-1)
            inside = jnp.take_along_axis(tokens, jnp.maximum(follows, 0), axis=1)
            # One that sees no other follows the committed text.
            before = jnp.where(follows >= 0, inside, before[:, :1])
        logits: Float[Array, "R T V"] | None = None
        if with_logits:
            logits = params["table"][before, tokens]
        last = jnp.zeros((*tokens.shape, 1), jnp.float32)
        return logits, Features(taps=(), last=last), cache.replace(tokens=stored)

    def commit(cache: TableCache, n: Int[Array, " B"]) -> TableCache:
        return cache.replace(length=cache.length + n)

    def reset_row(cache: TableCache, row: Int[Array, ""]) -> TableCache:
        return cache.replace(length=cache.length.at[row].set(0))

    def gather_path(cache: TableCache, path: Array, n_nodes: int) -> TableCache:
        first = cache.length[:, None] + 1
        kept = jnp.take_along_axis(cache.tokens, first + jnp.maximum(path, 0), axis=1)
        at = first + jnp.arange(path.shape[1])[None, :]
        rows = jnp.arange(path.shape[0])[:, None]
        return cache.replace(tokens=cache.tokens.at[rows, at].set(kept))

    def copy_row(cache, source, row, length):
        return jax.tree.map(lambda x: x.at[row].set(x[source]), cache).replace(
            length=cache.length.at[row].set(length)
        )

    # A token of it is one number, whatever the table: tables share their caches.
    spec = TargetSpec(vocab_size, max_context=512, width=1, cache_shape=(1,))
    functions = init_cache, forward, commit, reset_row, copy_row
    return Target(spec, *functions, gather_path=gather_path)

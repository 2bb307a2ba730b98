"""Token recycling: what the target last found most probable after each token.

Reference: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large
Language Models with Token Recycling", arXiv:2408.08696. Every row of a pass, kept or
rejected, says what the target expects after its token; a draft walks from the pending
token along the latest such answers.
"""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    check_gamma,
    n_wanted,
    pending_token,
)
from specjax.typing import Array, Int


@functools.cache
def token_recycling(vocab_size: int, gamma: int = 4) -> Drafter:
    """Proposes the target's latest answer to each token, one after the other.

    A token that no pass of this row has met is answered by what last followed it in the
    row's text, then by the drafter's parameters (``successor_table``), if it has any;
    where none knows it the draft ends. Rows learn from themselves alone, so that a
    row's drafts do not depend on its neighbours.

    Args:
      vocab_size: of the target.
      gamma: draft tokens a pass.

    Returns:
      The drafter; its parameters are None or an int32 [V] table with -1 for unknown,
      its state is one such table a row. Equal calls give the identical drafter.

    Raises:
      ValueError: a size is out of range.
    """
    check_gamma(gamma)
    if vocab_size < 1:
        raise ValueError(f"{vocab_size=} must be at least 1.")

    def init(batch: int, capacity: int) -> Int[Array, "B V"]:
        return jnp.full((batch, vocab_size), -1, jnp.int32)

    def reset_row(state: Array, row: Array) -> Array:
        return state.at[row].set(-1)

    def propose(params: Array | None, state: Array, context: DraftContext):
        most = n_wanted(context, gamma)
        find = functools.partial(_walk, start=params, gamma=gamma)
        tokens, n_known = jax.vmap(find)(
            pending_token(context)[:, 0], state, context.history, context.length
        )
        return Proposal(tokens, None, jnp.minimum(n_known, most)), state

    def commit(params: Array | None, state: Array, context: DraftContext) -> Array:
        assert context.scored is not None
        tokens, n_rows, top = context.scored
        rows = jnp.arange(tokens.shape[0])
        # One row of the pass after the other: a token met twice keeps its last answer.
        for i in range(tokens.shape[1]):
            at = jnp.where(i < n_rows, tokens[:, i], vocab_size)
            state = state.at[rows, at].set(top[:, i, 0], mode="drop")
        return state

    return Drafter(
        spec=DrafterSpec(name="token_recycling", gamma=gamma, n_top=1),
        init=init,
        prefill=lambda params, state, row, tokens, n_real, features: state,
        reset_row=reset_row,
        propose=propose,
        commit=commit,
        # Prompts teach nothing: what there is to copy is an empty table.
        copy_row=lambda state, source, row, length: reset_row(state, row),
    )


def successor_table(
    documents: Iterable[Sequence[int]], vocab_size: int
) -> Int[np.ndarray, " V"]:
    """Finds what most often follows each token, as parameters of ``token_recycling``.

    Args:
      documents: ids of some texts, best the target's own outputs.
      vocab_size: of the target.

    Returns:
      int32 [V]; -1 for tokens that nothing follows, the lowest id of equally many.

    Raises:
      ValueError: an id is outside the vocabulary.
    """
    pairs = [np.empty((2, 0), np.int64)]
    for i, document in enumerate(documents):
        ids = np.asarray(document, np.int64)
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        if bad.size:
            raise ValueError(
                f"document {i} holds id {bad[0]}, outside the vocabulary of "
                f"{vocab_size}; it was made with another tokenizer."
            )
        pairs.append(np.stack([ids[:-1], ids[1:]]) if ids.size > 1 else pairs[0])
    first, second = np.concatenate(pairs, axis=1)
    both, counts = np.unique(first * vocab_size + second, return_counts=True)
    # Of equal counts the last in this order is written last.
    order = np.lexsort((-both, counts))
    table = np.full((vocab_size,), -1, np.int32)
    table[both[order] // vocab_size] = both[order] % vocab_size
    return table


def _walk(
    pending: Int[Array, ""],
    table: Int[Array, " V"],
    history: Int[Array, " L"],
    length: Int[Array, ""],
    *,
    start: Int[Array, " V"] | None,
    gamma: int,
) -> tuple[Int[Array, " G"], Int[Array, ""]]:
    """Walks from one row's pending token; returns the draft and how far it is known."""
    index = jnp.arange(history.shape[0])

    def step(token: Array, _: None) -> tuple[Array, Array]:
        known = jnp.maximum(token, 0)
        last = jnp.max(jnp.where((history == token) & (index < length - 1), index, -1))
        seen = jnp.where(last < 0, -1, history[last + 1])
        found = jnp.where(table[known] >= 0, table[known], seen)
        if start is not None:
            found = jnp.where(found >= 0, found, start[known])
        found = jnp.where(token >= 0, found, -1).astype(jnp.int32)
        return found, found

    _, tokens = lax.scan(step, pending.astype(jnp.int32), None, length=gamma)
    n_known = jnp.sum(jnp.cumprod((tokens >= 0).astype(jnp.int32)))
    return jnp.maximum(tokens, 0), n_known

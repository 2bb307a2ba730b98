"""Token recycling: what the target last found most probable after each token.

Reference: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large
Language Models with Token Recycling", arXiv:2408.08696. Every row of a pass, kept or
rejected, says what the target expects after its token; a draft walks from the pending
token along the latest such answers, or along the best few as a tree.
"""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    check_gamma,
    n_wanted,
    pending_token,
)
from specjax.trees import Topology, chain
from specjax.typing import Array, Int


@functools.cache
def token_recycling(vocab_size: int, shape: int | Topology = 4) -> Drafter:
    """Proposes the target's latest answers to each token, one after the other.

    A token that no pass of this row has met is answered by what last followed it in the
    row's text, then by the drafter's parameters (``successor_table``), if it has any;
    where none knows it the draft ends. Rows learn from themselves alone, so that a
    row's drafts do not depend on its neighbours.

    Args:
      vocab_size: of the target.
      shape: draft tokens a pass as a chain; or a tree, in which a child of rank r is
        the token that was r-th most probable (``trees.sequoia`` makes good ones of
        how often each rank is right).

    Returns:
      The drafter; its parameters are None or an int32 [V] table with -1 for unknown,
      its state holds int32 [B, V, K], the K best answers to each token. Equal calls
      give the identical drafter.

    Raises:
      ValueError: a size is out of range.
    """
    if not isinstance(shape, Topology):
        check_gamma(shape)
    tree = shape if isinstance(shape, Topology) else chain(shape)
    gamma = tree.n_nodes
    check_gamma(gamma)
    width = 1 + max(tree.ranks)
    if not width <= vocab_size:
        raise ValueError(f"{vocab_size=} must be at least {width}, a node's children.")

    def init(batch: int, capacity: int) -> Int[Array, "B V K"]:
        return jnp.full((batch, vocab_size, width), -1, jnp.int32)

    def reset_row(state: Array, row: Array) -> Array:
        return state.at[row].set(-1)

    def propose(params: Array | None, state: Array, context: DraftContext):
        most = n_wanted(context, gamma)
        find = functools.partial(_walk, start=params, tree=tree)
        tokens = jax.vmap(find)(
            pending_token(context)[:, 0], state, context.history, context.length
        )
        known = tokens >= 0
        # A chain ends where nothing is known. In a tree what is not known is filled.
        n_known = jnp.sum(jnp.cumprod(known.astype(jnp.int32), axis=1), axis=1)
        parents = None
        if not tree.is_chain:
            n_known = jnp.where(jnp.any(known, axis=1), gamma, 0)
            parents = jnp.broadcast_to(jnp.asarray(tree.parents), tokens.shape)
        n_valid = jnp.minimum(n_known, most)
        tokens = jnp.maximum(tokens, 0)
        return Proposal(tokens, None, n_valid, parents=parents), state

    def commit(params: Array | None, state: Array, context: DraftContext) -> Array:
        assert context.scored is not None
        tokens, n_rows, top = context.scored
        rows = jnp.arange(tokens.shape[0])
        # One row of the pass after the other: a token met twice keeps its last answer.
        for i in range(tokens.shape[1]):
            at = jnp.where(i < n_rows, tokens[:, i], vocab_size)
            state = state.at[rows, at].set(top[:, i, :width], mode="drop")
        return state

    return Drafter(
        spec=DrafterSpec(
            name="token_recycling",
            gamma=gamma,
            n_top=width,
            depth=0 if tree.is_chain else tree.max_depth,
            topology=None if tree.is_chain else tree,
        ),
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
    table: Int[Array, "V K"],
    history: Int[Array, " L"],
    length: Int[Array, ""],
    *,
    start: Int[Array, " V"] | None,
    tree: Topology,
) -> Int[Array, " N"]:
    """Walks from one row's pending token, level by level; -1 where nothing is known."""
    index = jnp.arange(history.shape[0])
    tokens = jnp.full((tree.n_nodes + 1,), -1, jnp.int32).at[0].set(pending)
    parents, ranks = np.asarray(tree.parents), np.asarray(tree.ranks)
    for level in tree.levels:
        nodes = np.asarray(level)
        before = tokens[parents[nodes] + 1]
        known = jnp.maximum(before, 0)
        same = (history[None, :] == before[:, None]) & (index < length - 1)[None, :]
        last = jnp.max(jnp.where(same, index[None, :], -1), axis=1)
        # What the text or the parameters know is one answer: the first.
        other = jnp.where(last < 0, -1, history[last + 1])
        if start is not None:
            other = jnp.where(other >= 0, other, start[known])
        other = jnp.where(ranks[nodes] == 0, other, -1)
        found = table[known, ranks[nodes]]
        found = jnp.where(found >= 0, found, other)
        found = jnp.where(before >= 0, found, -1).astype(jnp.int32)
        tokens = tokens.at[nodes + 1].set(found)
    return tokens[1:]

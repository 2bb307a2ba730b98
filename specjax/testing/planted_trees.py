"""Drafters of trees with a planted behaviour; see ``planted``."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.drafters import (
    BoundDrafter,
    DraftContext,
    DrafterSpec,
    Proposal,
    pending_token,
    stateless,
)
from specjax.testing.planted import follow, history_hash, known_texts, scramble
from specjax.trees import Topology, tree_arrays
from specjax.typing import Array, Float, Params

# A stream of the request's seed that no part of the library uses.
_STREAM = 0x74726565


def grown(
    tree: Topology | int, vocab_size: int, texts: Sequence[Sequence[int]]
) -> BoundDrafter:
    """Plants a drafter of trees, right here and there.

    Each node is right for its depth or some token, by a hash of the history, and so is
    how many nodes count: random accept patterns that every batch repeats. Siblings
    may be the same token.

    Args:
      tree: its shape; or a number of nodes, for trees whose shape is by hash as well.
      vocab_size: ids of the target.
      texts: whole sequences, prompt and what the target makes of it.

    Returns:
      The drafter.
    """
    return BoundDrafter(_grown(tree, vocab_size), known_texts(texts))


def drawn(
    tree: Topology,
    table: Float[Array, "V V"],
    *,
    siblings: Literal["iid", "without_replacement"],
) -> BoundDrafter:
    """Plants a drafter that draws a node's children from a table's row of its token.

    Args:
      tree: its shape.
      table: log-probabilities of the next token given the last.
      siblings: how those of one node are drawn.

    Returns:
      The drafter.
    """
    params = {"table": jnp.asarray(table, jnp.float32)}
    return BoundDrafter(_drawn(tree, siblings), params)


@functools.cache
def _grown(tree: Topology | int, vocab_size: int):
    topology = tree if isinstance(tree, Topology) else None
    size = tree.n_nodes if isinstance(tree, Topology) else tree
    spec = DrafterSpec(
        name="planted_tree",
        gamma=size,
        depth=size if topology is None else topology.max_depth,
        topology=topology,
    )

    def propose(params: Params, context: DraftContext) -> Proposal:
        bits = history_hash(context)[:, None]
        node = jnp.arange(size, dtype=jnp.uint32)[None, :]
        noise = scramble(bits + node)
        if topology is not None:
            parents = jnp.broadcast_to(jnp.asarray(topology.parents), noise.shape)
        else:
            # Mostly the node before: deep trees, so that something is accepted.
            other = scramble(noise) % (node + 1)
            before = jnp.where(noise % 4 < 2, node, other)
            parents = before.astype(jnp.int32) - 1
        depth = tree_arrays(parents).depth
        ahead, n_known = follow(
            params["texts"], context.history, context.length, spec.n_levels
        )
        truth = jnp.take_along_axis(ahead, depth - 1, axis=1)
        some = (noise >> 8) % jnp.uint32(vocab_size)
        right = (noise % 3 > 0) & (depth <= n_known[:, None])
        tokens = jnp.where(right, truth, some.astype(jnp.int32))
        n_valid = (scramble(bits[:, 0]) % jnp.uint32(2 * size)).astype(jnp.int32)
        n_valid = jnp.minimum(n_valid, size)
        return Proposal(tokens, None, n_valid, parents=parents)

    return stateless(spec, propose)


@functools.cache
def _drawn(tree: Topology, siblings: str):
    draws = "sample" if siblings == "iid" else "without_replacement"
    spec = DrafterSpec(
        name=f"planted_{siblings}",
        gamma=tree.n_nodes,
        draws=draws,
        depth=tree.max_depth,
        topology=tree,
    )

    def row(pending: Array, key: Array, table: Array) -> tuple[Array, Array]:
        keys = jax.random.split(key, tree.n_nodes + 1)
        tokens = jnp.zeros((tree.n_nodes + 1,), jnp.int32).at[0].set(pending)
        for above, children in enumerate(tree.children):
            law = table[tokens[above]]
            for child in children:
                drawn = jax.random.categorical(keys[child], law).astype(jnp.int32)
                tokens = tokens.at[child + 1].set(drawn)
                if siblings != "iid":
                    law = law.at[drawn].set(-jnp.inf)
        # Laws by row of the pass; the last node has no children.
        return tokens[1:], table[tokens[:-1]]

    def propose(params: Params, context: DraftContext) -> Proposal:
        def key(seed: Array, length: Array) -> Array:
            start = jax.random.fold_in(jax.random.key(seed), _STREAM)
            return jax.random.fold_in(start, length)

        keys = jax.vmap(key)(context.settings.seed, context.length)
        draw = functools.partial(row, table=params["table"])
        tokens, laws = jax.vmap(draw)(pending_token(context)[:, 0], keys)
        n_valid = jnp.full(tokens.shape[:1], tree.n_nodes, jnp.int32)
        parents = jnp.broadcast_to(jnp.asarray(tree.parents), tokens.shape)
        return Proposal(tokens, laws, n_valid, parents=parents)

    return stateless(spec, propose)

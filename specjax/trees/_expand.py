"""Dynamic trees, grown level by level with fixed shapes.

Reference: Li et al., EAGLE-2, 2024, arXiv:2406.16858, section 4. The children of a node
are its likeliest tokens, not draws, so a draft is a point mass to the rules.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.trees._arrays import ROOT, TreeArrays
from specjax.trees._best import best_n
from specjax.trees._check import whole
from specjax.typing import Array, Bool, Float, Int


class Children(NamedTuple):
    """Proposed children of K nodes, W each, the likeliest first.

    Attributes:
      tokens: distinct among the children of a node. int32 [*B, K, W]
      logprobs: draft log-probabilities given the node's path (natural log), -inf for
        none. float32 [*B, K, W]
    """

    tokens: Int[Array, "*B K W"]
    logprobs: Float[Array, "*B K W"]


class Frontier(NamedTuple):
    """The nodes of a level that are grown further, K a row, in candidate order.

    Attributes:
      tokens: of the nodes. int32 [*B, K]
      scores: log-probabilities of their paths, -inf where there is no node. [*B, K]
      parent: place of each node's parent in the frontier before; 0 in the first.
        int32 [*B, K]
      candidate: number of each node among the ``Candidates``. int32 [*B, K]
      attends: rows of the frontiers so far that a node attends, itself included: row
        (level - 1) * K + place. bool [*B, K, (depth - 1) * K]
      level: depth of the nodes, 1 for the first frontier. int32 []
      n_candidates: candidates so far. int32 []
    """

    tokens: Int[Array, "*B K"]
    scores: Float[Array, "*B K"]
    parent: Int[Array, "*B K"]
    candidate: Int[Array, "*B K"]
    attends: Bool[Array, "*B K R"]
    level: Int[Array, ""]
    n_candidates: Int[Array, ""]


class Candidates(NamedTuple):
    """All nodes that were looked at, level by level; -inf scores are none.

    Attributes:
      tokens: int32 [*B, C]
      scores: log-probabilities of the paths, never growing along them. float32 [*B, C]
      parents: number of the candidate that each follows, -1 for the first level.
        int32 [*B, C]
      ranks: of each among its siblings, 0 the likeliest. int32 [*B, C]
    """

    tokens: Int[Array, "*B C"]
    scores: Float[Array, "*B C"]
    parents: Int[Array, "*B C"]
    ranks: Int[Array, "*B C"]


class DraftTree(NamedTuple):
    """A draft tree and its tokens.

    Attributes:
      tree: its shape.
      tokens: of the nodes, distinct among siblings; 0 for padding. int32 [*B, N]
      scores: log-probabilities of the paths (natural log), -inf for padding. [*B, N]
      ranks: of the nodes among the siblings that were looked at. int32 [*B, N]
    """

    tree: TreeArrays
    tokens: Int[Array, "*B N"]
    scores: Float[Array, "*B N"]
    ranks: Int[Array, "*B N"]


def top_children(logprobs: Float[Array, "*B K V"], width: int) -> Children:
    """Takes the likeliest tokens after each node.

    Args:
      logprobs: draft log-probabilities (natural log), [*B, K, V].
      width: children a node, at most V.

    Returns:
      Children, W = width; of equally likely tokens those of lower id.

    Raises:
      ValueError: the width is out of range.
    """
    width = whole("width", width, least=1, remedy="It counts children of a node.")
    if width > logprobs.shape[-1]:
        raise ValueError(
            f"{width=} exceeds the {logprobs.shape[-1]} tokens there are; lower it."
        )
    # lax.top_k would put nan first.
    logprobs = jnp.where(jnp.isnan(logprobs), -jnp.inf, logprobs.astype(jnp.float32))
    values, tokens = lax.top_k(logprobs, width)
    return Children(tokens.astype(jnp.int32), values)


def expand[State](
    root: Children,
    children: Callable[[State, Frontier], tuple[Children, State]],
    state: State,
    *,
    beam: int,
    depth: int,
) -> tuple[Candidates, State]:
    """Grows a tree: of each level's candidates the best ``beam`` get children.

    A candidate scores its parent's score plus its own log-probability. Of equal ones
    the lower rank goes first, then the earlier parent. ``children`` is traced once
    and called for frontiers of depth 1 to depth - 1, with equal shapes.

    Args:
      root: children of the pending token, K = 1: [*B, 1, W].
      children: (state, frontier) -> (children [*B, beam, W], state), for instance a
        draft model's pass over the frontier's tokens: it writes its keys and values
        behind those of the frontiers before and attends ``frontier.attends``.
      state: what ``children`` carries; a pytree of fixed shapes.
      beam: nodes of a level that are grown, K.
      depth: levels; the longest path.

    Returns:
      All candidates, C = W + (depth - 1) * beam * W, and the last state.

    Raises:
      ValueError: ``beam`` or ``depth`` is below 1, or ``root`` is not of one node.

    References:
      EAGLE-2, arXiv:2406.16858, section 4.1; there beam = W.
    """
    beam = whole("beam", beam, least=1, remedy="It counts nodes grown a level.")
    depth = whole("depth", depth, least=1, remedy="It counts levels.")
    if root.tokens.shape[-2] != 1:
        raise ValueError(
            f"root has children of {root.tokens.shape[-2]} nodes, shape "
            f"{root.tokens.shape}; those of the pending token alone are needed: "
            "[*B, 1, W]."
        )
    before = _pending(root.tokens.shape[:-2], n_rows=(depth - 1) * beam)
    first, frontier = _next_level(before, root, beam)
    if depth == 1:
        return first, state

    def grow(carry: tuple[State, Frontier], _: None):
        state, frontier = carry
        proposed, state = children(state, frontier)
        candidates, frontier = _next_level(frontier, proposed, beam)
        return (state, frontier), candidates

    (state, _), levels = lax.scan(grow, (state, frontier), length=depth - 1)
    return jax.tree.map(_join, first, levels), state


def rerank(
    candidates: Candidates,
    n: int,
    *,
    limit: Int[Array, "*B"] | None = None,
    max_depth: int | None = None,
) -> DraftTree:
    """Keeps the best n candidates as the tree to verify.

    Args:
      candidates: as ``expand`` gives them.
      n: node budget; static.
      limit: most nodes of each row where that is less, [*B].
      max_depth: no candidate is deeper; saves work. None is C.

    Returns:
      The tree; of equally likely nodes the shallower, then those of lower rank.

    References:
      EAGLE-2, arXiv:2406.16858, section 4.2.
    """
    scores, parents, ranks = candidates.scores, candidates.parents, candidates.ranks
    best = best_n(scores, parents, n, ranks=ranks, limit=limit, max_depth=max_depth)
    valid = best.tree.valid
    take = lambda x: jnp.where(valid, jnp.take_along_axis(x, best.index, axis=-1), 0)
    return DraftTree(best.tree, take(candidates.tokens), best.scores, take(ranks))


def best_n_marginals(
    logprobs: Float[Array, "*B D V"],
    n: int,
    *,
    width: int | None = None,
    limit: Int[Array, "*B"] | None = None,
) -> DraftTree:
    """Finds the n likeliest prefixes under one law per depth.

    For drafters that predict all positions at once, each without knowing the tokens
    before it: a path has the product of its positions' probabilities. Level by level
    the n best prefixes are kept, then the n best over all levels: each ancestor of
    one of the n best nodes is itself among them, so nothing is lost, and the result
    is that of a best-first search.

    Args:
      logprobs: log-probabilities of the token at each depth (natural log), [*B, D, V].
      n: node budget; static.
      width: children a node, at most; None is as many as can matter, min(n, V).
      limit: most nodes of each row where that is less than ``n``, [*B].

    Returns:
      The tree; of equally likely nodes the shallower, then those of lower rank.

    Raises:
      ValueError: ``n`` or ``width`` is below 1, or the width exceeds V.

    References:
      DDTree, 2026, arXiv:2604.12989, there with a heap.
    """
    n = whole("n", n, least=1, remedy="It counts nodes of the tree.")
    if width is None:
        width = min(n, logprobs.shape[-1])
    top = top_children(logprobs, width)
    *batch, depth, _ = logprobs.shape
    by_depth = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), top)

    def grow(carry, level: Children):
        scores, start = carry
        logprobs = jnp.minimum(level.logprobs, 0)
        slot, rank, best = _best_children(scores[..., None] + logprobs[..., None, :], n)
        candidates = Candidates(
            tokens=jnp.take_along_axis(level.tokens, rank, axis=-1),
            scores=best,
            parents=jnp.where(start >= 0, start + slot, ROOT),
            ranks=rank,
        )
        return (best, jnp.where(start >= 0, start + n, 0)), candidates

    # The root is a level of one node; the others of the n are none.
    root = jnp.where(jnp.arange(n) == 0, 0.0, -jnp.inf)
    root = jnp.broadcast_to(root.astype(jnp.float32), (*batch, n))
    _, levels = lax.scan(grow, (root, jnp.int32(ROOT)), by_depth)
    candidates = Candidates(*(_flat_levels(x) for x in levels))
    return rerank(candidates, n, limit=limit, max_depth=depth)


def _pending(batch: tuple[int, ...], n_rows: int) -> Frontier:
    """Makes the frontier before the first: the pending token."""
    one = (*batch, 1)
    return Frontier(
        tokens=jnp.zeros(one, jnp.int32),
        scores=jnp.zeros(one, jnp.float32),
        parent=jnp.zeros(one, jnp.int32),
        candidate=jnp.full(one, ROOT, jnp.int32),
        attends=jnp.zeros((*one, n_rows), bool),
        level=jnp.int32(0),
        n_candidates=jnp.int32(0),
    )


def _next_level(
    frontier: Frontier, children: Children, beam: int
) -> tuple[Candidates, Frontier]:
    """Scores a frontier's children and picks the next frontier.

    Args:
      frontier: K nodes.
      children: theirs.
      beam: nodes of the next frontier.

    Returns:
      The children as candidates, node by node and rank by rank, K * W of them, and
      the best ``beam``, in this order, of which those with score -inf are none.
    """
    *batch, n_nodes, width = children.tokens.shape
    logprobs = children.logprobs.astype(jnp.float32)
    # Not above 0, that no child outscores its parent.
    logprobs = jnp.where(jnp.isnan(logprobs), -jnp.inf, jnp.minimum(logprobs, 0))
    scores = frontier.scores[..., None] + logprobs
    slot, rank, best = _best_children(scores, beam)
    at = slot * width + rank
    flat = lambda x: x.reshape(*batch, n_nodes * width)
    number = jnp.arange(n_nodes * width, dtype=jnp.int32)
    row = frontier.level * beam + jnp.arange(beam)
    own = jnp.arange(frontier.attends.shape[-1]) == row[:, None]
    above = jnp.take_along_axis(frontier.attends, slot[..., None], axis=-2)
    candidates = Candidates(
        tokens=flat(children.tokens.astype(jnp.int32)),
        scores=flat(scores),
        parents=jnp.repeat(frontier.candidate, width, axis=-1),
        ranks=jnp.broadcast_to(number % width, (*batch, n_nodes * width)),
    )
    chosen = Frontier(
        tokens=jnp.take_along_axis(candidates.tokens, at, axis=-1),
        scores=best,
        parent=slot,
        candidate=frontier.n_candidates + at,
        attends=above | own,
        level=frontier.level + 1,
        n_candidates=frontier.n_candidates + n_nodes * width,
    )
    return candidates, chosen


def _best_children(
    scores: Float[Array, "*B K W"], beam: int
) -> tuple[Int[Array, "*B N"], Int[Array, "*B N"], Float[Array, "*B N"]]:
    """Picks the best of a level: by score, then rank, then parent.

    Returns:
      Parent's place, rank and score of N = ``beam`` children, ordered by parent and
      rank; -inf scores fill up where there are fewer.
    """
    n_nodes, width = scores.shape[-2:]
    size = n_nodes * width
    # Rank-major: of equal ones top_k takes the first.
    by_rank = jnp.swapaxes(scores, -1, -2).reshape(*scores.shape[:-2], size)
    missing = [(0, 0)] * (by_rank.ndim - 1) + [(0, max(beam - size, 0))]
    by_rank = jnp.pad(by_rank, missing, constant_values=-jnp.inf)
    at = lax.top_k(by_rank, beam)[1]
    number = jnp.where(at < size, at % n_nodes * width + at // n_nodes, size)
    number = jnp.sort(number, axis=-1)
    read = jnp.minimum(number, size - 1)
    flat = scores.reshape(*scores.shape[:-2], size)
    best = jnp.take_along_axis(flat, read, axis=-1)
    return read // width, read % width, jnp.where(number < size, best, -jnp.inf)


def _join(first: Array, levels: Array) -> Array:
    """Puts the first level before the others, [*B, W] and [depth - 1, *B, K * W]."""
    return jnp.concatenate([first, _flat_levels(levels)], axis=-1)


def _flat_levels(levels: Array) -> Array:
    """Lays levels side by side, [L, *B, C] to [*B, L * C]."""
    moved = jnp.moveaxis(levels, 0, -2)
    return moved.reshape(*moved.shape[:-2], -1)

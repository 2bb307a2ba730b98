"""The best n nodes of a scored candidate tree, on the device.

A candidate's score is nonincreasing along every path, as a path's log-probability is.
Then the n best candidates contain the ancestors of each of them, and of all such sets
of n they have the largest sum of path probabilities, the expected number of accepted
drafts. This one choice serves the nodes of a tree, the drafts of a chain, and, with
the chains or trees of all requests side by side as one forest, the rows of a batch
that a pass has room for.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.trees._arrays import ROOT, TreeArrays, along_paths, tree_arrays
from specjax.typing import Array, Bool, Float, Int


class Best(NamedTuple):
    """Kept candidates as a tree.

    Attributes:
      tree: the kept nodes in the candidates' order.
      index: the candidate that each node is; 0 for padding, to be gathered with and
        masked by ``tree.valid``, never scattered with. int32 [*B, N]
      scores: of each node, -inf for padding. float32 [*B, N]
    """

    tree: TreeArrays
    index: Int[Array, "*B N"]
    scores: Float[Array, "*B N"]


def best_n(
    scores: Float[Array, "*B C"],
    parents: Int[Array, "*#B C"],
    n: int,
    *,
    ranks: Int[Array, "*#B C"] | None = None,
    valid: Bool[Array, "*#B C"] | None = None,
    limit: Int[Array, "*#B"] | None = None,
    max_depth: int | None = None,
) -> Best:
    """Keeps the best n nodes of scored candidate trees, renumbered.

    ``keep_best`` says which they are. The output's law is exact where drafts are
    deterministic given the context, or kept for being the target's own draw. Which of
    several *sampled* siblings are kept must not depend on what was sampled: leaving
    out the unlikely ones changes the law that rejection rules divide by.

    Args:
      scores: log-probabilities of the candidates' paths (natural log), [*B, C].
      parents: below each candidate's own number; -1 follows the pending token.
        [*B, C], or [C] for all rows.
      n: node budget; static.
      ranks: as for ``keep_best``.
      valid: as for ``keep_best``.
      limit: most nodes of each row where that is less than ``n``, [*B].
      max_depth: as for ``keep_best``.

    Returns:
      The kept nodes, N = n, in the order of the candidates: parents first, and
      siblings in draft order where the candidates are.

    References:
      Li et al., EAGLE-2, 2024, arXiv:2406.16858, section 4.2 (reranking).
    """
    size = scores.shape[-1]
    order, depth, least = _order(scores, parents, ranks, valid, max_depth)
    n_nodes = jnp.minimum(jnp.sum(least > -jnp.inf, axis=-1, dtype=jnp.int32), n)
    if limit is not None:
        n_nodes = jnp.clip(limit, 0, n_nodes)
    best = _resized(order, n, size)
    chosen = jnp.where(jnp.arange(n) < n_nodes[..., None], best, size)
    above, index = _renumber(jnp.sort(chosen, axis=-1), parents, size)
    take = lambda x: jnp.take_along_axis(x, index, axis=-1)
    tree = TreeArrays(above, take(depth), n_nodes)
    valid = tree.valid
    return Best(
        tree._replace(depth=jnp.where(valid, tree.depth, 0)),
        index,
        jnp.where(valid, take(scores.astype(jnp.float32)), -jnp.inf),
    )


def keep_best(
    scores: Float[Array, "*B C"],
    parents: Int[Array, "*#B C"],
    n: int | Int[Array, "*#B"],
    *,
    ranks: Int[Array, "*#B C"] | None = None,
    valid: Bool[Array, "*#B C"] | None = None,
    max_depth: int | None = None,
) -> Bool[Array, "*B C"]:
    """Marks the best n nodes of scored candidate trees.

    The order is: higher score, then shallower, then lower rank, then lower number. A
    parent is shallower than its child and never scores lower, so what is kept holds
    all ancestors of its nodes. A candidate counts with the least score on its path,
    so that this is so whatever the scores are; log-probabilities are not changed by
    it. Scores of -inf or nan, and what lies below them, are never kept.

    Args:
      scores: nonincreasing along paths, [*B, C]: log-probabilities, or probabilities.
      parents: below each candidate's own number; -1 is a root. A forest is a tree
        here. [*B, C], or [C] for all rows.
      n: nodes to keep, static or of each row, [*B].
      ranks: of candidates among their siblings, [*B, C] or [C]; None where all are
        alike, as in chains.
      valid: candidates that count, [*B, C] or [C]; None is all.
      max_depth: no candidate is deeper; saves work. None is C.

    Returns:
      bool [*B, C], at most n of each row.
    """
    order, _, least = _order(scores, parents, ranks, valid, max_depth)
    place = jnp.argsort(order, axis=-1)
    return (place < jnp.asarray(n)[..., None]) & (least > -jnp.inf)


def take_nodes(
    keep: Bool[Array, "*B C"], parents: Int[Array, "*#B C"], n: int
) -> tuple[TreeArrays, Int[Array, "*B N"]]:
    """Makes trees of the marked candidates.

    Args:
      keep: marked ones; with a candidate its ancestors must be marked, and at most
        ``n`` of a row.
      parents: of the candidates, as for ``keep_best``.
      n: node budget; static.

    Returns:
      The trees, N = n, in the order of the candidates, and the candidate of each
      node, 0 for padding.
    """
    size = keep.shape[-1]
    chosen = jnp.sort(jnp.where(keep, jnp.arange(size), size), axis=-1)
    above, index = _renumber(_resized(chosen, n, size), parents, size)
    n_nodes = jnp.sum(keep, axis=-1, dtype=jnp.int32)
    return tree_arrays(above, n_nodes), index


def share_budget(
    survival: Float[Array, "B G"],
    budget: int | Int[Array, ""],
    n_valid: Int[Array, " B"] | None = None,
) -> Int[Array, " B"]:
    """Divides a batch's verification budget among its rows' draft chains.

    The drafts of largest survival are kept, over all rows; of equal ones the earlier
    positions, then the lower rows. Since survival never grows along a row, what is
    kept of each row is a prefix, and no other choice of ``budget`` drafts has more
    expected commits.

    Exact for sampled drafts as long as ``budget`` does not depend on this pass's
    drafts (static, or chosen from earlier passes) and a draft's confidence on nothing
    after it: whether draft j of a row is verified then depends neither on itself nor
    on what follows, since later ones rank below it. A budget that is chosen by looking
    at these survivals is not; it is under rules that keep a draft for being the
    target's own draw.

    Args:
      survival: of each draft, the estimated probability that it and all before it are
        accepted: the running product of confidences, in which the factor of draft j
        is known before draft j is drawn. Or its log. [B, G]
      budget: drafts that the pass has room for, over all rows.
      n_valid: drafts of each row that count, [B]; None is G.

    Returns:
      Drafts of each row to verify, [B] int32, at most ``budget`` together.

    References:
      DSpark, 2026, arXiv:2607.05147, its scheduler, here with a fixed budget in place
      of early stopping; TETRIS, 2025, arXiv:2502.15197, selects the same drafts.
    """
    batch, gamma = survival.shape
    # One forest: every row a chain. Position-major, so that of equal ones the earlier
    # positions come first whatever the order.
    flat = survival.T.reshape(gamma * batch)
    parents = jnp.arange(gamma * batch) - batch
    valid = None
    if n_valid is not None:
        valid = (jnp.arange(gamma)[:, None] < n_valid).reshape(gamma * batch)
    keep = keep_best(
        flat, jnp.maximum(parents, ROOT), budget, valid=valid, max_depth=gamma
    )
    return jnp.sum(keep.reshape(gamma, batch), axis=0, dtype=jnp.int32)


def _order(
    scores: Float[Array, "*B C"],
    parents: Int[Array, "*#B C"],
    ranks: Int[Array, "*#B C"] | None,
    valid: Bool[Array, "*#B C"] | None,
    max_depth: int | None,
) -> tuple[Int[Array, "*B C"], Int[Array, "*B C"], Float[Array, "*B C"]]:
    """Orders candidates as ``keep_best`` says.

    Returns:
      Their numbers, the best first; the depth of each; and the least score on its
      path, -inf for those that do not count.
    """
    shape = scores.shape
    parents = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), shape)
    good = ~jnp.isnan(scores)
    if valid is not None:
        good &= valid
    scores = jnp.where(good, scores.astype(jnp.float32), -jnp.inf)
    depth, least = along_paths(parents, scores, max_depth=max_depth)
    assert least is not None
    keys = [-least, depth]
    if ranks is not None:
        keys.append(jnp.broadcast_to(jnp.asarray(ranks, jnp.int32), shape))
    number = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)
    # Stable, so that the lower number comes first among what is equal.
    order = lax.sort([*keys, number], num_keys=len(keys), is_stable=True)[-1]
    return order, depth, least


def _resized(numbers: Int[Array, "*B C"], n: int, fill: int) -> Int[Array, "*B N"]:
    """Gives the first n numbers, filled up where there are fewer."""
    missing = max(n - numbers.shape[-1], 0)
    widths = [(0, 0)] * (numbers.ndim - 1) + [(0, missing)]
    return jnp.pad(numbers, widths, constant_values=fill)[..., :n]


def _renumber(
    chosen: Int[Array, "*B N"], parents: Int[Array, "*#B C"], size: int
) -> tuple[Int[Array, "*B N"], Int[Array, "*B N"]]:
    """Makes nodes of candidates.

    Args:
      chosen: their numbers, growing; ``size`` for padding.
      parents: of all candidates, among which the chosen ones' are chosen.
      size: number of candidates.

    Returns:
      The parent of each node among the nodes, and its candidate, 0 for padding.
    """
    valid = chosen < size
    index = jnp.where(valid, chosen, 0)
    parents = jnp.broadcast_to(
        jnp.asarray(parents, jnp.int32), (*chosen.shape[:-1], size)
    )
    above = jnp.take_along_axis(parents, index, axis=-1)
    place = jnp.argmax(chosen[..., None, :] == above[..., :, None], axis=-1)
    inner = valid & (above >= 0)
    return jnp.where(inner, place.astype(jnp.int32), ROOT), index

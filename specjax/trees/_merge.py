"""Trees of continuations that were found in text."""

import jax.numpy as jnp

from specjax.trees._arrays import ROOT
from specjax.trees._expand import Candidates, DraftTree, rerank
from specjax.typing import Array, Bool, Float, Int


def merge_continuations(
    tokens: Int[Array, "*B R G"],
    n: int,
    *,
    lengths: Int[Array, "*B R"] | None = None,
    weights: Float[Array, "*B R"] | None = None,
    limit: Int[Array, "*B"] | None = None,
) -> DraftTree:
    """Merges candidate continuations into a trie and keeps its best n nodes.

    Continuations that begin alike share nodes. A node's share C is its weight, that
    of the continuations through it, over the weight of all that go on after its
    parent; its score is log D, with D the product of C on its path: the probability
    that drafts are accepted if the shares are the truth. Fixed shapes, R^2 G
    comparisons a row.

    Args:
      tokens: continuations, the most recent first; a negative id ends one. [*B, R, G]
      n: node budget; static.
      lengths: tokens of each that count, [*B, R]; None is all up to a negative id.
      weights: of each, >= 0, [*B, R]; None counts each once. 0 leaves one out.
      limit: most nodes of each row where that is less than ``n``, [*B].

    Returns:
      The tree, level by level, siblings in the order of their first continuations;
      ``ranks`` orders them by weight, of equal ones in this order. Of equally likely
      nodes the shallower are kept, then those of lower rank.

    Differs from paper: REST ranks nodes by their count among all continuations, which
    is the same where none ends early.

    References:
      He et al., REST, 2023, arXiv:2311.08252, section 3.2; Oliaro et al.,
      SuffixDecoding, 2024, arXiv:2411.04975, the scores C and D.
    """
    *batch, n_found, gamma = tokens.shape
    tokens = tokens.astype(jnp.int32)
    going = jnp.cumsum(tokens < 0, axis=-1) == 0
    if lengths is not None:
        going &= jnp.arange(gamma) < lengths[..., None]
    if weights is None:
        weights = jnp.ones((*batch, n_found), jnp.float32)
    weights = jnp.where(weights > 0, weights, 0).astype(jnp.float32)
    going &= (weights > 0)[..., None]
    same, siblings = _compare(tokens, going)
    first = jnp.argmax(same, axis=-2).astype(jnp.int32)
    is_node = (first == jnp.arange(n_found)[:, None]) & going
    scores, ranks = _weigh(same, siblings, is_node, weights)
    # Level by level, so that parents come first.
    parents = first[..., :-1] + n_found * jnp.arange(gamma - 1)
    above_first = [(0, 0)] * (parents.ndim - 1) + [(1, 0)]
    parents = jnp.pad(parents, above_first, constant_values=ROOT)
    by_level = lambda x: jnp.swapaxes(x, -1, -2).reshape(*batch, gamma * n_found)
    candidates = Candidates(
        tokens=by_level(tokens),
        scores=by_level(jnp.where(is_node, scores, -jnp.inf)),
        parents=by_level(parents),
        ranks=by_level(ranks),
    )
    return rerank(candidates, n, limit=limit, max_depth=gamma)


def _compare(
    tokens: Int[Array, "*B R G"], going: Bool[Array, "*B R G"]
) -> tuple[Bool[Array, "*B R R G"], Bool[Array, "*B R R G"]]:
    """Compares continuations.

    Returns:
      Whether two of them go through one node at each position, and whether through
      children of one node.
    """
    differs = tokens[..., :, None, :] != tokens[..., None, :, :]
    both = going[..., :, None, :] & going[..., None, :, :]
    same = (jnp.cumsum(differs, axis=-1) == 0) & both
    before = jnp.concatenate([jnp.ones_like(same[..., :1]), same[..., :-1]], axis=-1)
    return same, before & both


def _weigh(
    same: Bool[Array, "*B R R G"],
    siblings: Bool[Array, "*B R R G"],
    is_node: Bool[Array, "*B R G"],
    weights: Float[Array, "*B R"],
) -> tuple[Float[Array, "*B R G"], Int[Array, "*B R G"]]:
    """Gives log D of each continuation's positions, and their ranks by weight.

    Args:
      same: see ``_compare``.
      siblings: see ``_compare``.
      is_node: whether a position stands for a node: the first of those through it.
      weights: of the continuations.
    """
    sums = lambda mask: jnp.sum(jnp.where(mask, weights[..., None, :, None], 0), -2)
    weight, total = sums(same), sums(siblings)
    share = weight / jnp.where(total > 0, total, 1)
    # The product first: rounded logs of equal products would differ.
    scores = jnp.log(jnp.cumprod(share, axis=-1))
    theirs, mine = weight[..., None, :, :], weight[..., :, None, :]
    number = jnp.arange(weights.shape[-1])
    earlier = (number < number[:, None])[..., None]
    before = (theirs > mine) | ((theirs == mine) & earlier)
    rivals = siblings & is_node[..., None, :, :]
    return scores, jnp.sum(rivals & before, axis=-2, dtype=jnp.int32)

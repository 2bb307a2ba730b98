"""Draft trees in rules: which trees a rule may see, and the path that is kept."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.trees import ancestors_mask
from specjax.typing import Array, Bool, Float, Int
from specjax.verify._protocol import ProposalLike, Verdict, VerifyRule

#: Rules that verify trees, as error messages name them.
TREE_RULES = (
    "coupled, greedy, k_seq, recursive_rejection, rejection, relaxed, "
    "sample_and_match, traversal, typical"
)


def check_trees(
    rule: VerifyRule,
    *,
    dynamic: bool,
    draws_siblings: Literal["iid", "without_replacement"] | None,
) -> None:
    """Checks that a rule is exact for the trees of a drafter.

    Args:
      rule: the rule.
      dynamic: whether a tree's shape (which nodes it has, their order, their parents)
        depends on tokens that were drawn for it. Depending on committed text, or on
        the draft's law before a token is drawn from it, is static in this sense.
      draws_siblings: how the children of a node are made: drawn independently of each
        other, drawn in turn without replacement, or None where they are point masses
        (``Proposal.logprobs`` is None). A shape that depends on point masses is exact
        for every rule that takes trees: the whole tree is a function of the context.

    Raises:
      ValueError: the rule verifies chains only, the shape would change the law that
        children were drawn from, or they are drawn otherwise than the rule assumes.
    """
    if rule.trees == "none":
        refuse_trees(rule.name)
    if draws_siblings is None:
        return
    if dynamic and rule.trees != "any":
        raise ValueError(
            f"{rule.name!r} needs trees whose shape does not depend on drawn tokens: "
            "choosing or ordering children by what was drawn changes their law (bias "
            "of one token, total variation at two children of four tokens: 0.16 "
            "sorted by draft probability, 0.11 reversed, 0.12 without those below "
            "0.2). Propose point masses, or take 'sample_and_match' or 'coupled'."
        )
    if rule.siblings not in ("any", draws_siblings):
        other = {
            "iid": "'rejection' or 'k_seq'",
            "without_replacement": "'recursive_rejection' or 'traversal'",
        }[draws_siblings]
        raise ValueError(
            f"{rule.name!r} is exact for siblings drawn {_DRAWN[rule.siblings]}; these "
            f"are drawn {_DRAWN[draws_siblings]}. Take {other}, or a rule that matches "
            "('sample_and_match', 'coupled')."
        )


_DRAWN = {"iid": "independently", "without_replacement": "without replacement"}


def refuse_trees(name: str) -> None:
    """Raises for a rule that cannot verify trees."""
    raise ValueError(
        f"{name!r} verifies chains, and the proposal is a tree; rules for trees: "
        f"{TREE_RULES}."
    )


class Nodes(NamedTuple):
    """How the nodes of a pass are related.

    Attributes:
      parents: of each node, -1 for the pending token and for padding, [B, N].
      valid: whether a node counts, [B, N].
      above: whether node j is node i or above it, [B, N, N] at [b, i, j].
      before: whether node j is a sibling of node i that comes first, [B, N, N].
    """

    parents: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    above: Bool[Array, "B N N"]
    before: Bool[Array, "B N N"]


def read_nodes(proposal: ProposalLike) -> Nodes:
    """Relates the nodes of a tree, or of a chain seen as one."""
    n_nodes = proposal.tokens.shape[1]
    index = jnp.arange(n_nodes, dtype=jnp.int32)
    valid = index[None, :] < proposal.n_valid[:, None]
    parents = proposal.parents
    if parents is None:
        parents = jnp.broadcast_to(index[None, :] - 1, proposal.tokens.shape)
    parents = jnp.where(valid, parents, -1)
    siblings = parents[:, :, None] == parents[:, None, :]
    before = siblings & valid[:, None, :] & jnp.tri(n_nodes, k=-1, dtype=bool)[None]
    above = ancestors_mask(parents)
    return Nodes(parents, valid, above, before)


class Walk(NamedTuple):
    """Where a pass ends.

    Attributes:
      n_accepted: nodes kept, [B].
      path: the nodes kept from the top down, then -1, [B, N].
      row: the last row that is kept: 0 the pending token, j + 1 node j. [B]
    """

    n_accepted: Int[Array, " B"]
    path: Int[Array, "B N"]
    row: Int[Array, " B"]

    def verdict(self, next_token: Int[Array, " B"], info: dict[str, Array]) -> Verdict:
        """Returns the verdict on a tree."""
        return Verdict(self.n_accepted, next_token, info, self.path)


def walk(nodes: Nodes, accept: Bool[Array, "B N"]) -> Walk:
    """Follows accepted children from the pending token down.

    Args:
      nodes: the tree.
      accept: whether a node may be entered from its parent; of several siblings the
        first is.

    Returns:
      The walk.
    """
    accept &= nodes.valid
    entered = accept & ~jnp.any(nodes.before & accept[:, None, :], axis=-1)
    return keep_path(~jnp.any(nodes.above & ~entered[:, None, :], axis=-1))


def keep_path(kept: Bool[Array, "B N"]) -> Walk:
    """Describes a path whose nodes are marked.

    Args:
      kept: the nodes of one path from the top, [B, N].

    Returns:
      The walk.
    """
    n_nodes = kept.shape[1]
    index = lax.broadcasted_iota(jnp.int32, kept.shape, 1)
    # Parents come before children: down the path numbers grow.
    path = jnp.sort(jnp.where(kept, index, n_nodes), axis=1)
    return Walk(
        n_accepted=jnp.sum(kept, axis=1, dtype=jnp.int32),
        path=jnp.where(path < n_nodes, path, -1),
        row=jnp.max(jnp.where(kept, index + 1, 0), axis=1, initial=0),
    )


def first_chance(nodes: Nodes, chance: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Returns how likely each node is the first of its siblings to pass.

    Args:
      nodes: the tree.
      chance: with which each passes, given that those before it did not.

    Returns:
      The probability that a node is entered, given that its parent was. 0 for padding.
    """
    missed = jnp.where(nodes.before, 1 - chance[:, None, :], 1)
    return jnp.where(nodes.valid, chance * jnp.prod(missed, axis=-1), 0)


def at_parent(nodes: Nodes, rows: Array) -> Array:
    """Returns, of values of pass rows [B, N+1, ...], each node's parent's, [B, N, ...].

    Padding gets the pending token's.
    """
    index = (nodes.parents + 1).reshape(*nodes.parents.shape, *(1,) * (rows.ndim - 2))
    return jnp.take_along_axis(rows, index, axis=1)


def at_row(rows: Array, row: Int[Array, " B"]) -> Array:
    """Returns one row a batch entry of values [B, N+1, ...], [B, ...]."""
    return rows[jnp.arange(rows.shape[0]), row]

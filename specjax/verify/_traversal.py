"""Traversal verification: a tree is tested from its leaves up."""

import jax.numpy as jnp

from specjax.sampling import UniformNoise, draw
from specjax.typing import Array, Float
from specjax.verify._block import block
from specjax.verify._protocol import ProposalLike, Verdict, VerifyRule
from specjax.verify._tree_rows import (
    Row,
    child_law,
    left_over,
    of_token,
    over_nodes,
    read_rows,
    without,
)
from specjax.verify._trees import (
    Nodes,
    at_parent,
    at_row,
    first_chance,
    read_nodes,
    walk,
)


def _traversal(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Keeps the first path that passes, leaves before what they follow."""
    if proposal.parents is None:
        return block.verify(proposal, target_scores, noise)
    nodes, rows = read_nodes(proposal), read_rows(proposal, target_scores)
    rows = rows._replace(reach=jnp.ones_like(rows.p[..., 0]))
    rows, _ = over_nodes(_step, proposal, nodes, rows)
    assert rows.reach is not None
    # A node is tested once all below it have failed; by then it is as good as a leaf.
    chance = jnp.where(nodes.valid, rows.reach[:, 1:], 0.0)
    passed = noise.accept[:, : chance.shape[1]] < chance
    # The first that passes lies below the first child that has any below it.
    below = jnp.swapaxes(nodes.above, 1, 2)
    kept = walk(nodes, jnp.any(below & passed[:, None, :], axis=-1))
    weights = at_row(rows.p, kept.row)
    info = {
        "accept_prob": _accept_prob(nodes, below, chance),
        "test_prob": chance,
        "next_weights": weights,
    }
    return kept.verdict(draw(weights, noise.draw), info)


def _step(row: Row, token: Array) -> tuple[Row, Array, dict[str, Array]]:
    """Enters a child, then rejects it with all that follows it."""
    assert row.reach is not None
    q = child_law(row, token)
    # A draft of probability 0 is never drawn; the ratio stays finite.
    least = jnp.finfo(q.dtype).tiny
    ratio = of_token(row.p, token) / jnp.maximum(of_token(q, token), least)
    reach = jnp.minimum(row.reach * ratio, 1.0)
    rest = jnp.maximum(row.reach[:, None] * row.p - q, 0)
    mass = jnp.sum(rest, axis=-1)
    either = mass + (1 - row.reach)
    # Nothing over nothing: the child is never rejected.
    again = jnp.where(either == 0, 1.0, mass / jnp.where(either == 0, 1.0, either))
    after = Row(left_over(row.p, rest), without(row, token), again)
    return after, reach, {}


def _accept_prob(nodes: Nodes, below: Array, chance: Array) -> Array:
    """Returns how likely each node is kept given that its parent is."""
    some = 1 - jnp.prod(jnp.where(below, 1 - chance[:, None, :], 1), axis=-1)
    # The pending token is kept whatever passes.
    parent = at_parent(nodes, jnp.pad(some, ((0, 0), (1, 0)), constant_values=1.0))
    first = first_chance(nodes, some)
    return jnp.where(parent > 0, first / jnp.where(parent > 0, parent, 1), 0.0)


#: Traversal verification, arXiv:2505.12398. Tests sequences instead of tokens, leaves
#: first: a node v below u is reached with a_v = min(1, a_u p_u(x_v)/q_u(x_v)) and, once
#: all that follow it are rejected, kept with what a_v is then. A rejected child v
#: leaves its parent with the normalised max(a_u p_u - q_u, 0) for p_u, with
#: S/(S + 1 - a_u) for a_u, S being the sum of that residual, and with q_u without x_v.
#: The whole path to the first node that passes is kept, and the next token drawn from
#: its p. Lossless on the terms of ``recursive_rejection``, and keeps at least as many
#: drafts in expectation: a rejected token does not take what follows it along. On
#: chains it is ``block``.
traversal = VerifyRule(
    name="traversal",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=_traversal,
    trees="static",
    siblings="without_replacement",
)

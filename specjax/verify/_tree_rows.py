"""What rules by probability know of each row of a tree once children are rejected."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.sampling import UniformNoise, draw
from specjax.typing import Array, Bool, Float, Int
from specjax.verify._laws import read_laws
from specjax.verify._protocol import ProposalLike, Verdict
from specjax.verify._trees import Nodes, at_row, first_chance, read_nodes, walk


class Rows(NamedTuple):
    """Rows of a pass, given that those of their children seen so far were rejected.

    Attributes:
      p: law of the token after each row, [B, N+1, V].
      q: law of each row's next child, unnormalised, [B, N+1, V]; tokens that cannot
        come again are marked by -1. None for point masses.
      reach: what ``traversal`` carries from rows to their children, [B, N+1]; None
        for the other rules.
    """

    p: Float[Array, "B N1 V"]
    q: Float[Array, "B N1 V"] | None
    reach: Float[Array, "B N1"] | None = None


class Row(NamedTuple):
    """One of the ``Rows`` in each batch entry: p, q [B, V], reach [B]."""

    p: Float[Array, "B V"]
    q: Float[Array, "B V"] | None
    reach: Float[Array, " B"] | None = None


#: (parent's row, tokens [B]) -> (the parent's row once the child is rejected, the
#: child's ``reach`` [B] or None, what the child's test is: arrays [B]).
Step = Callable[[Row, Array], tuple[Row, Array | None, dict[str, Array]]]


def read_rows(proposal: ProposalLike, target_scores: Float[Array, "B N1 V"]) -> Rows:
    """Reads the rows of a pass before any child is seen."""
    laws = read_laws(proposal, target_scores)
    # Nothing follows the last row.
    q = None if laws.q is None else jnp.pad(laws.q, ((0, 0), (0, 1), (0, 0)))
    return Rows(laws.p, q)


def over_nodes(
    step: Step, proposal: ProposalLike, nodes: Nodes, rows: Rows
) -> tuple[Rows, dict[str, Array]]:
    """Goes through all nodes as if each of them were rejected in its turn.

    What a node is tested by depends on the siblings before it and on the rows above,
    not on how tests come out: one pass, parents first, finds it for all nodes.

    Args:
      step: see ``Step``.
      proposal: the drafts.
      nodes: the tree.
      rows: before any child is seen.

    Returns:
      The rows once all their children are rejected, and what each test is, [B, N];
      junk for padding.
    """
    batch, n_nodes = jnp.arange(proposal.tokens.shape[0]), proposal.tokens.shape[1]

    def one(rows: Rows, node: Any) -> tuple[Rows, dict[str, Array]]:
        index, token, row, valid = node
        here = jax.tree.map(lambda x: x[batch, row], rows)
        after, reach, test = step(Row(*here), token)

        def put(x: Array, new: Array, old: Array) -> Array:
            mask = valid.reshape(-1, *(1,) * (old.ndim - 1))
            return x.at[batch, row].set(jnp.where(mask, new, old))

        rows = jax.tree.map(put, rows, Rows(*after), here)
        if rows.reach is not None:
            rows = rows._replace(reach=rows.reach.at[:, index + 1].set(reach))
        return rows, test

    index = jnp.arange(n_nodes, dtype=jnp.int32)
    columns = (proposal.tokens.T, nodes.parents.T + 1, nodes.valid.T)
    rows, tests = lax.scan(one, rows, (index, *columns))
    return rows, {key: test.T for key, test in tests.items()}


def child_law(row: Row, token: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Returns the law that a row's next child was drawn from.

    Args:
      row: its parent's.
      token: the child's; a point mass where there is no q.

    Returns:
      q, normalised; once it has no weight left, uniform over the unmarked tokens.
    """
    if row.q is None:
        return _is_token(row.p, token).astype(row.p.dtype)
    weights = jnp.maximum(row.q, 0)
    left = jnp.sum(weights, axis=-1, keepdims=True) > 0
    weights = jnp.where(left, weights, (row.q >= 0).astype(weights.dtype))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def without(row: Row, token: Int[Array, " B"]) -> Float[Array, "B V"] | None:
    """Returns a row's q with a token marked that cannot be drawn again."""
    return None if row.q is None else jnp.where(_is_token(row.p, token), -1.0, row.q)


def left_over(p: Float[Array, "B V"], rest: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Returns a residual normalised; p itself where rounding left nothing of it."""
    total = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), p)


def of_token(law: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """Returns the probability of a token."""
    return jnp.take_along_axis(law, token[:, None], axis=-1)[:, 0]


def _is_token(law: Float[Array, "B V"], token: Int[Array, " B"]) -> Bool[Array, "B V"]:
    return lax.broadcasted_iota(jnp.int32, law.shape, 1) == token[:, None]


def reject_tree(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
    *,
    siblings: Literal["iid", "without_replacement"],
) -> Verdict:
    """Tests children in turn, each against what its siblings left of p.

    Args:
      proposal: the drafts, a tree.
      target_scores: warped log-probabilities up to a constant a row.
      noise: consumed.
      siblings: how children were drawn; nothing depends on it for point masses.

    Returns:
      The verdict.
    """
    nodes = read_nodes(proposal)

    def step(row: Row, token: Array) -> tuple[Row, None, dict[str, Array]]:
        q = child_law(row, token)
        test = {"p": of_token(row.p, token), "q": of_token(q, token)}
        p = left_over(row.p, jnp.maximum(row.p - q, 0))
        next_q = row.q if siblings == "iid" else without(row, token)
        return Row(p, next_q), None, test

    rows, tests = over_nodes(step, proposal, nodes, read_rows(proposal, target_scores))
    return pass_in_turn(nodes, noise, tests["p"], tests["q"], rows.p)


def pass_in_turn(
    nodes: Nodes,
    noise: UniformNoise,
    p_token: Float[Array, "B N"],
    q_token: Float[Array, "B N"],
    next_weights: Float[Array, "B N1 V"],
) -> Verdict:
    """Enters the first child that passes, until none does.

    Args:
      nodes: the tree.
      noise: consumed.
      p_token: a node passes with probability min(1, p/q), this being its p.
      q_token: and this its q.
      next_weights: law of the token after each row if all its children are rejected.

    Returns:
      The verdict.
    """
    # Strict: a token of target probability 0 is never accepted, u = 0 included.
    kept = walk(nodes, noise.accept[:, : p_token.shape[1]] * q_token < p_token)
    ratio = jnp.where(q_token > 0, p_token / jnp.where(q_token > 0, q_token, 1), 1.0)
    chance = jnp.where(nodes.valid & (p_token > 0), jnp.minimum(ratio, 1.0), 0.0)
    weights = at_row(next_weights, kept.row)
    info = {
        "accept_prob": first_chance(nodes, chance),
        "test_prob": chance,
        "next_weights": weights,
    }
    return kept.verdict(draw(weights, noise.draw), info)

"""Keeps drafts that equal tokens drawn from the target with uniform numbers."""

import jax.numpy as jnp

from specjax.sampling import UniformNoise, draw
from specjax.typing import Array, Bool, Float
from specjax.verify._laws import of_tokens, target_law
from specjax.verify._protocol import (
    ProposalLike,
    Verdict,
    VerifyRule,
    accepted_prefix,
)
from specjax.verify._trees import (
    at_parent,
    at_row,
    read_nodes,
    walk,
)


def match_drawn(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
    *,
    also: Bool[Array, "B N"] | None = None,
) -> Verdict:
    """Accepts drafts equal to the target's draw; see ``sample_and_match``, ``judge``.

    Args:
      proposal: the drafts; their ``logprobs`` are not looked at.
      target_scores: warped log-probabilities up to a constant a row.
      noise: consumed; ``accept[:, i]`` draws the token of position i.
      also: drafts accepted whatever was drawn; None is none.

    Returns:
      The verdict. The token after a draft that was not accepted is the very one that
      it was compared with: a second draw would give the draft another chance.
    """
    n_drafts = proposal.tokens.shape[1]
    p = target_law(target_scores)
    # Row n_valid has no draft to be compared with; it is drawn with a number of its
    # own, whatever stands in the padding beyond.
    row = jnp.arange(n_drafts + 1)[None, :]
    u = jnp.pad(noise.accept[:, :n_drafts], ((0, 0), (0, 1)))
    u = jnp.where(row < proposal.n_valid[:, None], u, noise.draw[:, None])
    drawn = draw(p.reshape(-1, p.shape[-1]), u.reshape(-1)).reshape(u.shape)
    accept = proposal.tokens == drawn[:, :n_drafts]
    accept_prob = of_tokens(p[:, :n_drafts], proposal.tokens)
    if also is not None:
        accept, accept_prob = accept | also, jnp.where(also, 1.0, accept_prob)
    n_accepted = accepted_prefix(accept, proposal.n_valid)
    at = n_accepted[:, None]
    next_token = jnp.take_along_axis(drawn, at, axis=1)[:, 0]
    p_next = jnp.take_along_axis(p, at[..., None], axis=1)[:, 0]
    point = (jnp.arange(p.shape[-1])[None, :] == next_token[:, None]).astype(p.dtype)
    info = {
        "accept_prob": accept_prob,
        "row_weights": p[:, :n_drafts],
        "next_weights": jnp.where(at < proposal.n_valid[:, None], point, p_next),
    }
    return Verdict(n_accepted, next_token, info)


def _sample_and_match(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Accepts drafts equal to the target's draw; see ``sample_and_match``."""
    if proposal.parents is None:
        return match_drawn(proposal, target_scores, noise)
    return _match_tree(proposal, target_scores, noise)


def _match_tree(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Follows the children that equal the target's draw at their parent."""
    batch, n_nodes = proposal.tokens.shape
    nodes = read_nodes(proposal)
    p = target_law(target_scores)
    # A row draws with the number of its first child, a number that no other row has;
    # one without children with the pass's last one: a path has one such row.
    first = nodes.valid & ~jnp.any(nodes.before, axis=-1)
    row = jnp.where(first, nodes.parents + 1, n_nodes + 1)
    at = (jnp.arange(batch)[:, None], row)
    u = jnp.broadcast_to(noise.draw[:, None], (batch, n_nodes + 1))
    u = u.at[at].set(noise.accept[:, :n_nodes], mode="drop")
    drawn = draw(p.reshape(-1, p.shape[-1]), u.reshape(-1)).reshape(u.shape)
    kept = walk(nodes, proposal.tokens == at_parent(nodes, drawn))
    next_token, p_next = at_row(drawn, kept.row), at_row(p, kept.row)
    parent = jnp.zeros((batch, n_nodes + 1), bool).at[at].set(True, mode="drop")
    point = (jnp.arange(p.shape[-1])[None, :] == next_token[:, None]).astype(p.dtype)
    p_parent = at_parent(nodes, p)
    # Of equal siblings the first alone can be entered.
    again = proposal.tokens[:, :, None] == proposal.tokens[:, None, :]
    again = jnp.any(nodes.before & again, axis=-1)
    info = {
        "accept_prob": jnp.where(
            nodes.valid & ~again, of_tokens(p_parent, proposal.tokens), 0.0
        ),
        "row_weights": p_parent,
        "next_weights": jnp.where(at_row(parent, kept.row)[:, None], point, p_next),
    }
    return kept.verdict(next_token, info)


#: Draws the target's token of every position and keeps drafts equal to it; the first
#: that differs is replaced by the token drawn. Needs no draft probabilities, and is
#: lossless for any proposal whatever, as ``coupled`` is, but with noise of the pass:
#: the text is not a function of the seed alone. Accepts draft x with probability p(x),
#: the best possible for point masses and less than ``rejection`` for drawn drafts.
#: Follows any tree, into the child that its parent's draw equals. References: Miao et
#: al., arXiv:2305.09781 (naive sampling); Svirschevski et al., arXiv:2406.02532.
sample_and_match = VerifyRule(
    name="sample_and_match",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=_sample_and_match,
    trees="any",
)

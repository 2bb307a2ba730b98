"""Speculative sampling by rejection, the token rule."""

import jax.numpy as jnp

from specjax.sampling import UniformNoise, draw
from specjax.typing import Array, Float
from specjax.verify._laws import next_weights, read_laws
from specjax.verify._protocol import (
    ProposalLike,
    Verdict,
    VerifyRule,
    accepted_prefix,
)
from specjax.verify._tree_rows import reject_tree


def reject(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
    *,
    leniency: float,
) -> Verdict:
    """Accepts a prefix by the ratio p / (leniency * q); see ``rejection``, ``lenient``.

    Args:
      proposal: the drafts, a chain.
      target_scores: warped log-probabilities up to a constant a row.
      noise: consumed.
      leniency: in (0, 1]; 1 keeps the target's law.

    Returns:
      The verdict.
    """
    n_drafts = proposal.tokens.shape[1]
    laws = read_laws(proposal, target_scores)
    p_token, q_token = laws.p_token, laws.q_token * leniency
    # Strict: a token of target probability 0 is never accepted, u = 0 included.
    accept = noise.accept[:, :n_drafts] * q_token < p_token
    n_accepted = accepted_prefix(accept, proposal.n_valid)
    weights = next_weights(proposal, laws, n_accepted)
    ratio = jnp.where(q_token > 0, p_token / jnp.where(q_token > 0, q_token, 1), 1.0)
    accept_prob = jnp.where(p_token > 0, jnp.minimum(ratio, 1.0), 0.0)
    return Verdict(
        n_accepted,
        draw(weights, noise.draw),
        {"accept_prob": accept_prob, "next_weights": weights},
    )


def _rejection(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Accepts by the ratio p / q; see ``rejection``."""
    if proposal.parents is None:
        return reject(proposal, target_scores, noise, leniency=1.0)
    return reject_tree(proposal, target_scores, noise, siblings="iid")


#: Leviathan, Kalman and Matias, arXiv:2211.17192, Algorithm 1; Chen et al.,
#: arXiv:2302.01318. Accepts draft x with probability min(1, p(x)/q(x)); on the first
#: rejection draws from the normalised max(p - q, 0). Lossless for drafts drawn from
#: the proposal's own ``logprobs`` (None: point masses).
#:
#: On trees (Miao et al., arXiv:2305.09781, multi-step speculative sampling) the
#: children of a node are tested in node order, each as above against what those
#: before it left of p; if none passes the token is drawn from what all left. Children
#: are independent draws from one q, so that they may repeat, in a tree whose shape
#: does not depend on them; or point masses, in any tree.
rejection = VerifyRule(
    name="rejection",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=_rejection,
    trees="static",
    siblings="iid",
)

"""Speculative sampling by rejection, the token rule."""

import functools

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


def reject(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
    *,
    leniency: float,
) -> Verdict:
    """Accepts a prefix by the ratio p / (leniency * q); see ``rejection``, ``lenient``.

    Args:
      proposal: the drafts.
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


#: Leviathan, Kalman and Matias, arXiv:2211.17192, Algorithm 1; Chen et al.,
#: arXiv:2302.01318. Accepts draft x with probability min(1, p(x)/q(x)); on the first
#: rejection draws from the normalised max(p - q, 0). Lossless for drafts drawn from
#: the proposal's own ``logprobs`` (None: point masses).
rejection = VerifyRule(
    name="rejection",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=functools.partial(reject, leniency=1.0),
)

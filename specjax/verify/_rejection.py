"""Speculative sampling by rejection, the token rule."""

import jax
import jax.numpy as jnp

from specjax.sampling import UniformNoise, draw
from specjax.typing import Array, Float
from specjax.verify._protocol import (
    ProposalLike,
    Verdict,
    VerifyRule,
    accepted_prefix,
)


def _rejection(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Accepts a prefix that keeps the target's law; see ``rejection``."""
    vocab, n_drafts = target_scores.shape[-1], proposal.tokens.shape[1]
    if proposal.logprobs is not None and proposal.logprobs.shape[-1] != vocab:
        raise ValueError(
            f"The draft's vocabulary has {proposal.logprobs.shape[-1]} entries, the "
            f"target's {vocab}; draft probabilities must be over the target's ids."
        )
    dtype = jnp.promote_types(target_scores.dtype, jnp.float32)
    p = jax.nn.softmax(target_scores.astype(dtype), axis=-1)
    tokens = proposal.tokens[..., None]
    p_token = jnp.take_along_axis(p[:, :n_drafts], tokens, axis=-1)[..., 0]
    if proposal.logprobs is None:
        q, q_token = None, jnp.ones_like(p_token)
    else:
        q = jnp.exp(proposal.logprobs.astype(dtype))
        q_token = jnp.take_along_axis(q, tokens, axis=-1)[..., 0]
    # Strict: a token of target probability 0 is never accepted, u = 0 included.
    accept = noise.accept[:, :n_drafts] * q_token < p_token
    n_accepted = accepted_prefix(accept, proposal.n_valid)
    weights = _next_weights(proposal, p, q, n_accepted)
    next_token = draw(weights, noise.draw)
    ratio = jnp.where(q_token > 0, p_token / jnp.where(q_token > 0, q_token, 1), 1.0)
    accept_prob = jnp.where(p_token > 0, jnp.minimum(ratio, 1.0), 0.0)
    return Verdict(
        n_accepted, next_token, {"accept_prob": accept_prob, "next_weights": weights}
    )


def _next_weights(
    proposal: ProposalLike, p: Array, q: Array | None, n_accepted: Array
) -> Array:
    """Returns the law of the next token, unnormalised: the residual, or p itself."""
    batch = jnp.arange(p.shape[0])
    p_next = p[batch, n_accepted]
    if proposal.tokens.shape[1] == 0:
        return p_next
    rejected = n_accepted < proposal.n_valid
    at = jnp.minimum(n_accepted, proposal.tokens.shape[1] - 1)
    if q is None:
        token = proposal.tokens[batch, at]
        index = jnp.arange(p.shape[-1])[None, :]
        residual = jnp.where(index == token[:, None], 0.0, p_next)
    else:
        residual = jnp.maximum(p_next - q[batch, at], 0.0)
    # Rounding can leave nothing although a rejection happened: then p equals q to
    # rounding, and p is the right law.
    some = jnp.sum(residual, axis=-1) > 0
    return jnp.where((rejected & some)[:, None], residual, p_next)


#: Leviathan, Kalman and Matias, arXiv:2211.17192, Algorithm 1; Chen et al.,
#: arXiv:2302.01318. Accepts draft x with probability min(1, p(x)/q(x)); on the first
#: rejection draws from the normalised max(p - q, 0). Lossless for drafts drawn from
#: the proposal's own ``logprobs`` (None: point masses).
rejection = VerifyRule(
    name="rejection",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=_rejection,
)

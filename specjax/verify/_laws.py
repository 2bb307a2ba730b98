"""What rules by probability read from a proposal and the target's scores."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.typing import Array, Float, Int
from specjax.verify._protocol import ProposalLike


class Laws(NamedTuple):
    """Probabilities of a pass, float32, or float64 where the scores are.

    Attributes:
      p: the target's, [B, N+1, V].
      q: the draft's, [B, N, V]; None for point masses.
      p_token: of each draft token under the target, [B, N].
      q_token: of each draft token under the draft, [B, N].
    """

    p: Float[Array, "B N1 V"]
    q: Float[Array, "B N V"] | None
    p_token: Float[Array, "B N"]
    q_token: Float[Array, "B N"]


def read_laws(proposal: ProposalLike, target_scores: Float[Array, "B N1 V"]) -> Laws:
    """Reads the probabilities of a pass.

    Args:
      proposal: the drafts.
      target_scores: warped log-probabilities up to a constant a row.

    Returns:
      The laws.

    Raises:
      ValueError: the draft's probabilities are over another vocabulary.
    """
    vocab, n_drafts = target_scores.shape[-1], proposal.tokens.shape[1]
    if proposal.logprobs is not None and proposal.logprobs.shape[-1] != vocab:
        raise ValueError(
            f"The draft's vocabulary has {proposal.logprobs.shape[-1]} entries, the "
            f"target's {vocab}; draft probabilities must be over the target's ids."
        )
    p = target_law(target_scores)
    p_token = of_tokens(p[:, :n_drafts], proposal.tokens)
    if proposal.logprobs is None:
        return Laws(p, None, p_token, jnp.ones_like(p_token))
    q = jnp.exp(proposal.logprobs.astype(p.dtype))
    return Laws(p, q, p_token, of_tokens(q, proposal.tokens))


def target_law(scores: Float[Array, "B N1 V"]) -> Float[Array, "B N1 V"]:
    """Returns the probabilities of scores, in float32 or better."""
    dtype = jnp.promote_types(scores.dtype, jnp.float32)
    return jax.nn.softmax(scores.astype(dtype), axis=-1)


def of_tokens(rows: Float[Array, "B N V"], tokens: Int[Array, "B N"]) -> Array:
    """Returns each row's entry at its token, [B, N]."""
    return jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]


def next_weights(
    proposal: ProposalLike,
    laws: Laws,
    n_accepted: Int[Array, " B"],
    scale: Float[Array, " B"] | None = None,
) -> Float[Array, "B V"]:
    """Returns the law of the next token, unnormalised: a residual, or p itself.

    Args:
      proposal: the drafts.
      laws: of the pass.
      n_accepted: drafts kept.
      scale: in [0, 1], multiplies p in the residual; None is 1.

    Returns:
      max(scale * p - q, 0) where a draft was rejected, p where none was.
    """
    batch = jnp.arange(laws.p.shape[0])
    p_next = laws.p[batch, n_accepted]
    n_drafts = proposal.tokens.shape[1]
    if n_drafts == 0:
        return p_next
    rejected = n_accepted < proposal.n_valid
    at = jnp.minimum(n_accepted, n_drafts - 1)
    scaled = p_next if scale is None else scale[:, None] * p_next
    q_next = None if laws.q is None else laws.q[batch, at]
    left = residual(scaled, q_next, proposal.tokens[batch, at])
    # Rounding can leave nothing although a rejection happened: then p equals q to
    # rounding, and p is the right law.
    some = jnp.sum(left, axis=-1) > 0
    return jnp.where((rejected & some)[:, None], left, p_next)


def residual(
    p: Float[Array, "*rows V"],
    q: Float[Array, "*rows V"] | None,
    tokens: Int[Array, "*rows"],
) -> Float[Array, "*rows V"]:
    """Returns max(p - q, 0), q being the point mass at the tokens where it is None.

    The entries of p are at most 1.
    """
    if q is not None:
        return jnp.maximum(p - q, 0.0)
    index = lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1)
    return jnp.where(index == tokens[..., None], 0.0, p)

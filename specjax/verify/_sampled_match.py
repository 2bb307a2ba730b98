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


#: Draws the target's token of every position and keeps drafts equal to it; the first
#: that differs is replaced by the token drawn. Needs no draft probabilities, and is
#: lossless for any proposal whatever, as ``coupled`` is, but with noise of the pass:
#: the text is not a function of the seed alone. Accepts draft x with probability p(x),
#: the best possible for point masses and less than ``rejection`` for drawn drafts.
sample_and_match = VerifyRule(
    name="sample_and_match",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=match_drawn,
)

"""Block verification: one joint test of a draft instead of a test a token."""

import jax.numpy as jnp

from specjax.sampling import UniformNoise, draw
from specjax.typing import Array, Float
from specjax.verify._laws import Laws, next_weights, read_laws, residual
from specjax.verify._protocol import ProposalLike, Verdict, VerifyRule
from specjax.verify._trees import refuse_trees


def _block(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Accepts up to the last position whose test passes; see ``block``."""
    if proposal.parents is not None:
        refuse_trees("block")
    n_drafts = proposal.tokens.shape[1]
    laws = read_laws(proposal, target_scores)
    reach = _reach(laws)
    test_prob = _test_prob(proposal, laws, reach)
    # Strict: a probability of 0 is never passed, u = 0 included.
    passed = noise.accept[:, :n_drafts] < test_prob
    # The last success counts: a failure before it is no rejection.
    position = jnp.arange(1, n_drafts + 1, dtype=jnp.int32)[None, :]
    n_accepted = jnp.max(jnp.where(passed, position, 0), axis=1, initial=0)
    scale = jnp.take_along_axis(reach, n_accepted[:, None], axis=1)[:, 0]
    weights = next_weights(proposal, laws, n_accepted, scale)
    info = {
        "accept_prob": _accept_prob(test_prob),
        "test_prob": test_prob,
        "next_weights": weights,
    }
    return Verdict(n_accepted, draw(weights, noise.draw), info)


def _reach(laws: Laws) -> Float[Array, "B N1"]:
    """Returns w: the probability of accepting at least the first i drafts.

    It is the running product of p(x)/q(x), clamped at 1 in every step; w_0 is 1.
    """
    # A draft of probability 0 is never drawn. The least normal number keeps the
    # ratio finite, so that an unreachable prefix stays at 0 and is not 0 * inf.
    least = jnp.finfo(laws.p.dtype).tiny
    ratio = laws.p_token / jnp.maximum(laws.q_token, least)
    reach = [jnp.ones_like(laws.p[:, 0, 0])]
    for i in range(ratio.shape[1]):
        reach.append(jnp.minimum(reach[-1] * ratio[:, i], 1.0))
    return jnp.stack(reach, axis=1)


def _test_prob(
    proposal: ProposalLike, laws: Laws, reach: Float[Array, "B N1"]
) -> Float[Array, "B N"]:
    """Returns h: the probability that each position passes its test.

    Every position but a row's last valid one looks at the rows of the token after
    it; beyond the last valid one it is 0.
    """
    n_drafts = proposal.tokens.shape[1]
    scaled = reach[:, 1:n_drafts, None] * laws.p[:, 1:n_drafts]
    q_next = None if laws.q is None else laws.q[:, 1:]
    mass = jnp.sum(residual(scaled, q_next, proposal.tokens[:, 1:]), axis=-1)
    # The last position of the block has no row after it; its test is w.
    mass = jnp.pad(mass, ((0, 0), (0, n_drafts - mass.shape[1])))
    reach = reach[:, 1:]
    either = mass + (1 - reach)
    # Nothing over nothing: the laws are equal, and whatever is kept is right.
    inner = jnp.where(either == 0, 1.0, mass / jnp.where(either == 0, 1.0, either))
    # A row's own last draft, not the padded block's.
    left = proposal.n_valid[:, None] - jnp.arange(1, n_drafts + 1)[None, :]
    return jnp.where(left > 0, inner, jnp.where(left == 0, reach, 0.0))


def _accept_prob(test_prob: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Returns the probability of each acceptance given those before it.

    At least i drafts are kept when any test from position i on passes.
    """
    fail = jnp.flip(jnp.cumprod(jnp.flip(1 - test_prob, 1), axis=1), 1)
    kept = 1 - fail
    before = jnp.pad(kept, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1]
    return jnp.where(before > 0, kept / jnp.where(before > 0, before, 1), 0.0)


#: Sun et al., arXiv:2403.10444. With w_i = min(1, w_{i-1} p(x_i)/q(x_i)) position i
#: passes with probability S_i / (S_i + 1 - w_i), S_i being the sum of
#: max(w_i p - q, 0) over the row after it, and the last one with w_gamma. Keeps the
#: drafts up to the LAST position that passes, n of them, then draws from the
#: normalised max(w_n p - q, 0). Lossless on the terms of ``rejection``, and accepts at
#: least as many drafts in expectation: more from two drafts on, the same with one or
#: with point masses. Stateless from block to block. Chains only: ``traversal`` is its
#: form for trees.
block = VerifyRule(
    name="block", lossless=True, noise="uniform", greedy_only=False, verify=_block
)

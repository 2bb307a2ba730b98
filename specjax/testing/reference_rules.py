"""Second implementations of the verify rules, with a handle for every mistake.

They are written apart from the library's, plainly and in the precision of their inputs.
With their defaults they are right; ``mutants`` turns one handle at a time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.drafters import Proposal
from specjax.sampling import UniformNoise, draw
from specjax.typing import Array
from specjax.verify import Verdict, VerifyRule, accepted_prefix


def _keeps(p: Array, q: Array) -> Array:
    """The probability min(1, p/q)."""
    return jnp.where(p > 0, jnp.minimum(p / jnp.maximum(q, 1e-30), 1), 0)


def _read(proposal: Proposal, scores: Array) -> tuple[Array, Array, Array, Array]:
    """Returns p and q, and their values at the drafts, in the scores' precision."""
    p, vocab = jax.nn.softmax(scores, axis=-1), scores.shape[-1]
    if proposal.logprobs is None:
        q = jax.nn.one_hot(proposal.tokens, vocab, dtype=p.dtype)
    else:
        q = jnp.exp(proposal.logprobs)
    at = lambda law: jnp.take_along_axis(law, proposal.tokens[..., None], -1)[..., 0]
    return p, q, at(p[:, : proposal.tokens.shape[1]]), at(q)


def token_rule(
    name: str = "token",
    *,
    passes: Callable[..., Array] = lambda u, p, q: u * q < p,
    chance: Callable[..., Array] = _keeps,
    residual: Callable[..., Array] = lambda p, q: jnp.maximum(p - q, 0),
    row: Callable[..., Array] = lambda n, n_drafts: n,
    point: bool = False,
    limit: Callable[..., Array] = lambda proposal: proposal.n_valid,
    pick: Callable[..., Array] = lambda weights, p: weights,
) -> VerifyRule:
    """Makes the token rule in the inputs' precision, a handle for every mistake.

    Args:
      name: of the rule.
      passes: (u, p(x), q(x)) -> whether a draft is kept.
      chance: (p(x), q(x)) -> the probability that is reported for it.
      residual: (p, q) -> the law after a rejection, unnormalised.
      row: (n_accepted, N) -> the row of the next token.
      point: whether q(x) is taken as 1.
      limit: proposal -> how many drafts count.
      pick: (residual or p, p) -> what is drawn from.

    Returns:
      The rule; with the defaults, a second implementation of ``rejection``.
    """

    def verify(proposal: Proposal, scores: Array, noise: UniformNoise) -> Verdict:
        n_drafts, batch = proposal.tokens.shape[1], jnp.arange(scores.shape[0])
        p, q, p_token, q_token = _read(proposal, scores)
        q_token = jnp.ones_like(q_token) if point else q_token
        n = accepted_prefix(passes(noise.accept, p_token, q_token), limit(proposal))
        at = jnp.minimum(n, n_drafts - 1)
        p_next = p[batch, row(n, n_drafts)]
        rest = residual(p_next, q[batch, at])
        rejected = (n < limit(proposal)) & (jnp.abs(rest).sum(-1) > 0)
        weights = jnp.where(rejected[:, None], rest, p_next)
        info = {"accept_prob": chance(p_token, q_token), "next_weights": weights}
        return Verdict(n, draw(pick(weights, p_next), noise.draw), info)

    return VerifyRule(name, False, "uniform", False, verify)


def _joint_test(p: Array, q: Array, w: Array) -> Array:
    """The probability that an inner position of a block passes."""
    mass = jnp.maximum(w[..., None] * p - q, 0).sum(-1)
    either = mass + (1 - w)
    return jnp.where(either == 0, 1, mass / jnp.where(either == 0, 1, either))


def _last_success(passed: Array) -> Array:
    """The last position that passed, counted from 1; 0 for none."""
    return jnp.max(passed * jnp.arange(1, passed.shape[1] + 1), axis=1)


def block_rule(
    name: str = "block",
    *,
    step: Callable[..., Array] = lambda w, ratio: jnp.minimum(w * ratio, 1),
    shown: Callable[..., Array] = lambda w: w,
    tests: Callable[..., Array] = _joint_test,
    passes: Callable[..., Array] = lambda u, h: u < h,
    kept: Callable[..., Array] = _last_success,
    residual: Callable[..., Array] = lambda p, q, w: jnp.maximum(w * p - q, 0),
    point: bool = False,
    shift: int = 0,
    last: Callable[..., Array] = lambda proposal: proposal.n_valid,
) -> VerifyRule:
    """Makes block verification in the inputs' precision, a handle for every mistake.

    Args:
      name: of the rule.
      step: (w_{i-1}, p(x_i)/q(x_i)) -> what is carried on as w_i.
      shown: what is carried -> w_i.
      tests: (p, q, w_i) of the row after position i -> its chance to pass.
      passes: (u, chance) -> whether it passes.
      kept: passed [B, N] -> accepted drafts.
      residual: (p, q, w) -> the law after fewer than all, unnormalised.
      point: whether q(x) is taken as 1 in w.
      shift: -1 to test a position by its own row instead of the one after it.
      last: proposal -> the position whose chance is w.

    Returns:
      The rule; with the defaults, a second implementation of ``block``.
    """

    def verify(proposal: Proposal, scores: Array, noise: UniformNoise) -> Verdict:
        n_drafts, batch = proposal.tokens.shape[1], jnp.arange(scores.shape[0])
        p, q, p_token, q_token = _read(proposal, scores)
        q_token = jnp.ones_like(q_token) if point else q_token
        ratio = p_token / jnp.maximum(q_token, 1e-30)
        w = [jnp.ones_like(p[:, 0, 0])]
        for i in range(n_drafts):
            w.append(step(w[-1], ratio[:, i]))
        reach = shown(jnp.stack(w, axis=1))
        chances = []
        for i in range(1, n_drafts + 1):
            row = min(i + shift, n_drafts - 1)
            inner = tests(p[:, row], q[:, row], reach[:, i])
            chances.append(jnp.where(last(proposal) == i, reach[:, i], inner))
        valid = jnp.arange(n_drafts)[None, :] < proposal.n_valid[:, None]
        chance = jnp.where(valid, jnp.stack(chances, axis=1), 0)
        n = kept(passes(noise.accept, chance) & valid)
        p_next, q_next = p[batch, n], q[batch, jnp.minimum(n, n_drafts - 1)]
        rest = residual(p_next, q_next, reach[batch, n][:, None])
        rejected = (n < proposal.n_valid) & (rest.sum(-1) > 0)
        weights = jnp.where(rejected[:, None], rest, p_next)
        info = {"test_prob": chance, "next_weights": weights}
        return Verdict(n, draw(weights, noise.draw), info)

    return VerifyRule(name, False, "uniform", False, verify)


def match_rule(
    name: str = "match",
    *,
    numbers: Callable[..., Array] = lambda noise: noise.accept,
    bonus: Callable[..., Array] = lambda noise: noise.draw,
    again: bool = False,
) -> VerifyRule:
    """Makes the sampled match in the inputs' precision, a handle for every mistake.

    Args:
      name: of the rule.
      numbers: noise -> what draws the token of each draft position, [B, N].
      bonus: noise -> what draws the token after the last draft, [B].
      again: whether the token after a mismatch is drawn once more.

    Returns:
      The rule; with the defaults, a second one of ``sample_and_match``.
    """

    def verify(proposal: Proposal, scores: Array, noise: UniformNoise) -> Verdict:
        n_drafts, batch = proposal.tokens.shape[1], jnp.arange(scores.shape[0])
        p = jax.nn.softmax(scores, axis=-1)
        u = numbers(noise)
        drawn = jnp.stack([draw(p[:, i], u[:, i]) for i in range(n_drafts)], axis=1)
        n = accepted_prefix(proposal.tokens == drawn, proposal.n_valid)
        mismatch = (n < proposal.n_valid) & (not again)
        compared = drawn[batch, jnp.minimum(n, n_drafts - 1)]
        token = jnp.where(mismatch, compared, draw(p[batch, n], bonus(noise)))
        point = jax.nn.one_hot(compared, p.shape[-1], dtype=p.dtype)
        info = {
            "row_weights": p[:, :n_drafts],
            "next_weights": jnp.where(mismatch[:, None], point, p[batch, n]),
        }
        return Verdict(n, token, info)

    return VerifyRule(name, False, "uniform", False, verify)

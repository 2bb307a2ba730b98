"""Rules that change the target's law, each saying how. None is ever a default.

Notation: p is the law that is sampled from (warped), t the target's law at temperature
1 without filters (``Evidence``), q the law the drafts were drawn from.
"""

import functools
import numbers
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from specjax.sampling import UniformNoise, draw
from specjax.typing import Array, Float
from specjax.verify._laws import of_tokens, target_law
from specjax.verify._protocol import (
    Evidence,
    ProposalLike,
    Verdict,
    VerifyRule,
    accepted_prefix,
)
from specjax.verify._rejection import reject
from specjax.verify._sampled_match import match_drawn
from specjax.verify._trees import (
    at_parent,
    at_row,
    keep_path,
    read_nodes,
    refuse_trees,
)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> VerifyRule:
    """Makes the typical-acceptance rule: keeps drafts the target finds likely enough.

    Accepts draft x iff t(x) > min(epsilon, delta * exp(-H(t))), H being the entropy
    (natural log); after the first that is not, and after the last, the token is drawn
    from p. Lossy: a position that is drafted emits x with probability q(x) for every
    x in the typical set A, and otherwise a draw from p, in all
    q(x) [x in A] + (1 - q(A)) p(x). The text leans to what the drafter likes, the more
    the flatter t is; a filter of the request does not bind drafts. With delta below 1
    the argmax is always in A, so an argmax draft passes at temperature 0. Of a tree
    the longest path whose nodes all pass is kept, equally long ones: the first.

    Equal arguments give the identical rule.

    Args:
      epsilon: threshold where the target is sure, in (0, 1].
      delta: factor of exp(-entropy), the threshold where it is not, in (0, 1].

    Returns:
      The rule; it needs ``Evidence``.

    Raises:
      ValueError: an argument is out of range.

    References: Cai et al., arXiv:2401.10774; the defaults are those of its published
    code. Differs from it: the threshold looks at t whatever the temperature, and the
    next token is drawn from p instead of being the argmax.
    """
    _check("epsilon", epsilon, 0, 1)
    _check("delta", delta, 0, 1)
    return _typical(float(epsilon), float(delta))


@functools.cache
def _typical(epsilon: float, delta: float) -> VerifyRule:
    def accept(proposal: ProposalLike, logprobs: Array) -> Array:
        p = jnp.exp(logprobs)
        # 0 log 0 is 0: banned tokens have -inf.
        terms = jnp.where(p > 0, p * jnp.where(p > 0, logprobs, 0.0), 0.0)
        entropy = -jnp.sum(terms, axis=-1)
        threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
        return of_tokens(p, proposal.tokens) > threshold

    return _by_evidence("typical", accept)


def relaxed(top_n: int = 10, delta: float = 0.6) -> VerifyRule:
    """Makes the relaxed rule: keeps drafts near the target's best token.

    Accepts draft x iff it is among the top_n tokens of t (ties: lowest id first) and
    t(x) >= max(t) - delta; after the first that is not, and after the last, the token
    is drawn from p. Lossy: a position that is drafted emits x with probability q(x)
    for every x in that set A, and otherwise a draw from p, in all
    q(x) [x in A] + (1 - q(A)) p(x). A filter of the request does not bind drafts. The
    argmax is always in A, so an argmax draft passes at temperature 0. Of a tree the
    longest path whose nodes all pass is kept, equally long ones: the first.

    Equal arguments give the identical rule.

    Args:
      top_n: tokens that may pass, at least 1.
      delta: how far below the largest probability they may be, in [0, 1].

    Returns:
      The rule; it needs ``Evidence``.

    Raises:
      ValueError: an argument is out of range.

    References: relaxed acceptance of TensorRT-LLM, there for the thinking part of an
    answer only; its defaults. Differs from it: every position of a request is relaxed.
    """
    if isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1:
        raise ValueError(f"{top_n=} must be a whole number >= 1.")
    _check("delta", delta, 0, 1, closed=True)
    return _relaxed(top_n, float(delta))


@functools.cache
def _relaxed(top_n: int, delta: float) -> VerifyRule:
    def accept(proposal: ProposalLike, logprobs: Array) -> Array:
        score = of_tokens(logprobs, proposal.tokens)
        index = lax.broadcasted_iota(jnp.int32, logprobs.shape, 2)
        ties_before = (logprobs == score[..., None]) & (
            index < proposal.tokens[..., None]
        )
        better = (logprobs > score[..., None]) | ties_before
        rank = jnp.sum(better, axis=-1)
        near = jnp.exp(score) >= jnp.exp(jnp.max(logprobs, axis=-1)) - delta
        # A banned token may be within delta of the best one.
        return (rank < top_n) & near & (score > -jnp.inf)

    return _by_evidence("relaxed", accept)


def lenient(leniency: float = 0.9) -> VerifyRule:
    """Makes the lenient rule: rejection that forgives some excess of the draft.

    Accepts draft x with probability min(1, p(x) / (l q(x))); on the first rejection
    draws from the normalised max(p - q, 0), as ``rejection`` does. Lossy for l below
    1: a position that is drafted emits x with probability
    min(q(x), p(x)/l) + r max(p(x) - q(x), 0) / Z, r being the probability of
    rejection and Z the sum of max(p - q, 0). Hence no token of probability p(x) comes
    more often than p(x)/l or than max(p(x), q(x)), none is lost that p and q have, and
    tokens that p excludes stay excluded. At l = 1, and at temperature 0, it decides as
    ``rejection`` does.

    Equal arguments give the identical rule.

    Args:
      leniency: l, in (0, 1].

    Returns:
      The rule.

    Raises:
      ValueError: the argument is out of range.

    References: Leviathan, Kalman and Matias, arXiv:2211.17192 (lenience).
    """
    _check("leniency", leniency, 0, 1)
    return _lenient(float(leniency))


@functools.cache
def _lenient(leniency: float) -> VerifyRule:
    def verify(
        proposal: ProposalLike,
        target_scores: Float[Array, "B N1 V"],
        noise: UniformNoise,
    ) -> Verdict:
        if proposal.parents is not None:
            refuse_trees("lenient")
        return reject(proposal, target_scores, noise, leniency=leniency)

    return VerifyRule(
        name="lenient",
        lossless=False,
        noise="uniform",
        greedy_only=False,
        verify=verify,
    )


def judge(score: Callable[[Any, Array], Array], threshold: float) -> VerifyRule:
    """Makes a rule that keeps what a judge of the target's features approves.

    Accepts draft x where its score is at least the threshold, or where it equals a
    token drawn from p; the first that is neither is replaced by that token. Lossy: a
    position that is drafted emits x with probability q(x) for every x the judge
    approves, and otherwise a draw from p, in all q(x) [x in A] + (1 - q(A)) p(x) with A
    the approved tokens. A judge that approves nothing is ``sample_and_match``. A token
    that the request bans is not accepted whatever its score.

    The same function and threshold give the identical rule.

    Args:
      score: (features, tokens [B, N]) -> scores [B, N], a pure function; see
        ``VerifyRule.judge``. Parameters of its own it closes over.
      threshold: least score of an approved draft, finite.

    Returns:
      The rule; it needs ``Evidence`` with ``judge_scores``.

    Raises:
      ValueError: the score is no function or the threshold no finite number.

    References: Bachmann et al., arXiv:2501.19309, whose judge is a linear head on the
    target's last hidden state of each draft token.
    """
    if not callable(score):
        raise ValueError(f"{score=} must be a function of (features, tokens).")
    most = sys.float_info.max
    _check("threshold", threshold, -most, most, closed=True)
    return _judge(score, float(threshold))


@functools.cache
def _judge(score: Callable[[Any, Array], Array], threshold: float) -> VerifyRule:
    def verify(
        proposal: ProposalLike,
        target_scores: Float[Array, "B N1 V"],
        noise: UniformNoise,
        evidence: Evidence,
    ) -> Verdict:
        if proposal.parents is not None:
            refuse_trees("judge")
        if evidence.judge_scores is None:
            raise ValueError("judge needs Evidence.judge_scores.")
        logprobs = evidence.target_logprobs[:, : proposal.tokens.shape[1]]
        possible = of_tokens(logprobs, proposal.tokens) > -jnp.inf
        approved = (evidence.judge_scores >= threshold) & possible
        return match_drawn(proposal, target_scores, noise, also=approved)

    return VerifyRule(
        name="judge",
        lossless=False,
        noise="uniform",
        greedy_only=False,
        verify=verify,
        evidence=True,
        judge=score,
    )


def _by_evidence(
    name: str, accept: Callable[[ProposalLike, Array], Array]
) -> VerifyRule:
    """Makes a rule that decides by t alone and draws the next token from p.

    Args:
      name: as in the registry.
      accept: (proposal, log t [B, N, V]) -> whether each draft passes, [B, N].
    """

    def verify(
        proposal: ProposalLike,
        target_scores: Float[Array, "B N1 V"],
        noise: UniformNoise,
        evidence: Evidence,
    ) -> Verdict:
        if proposal.parents is not None:
            return _longest(proposal, target_scores, noise, evidence, accept)
        n_drafts = proposal.tokens.shape[1]
        accepted = accept(proposal, evidence.target_logprobs[:, :n_drafts])
        n_accepted = accepted_prefix(accepted, proposal.n_valid)
        at = n_accepted[:, None, None]
        weights = target_law(jnp.take_along_axis(target_scores, at, axis=1))[:, 0]
        info = {
            "accept_prob": accepted.astype(weights.dtype),
            "next_weights": weights,
        }
        return Verdict(n_accepted, draw(weights, noise.draw), info)

    return VerifyRule(
        name=name,
        lossless=False,
        noise="uniform",
        greedy_only=False,
        verify=verify,
        evidence=True,
        trees="any",
    )


def _longest(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
    evidence: Evidence,
    accept: Callable[[ProposalLike, Array], Array],
) -> Verdict:
    """Keeps the longest path of a tree whose nodes all pass; equal ones: the first."""
    nodes = read_nodes(proposal)
    passed = accept(proposal, at_parent(nodes, evidence.target_logprobs))
    reached = ~jnp.any(nodes.above & ~(passed & nodes.valid)[:, None, :], axis=-1)
    depth = jnp.where(reached, jnp.sum(nodes.above, axis=-1), 0)
    if depth.shape[1]:
        deepest = jnp.argmax(depth, axis=1)
        reached &= nodes.above[jnp.arange(depth.shape[0]), deepest]
    kept = keep_path(reached)
    weights = target_law(at_row(target_scores, kept.row)[:, None])[:, 0]
    info = {"accept_prob": reached.astype(weights.dtype), "next_weights": weights}
    return kept.verdict(draw(weights, noise.draw), info)


def _check(
    name: str, value: float, low: float, high: float, *, closed: bool = False
) -> None:
    """Refuses what is no number in (low, high], or [low, high] if closed."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # NaN compares false with everything.
    if not (number and (low < value or (closed and low == value)) and value <= high):
        bracket = "[" if closed else "("
        raise ValueError(
            f"{name}={value!r} must be a number in {bracket}{low:g}, {high:g}]."
        )

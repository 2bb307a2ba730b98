"""What a draft length gains: the speed-up and the best gamma."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._acceptance import (
    GAMMA,
    expected_tokens_per_pass,
    tokens_by_gamma,
)
from specjax.theory._check import FloatArray, Values, one, plain, real, whole
from specjax.theory._pass_cost import VerifyCost, pass_cost

_MAX_GAMMA = 256


class BestGamma(NamedTuple):
    """The draft length that gains most.

    Attributes:
      gamma: draft tokens a pass; 0 where no draft pays.
      speedup: over plain decoding, at least 1.
      tokens_per_pass: expected, correction or bonus token included.
    """

    gamma: int
    speedup: float
    tokens_per_pass: float


def speedup(
    acceptance_rate: ArrayLike,
    gamma: ArrayLike,
    cost_ratio: ArrayLike,
    verify_cost: VerifyCost = 1.0,
) -> Values:
    """Computes the speed-up over plain decoding under i.i.d. acceptance.

    S = E(alpha, gamma) / (gamma c + v), exactly 1 at gamma = 0.

    Args:
      acceptance_rate: alpha in [0, 1].
      gamma: draft tokens a pass, whole and >= 0.
      cost_ratio: c >= 0, time of a draft step over a target decode step. A drafter
        that makes all gamma tokens at once has c = its time / gamma.
      verify_cost: v > 0, time of a (gamma + 1)-row pass over a one-row pass: one
        number, a table indexed by gamma (entry 0 is 1), or a function of the width
        gamma + 1. 1 is the papers' case.

    Returns:
      Plain seconds over speculative seconds for the same text; a float for scalars,
      else of the broadcast shape.

    Raises:
      ValueError: an argument is nan or outside its range, or the table is too short.

    References:
      Leviathan et al., 2023, arXiv:2211.17192, theorem 3.8, there with v = 1.
    """
    tokens = expected_tokens_per_pass(acceptance_rate, gamma)
    return speedup_from_tokens(tokens, gamma, cost_ratio, verify_cost)


def speedup_from_tokens(
    tokens_per_pass: ArrayLike,
    gamma: ArrayLike,
    cost_ratio: ArrayLike,
    verify_cost: VerifyCost = 1.0,
) -> Values:
    """Computes the speed-up from tokens per pass, measured or expected.

    S = tokens_per_pass / (gamma c + v).

    Args:
      tokens_per_pass: in [1, gamma + 1], correction or bonus token included.
      gamma: draft tokens of every pass, whole and >= 0.
      cost_ratio: c >= 0, as for ``speedup``.
      verify_cost: v > 0, as for ``speedup``.

    Returns:
      Plain seconds over speculative seconds; a float for scalars, else of the
      broadcast shape.

    Raises:
      ValueError: an argument is nan or outside its range, or the table is too short.
    """
    drafts = whole("gamma", gamma, remedy=GAMMA)
    remedy = "It counts accepted drafts and one token more, so at least 1."
    tokens = real("tokens_per_pass", tokens_per_pass, least=1, remedy=remedy)
    if np.any(tokens > (drafts + 1) * (1 + 1e-12)):
        raise ValueError(
            f"tokens_per_pass={tokens} exceeds gamma + 1 = {drafts + 1}; a pass "
            "commits no more than its drafts and one token."
        )
    return plain(tokens / pass_cost(drafts, cost_ratio, verify_cost))


def speedup_curve(
    acceptance: ArrayLike,
    cost_ratio: float,
    verify_cost: VerifyCost = 1.0,
    *,
    max_gamma: int | None = None,
) -> FloatArray:
    """Computes the speed-up of every gamma from 0 to max_gamma.

    Args:
      acceptance: one rate, taken as i.i.d., or a list of conditional acceptances by
        position (each given that all earlier drafts were accepted), [G].
      cost_ratio: c >= 0, as for ``speedup``.
      verify_cost: v > 0, as for ``speedup``.
      max_gamma: the longest draft; by default as far as ``acceptance`` and a table
        of ``verify_cost`` go, 256 where neither limits it.

    Returns:
      Speed-ups, shape [max_gamma + 1]; entry 0 is 1.

    Raises:
      ValueError: an argument is nan or outside its range, or max_gamma exceeds what
        was given.
    """
    longest = longest_gamma(acceptance, verify_cost, max_gamma)
    tokens = tokens_by_gamma(acceptance, longest)
    one("cost_ratio", np.asarray(cost_ratio, np.float64))
    return tokens / pass_cost(np.arange(longest + 1.0), cost_ratio, verify_cost)


def best_gamma(
    acceptance: ArrayLike,
    cost_ratio: float,
    verify_cost: VerifyCost = 1.0,
    *,
    max_gamma: int | None = None,
) -> BestGamma:
    """Finds the draft length of the greatest speed-up, by looking at all.

    For i.i.d. acceptance and constant v another draft pays while its chance of
    being accepted exceeds c times the speed-up already reached,
    alpha^(gamma + 1) > c S(gamma). The rule of thumb "gamma where alpha^gamma falls
    to c" leaves out S and drafts too much: at alpha = 0.7, c = 0.1 it says 6, and
    the best is 4.

    Args:
      acceptance: one rate, taken as i.i.d., or a list of conditional acceptances by
        position (each given that all earlier drafts were accepted), [G].
      cost_ratio: c >= 0, as for ``speedup``.
      verify_cost: v > 0, as for ``speedup``.
      max_gamma: as for ``speedup_curve``.

    Returns:
      The best gamma, the smallest of equals, and what it gives.

    Raises:
      ValueError: as for ``speedup_curve``.
    """
    curve = speedup_curve(acceptance, cost_ratio, verify_cost, max_gamma=max_gamma)
    best = int(np.argmax(curve))
    tokens = tokens_by_gamma(acceptance, best)[best]
    return BestGamma(best, float(curve[best]), float(tokens))


def longest_gamma(
    acceptance: ArrayLike, verify_cost: VerifyCost, max_gamma: int | None
) -> int:
    """Gives the greatest gamma to look at."""
    if max_gamma is not None:
        return int(one("max_gamma", whole("max_gamma", max_gamma, remedy=GAMMA)))
    limits = []
    if np.ndim(acceptance):
        limits.append(np.size(acceptance))
    if not callable(verify_cost) and np.ndim(verify_cost):
        limits.append(np.size(verify_cost) - 1)
    return min(limits, default=_MAX_GAMMA)

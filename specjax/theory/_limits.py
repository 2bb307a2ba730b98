"""Limits: the ceiling, break-even, and what speculation costs in arithmetic."""

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._acceptance import GAMMA, RATE, expected_tokens_per_pass
from specjax.theory._check import Values, one, plain, real, whole
from specjax.theory._pass_cost import COST, VerifyCost, pass_cost


def speedup_ceiling(cost_ratio: float, acceptance_rate: float = 1.0) -> float:
    """Computes the speed-up that no choice of draft lengths exceeds, v = 1.

    1 / (1 - alpha + c alpha): drafting stops, as if foretold, where the first draft
    would be rejected. At alpha = 1 this is 1 / c, the ceiling of long drafts that
    are always accepted. It is 1 where c >= 1, since drafting is then never worth it.

    Args:
      cost_ratio: c >= 0, time of a draft step over a target decode step.
      acceptance_rate: alpha in [0, 1], taken as i.i.d.

    Returns:
      The ceiling, >= 1; inf for a free drafter that is always right.

    Raises:
      ValueError: an argument is nan or outside its range.

    References:
      Leviathan et al., 2023, arXiv:2211.17192, theorem 3.8 with the tokens of its
      oracle gamma, 1 / (1 - alpha).
    """
    c = one("cost_ratio", real("cost_ratio", cost_ratio, least=0, remedy=COST))
    alpha = one(
        "acceptance_rate",
        real("acceptance_rate", acceptance_rate, least=0, most=1, remedy=RATE),
    )
    cost = 1 - alpha + min(c, 1.0) * alpha
    return 1 / cost if cost else float("inf")


def break_even_acceptance(
    gamma: int, cost_ratio: float, verify_cost: VerifyCost = 1.0
) -> float:
    """Finds the acceptance rate above which drafting gamma tokens gains.

    The alpha with E(alpha, gamma) = gamma c + v. At gamma = 1 it is c + v - 1, and
    with v = 1 no other gamma has a lower one: speculation can gain iff alpha > c.

    Args:
      gamma: draft tokens a pass, >= 1.
      cost_ratio: c >= 0, as for ``speedup``.
      verify_cost: v > 0, as for ``speedup``.

    Returns:
      alpha in [0, 1]: 0 if the pass costs no more than a plain step, inf if even
      drafts that are always accepted lose.

    Raises:
      ValueError: an argument is nan or outside its range.

    References:
      Leviathan et al., 2023, arXiv:2211.17192, corollary 3.9, there with v = 1.
    """
    drafts = whole(
        "gamma", gamma, least=1, remedy="At gamma 0 nothing is drafted or gained."
    )
    cost = one("pass cost", np.asarray(pass_cost(drafts, cost_ratio, verify_cost)))
    n = one("gamma", drafts) + 1
    if cost <= 1:
        return 0.0
    if cost > n:
        return float("inf")
    low, high = 0.0, 1.0
    for _ in range(64):
        middle = (low + high) / 2
        if np.asarray(expected_tokens_per_pass(middle, drafts)) < cost:
            low = middle
        else:
            high = middle
    return high


def operations_factor(
    acceptance_rate: ArrayLike, gamma: ArrayLike, ops_ratio: ArrayLike = 0.0
) -> Values:
    """Computes arithmetic operations a token over those of plain decoding.

    (1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma + 1)), which is
    (gamma c_hat + gamma + 1) / E: rejected rows are computed in vain. Speculation
    trades operations for memory reads, so it loses where arithmetic is the limit.

    Args:
      acceptance_rate: alpha in [0, 1].
      gamma: draft tokens a pass, whole and >= 0.
      ops_ratio: c_hat >= 0, operations of the drafter a token over the target's.

    Returns:
      The factor, >= 1; a float for scalars, else of the broadcast shape.

    Raises:
      ValueError: an argument is nan or outside its range.

    References:
      Leviathan et al., 2023, arXiv:2211.17192, theorem 3.11.
    """
    remedy = "It is the drafter's operations a token over the target's."
    ratio = real("ops_ratio", ops_ratio, least=0, remedy=remedy)
    drafts = whole("gamma", gamma, remedy=GAMMA)
    tokens = np.asarray(expected_tokens_per_pass(acceptance_rate, gamma))
    return plain((drafts * ratio + drafts + 1) / tokens)

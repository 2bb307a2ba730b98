"""From acceptance to tokens per pass.

Two descriptions of acceptance by draft position j = 1..gamma are in use:

- *conditional* a_j: the probability that draft j is accepted, given that drafts
  1..j-1 all were. This is what ``specjax.Stats.acceptance_at`` reports.
- *survival* (marginal) s_j: the probability that draft j is accepted, with no
  condition; since a rejection ends the pass, that is s_j = a_1 a_2 ... a_j.
  Counts of accepted drafts at j over passes estimate it.

The tokens of a pass are the accepted drafts and one more, the correction or bonus
token, so plain decoding is 1.
"""

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._check import FloatArray, Values, plain, real, whole

RATE = "It is a probability: accepted drafts over tested ones, or 1 - TV(p, q)."
GAMMA = "It counts draft tokens a pass; 0 is plain decoding."
_NAN = (
    "It is a probability given that all earlier drafts were accepted; where no draft "
    "reached a position (nan), cut the list before it."
)


def expected_tokens_per_pass(acceptance_rate: ArrayLike, gamma: ArrayLike) -> Values:
    """Computes tokens per pass where every draft is accepted alike, independently.

    E(alpha, gamma) = (1 - alpha^(gamma + 1)) / (1 - alpha), gamma + 1 at alpha = 1;
    it grows to 1 / (1 - alpha) for long drafts. The target's weights are read once a
    pass, so memory reads per token shrink by this factor.

    A rate pooled over positions (all accepted over all tested) gives too little
    where acceptance decays with the position, and a rate of the first positions
    gives too much where longer drafts are planned for: then use
    ``expected_tokens_from_conditional``.

    Args:
      acceptance_rate: alpha in [0, 1], any shape.
      gamma: draft tokens a pass, whole and >= 0, any shape that broadcasts; may be
        large.

    Returns:
      Tokens per pass, in [1, gamma + 1], correction or bonus token included; a float
      for scalars, else of the broadcast shape.

    Raises:
      ValueError: an argument is nan or outside its range.

    References:
      Leviathan et al., 2023, arXiv:2211.17192, equation 1.
    """
    alpha = real("acceptance_rate", acceptance_rate, least=0, most=1, remedy=RATE)
    n = whole("gamma", gamma, remedy=GAMMA) + 1
    with np.errstate(divide="ignore", invalid="ignore"):
        # 1 - alpha^n without cancellation, whatever alpha is.
        geometric = -np.expm1(n * np.log(alpha)) / (1 - alpha)
    # Rounding must not leave the range: 1 at gamma 0, exactly.
    return plain(np.where(alpha == 1, n, np.clip(geometric, 1, n)))


def expected_tokens_from_conditional(conditional: ArrayLike) -> Values:
    """Computes tokens per pass from acceptances by position.

    E = 1 + sum over j of a_1 a_2 ... a_j.

    Args:
      conditional: a_j in [0, 1], shape [..., G]: the probability that draft j is
        accepted, given that all earlier ones were. gamma is G, which may be 0.

    Returns:
      Tokens per pass, shape [...]: in [1, G + 1], correction or bonus included.

    Raises:
      ValueError: a number is nan or outside [0, 1], or there is no position axis.

    References:
      SPEED-Bench, 2026, arXiv:2604.09557 (acceptance length).
    """
    survival = np.asarray(survival_from_conditional(conditional))
    return plain(1 + survival.sum(axis=-1))


def survival_from_conditional(conditional: ArrayLike) -> FloatArray:
    """Turns conditional acceptances into survival, the running product.

    Args:
      conditional: a_j in [0, 1], shape [..., G].

    Returns:
      s_j = a_1 ... a_j, the marginal probability that draft j is accepted, [..., G];
      never growing along the last axis.

    Raises:
      ValueError: a number is nan or outside [0, 1], or there is no position axis.
    """
    array = real("conditional", conditional, least=0, most=1, remedy=_NAN)
    return np.cumprod(_positions("conditional", array), axis=-1)


def conditional_from_survival(survival: ArrayLike) -> FloatArray:
    """Turns survival, the marginal acceptances, into conditional ones.

    Args:
      survival: s_j in [0, 1], shape [..., G]: accepted drafts at position j over
        passes that drafted at least j tokens. Never growing along the last axis.

    Returns:
      a_j = s_j / s_(j-1) with s_0 = 1, shape [..., G]; 0 where s_(j-1) is 0, since
      nothing gets there.

    Raises:
      ValueError: a number is nan or outside [0, 1], the numbers grow with the
        position, or there is no position axis.
    """
    remedy = "It is a probability: accepted drafts at a position over passes."
    array = real("survival", survival, least=0, most=1, remedy=remedy)
    array = _positions("survival", array)
    before = np.concatenate([np.ones_like(array[..., :1]), array[..., :-1]], axis=-1)
    if np.any(array > before):
        raise ValueError(
            f"survival={array} grows with the position, which a rejection that ends "
            "the pass cannot give; if these are conditional acceptances, they need "
            "no conversion."
        )
    return np.divide(array, before, out=np.zeros_like(array), where=before > 0)


def tokens_by_gamma(acceptance: ArrayLike, max_gamma: int) -> FloatArray:
    """Computes tokens per pass for gamma 0..max_gamma, [max_gamma + 1].

    ``acceptance`` is one rate, taken as i.i.d., or conditional ones by position, at
    least ``max_gamma`` of them.
    """
    array = real("acceptance", acceptance, least=0, most=1, remedy=_NAN)
    if array.ndim == 0:
        return np.asarray(expected_tokens_per_pass(array, np.arange(max_gamma + 1)))
    if array.ndim > 1:
        raise ValueError(
            f"acceptance has shape {array.shape}; give one rate, or a list of "
            "conditional acceptances by position."
        )
    if array.size < max_gamma:
        raise ValueError(
            f"max_gamma={max_gamma} needs as many acceptances by position, not "
            f"{array.size}; measure with a longer draft or lower gamma."
        )
    return 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(array[:max_gamma]))])


def _positions(name: str, array: FloatArray) -> FloatArray:
    if array.ndim == 0:
        raise ValueError(
            f"{name}={float(array):g} has no position axis; give a list with one "
            "number a draft position, or use expected_tokens_per_pass."
        )
    return array

"""Acceptance from the laws themselves: two sets of logits, or ratios of drafts."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._check import FloatArray, Values, one, plain, real, whole


class Acceptance(NamedTuple):
    """How well a draft law serves a target law, row by row.

    Attributes:
      acceptance_rate: the probability that the rejection rule accepts a token of the
        draft law, sum over x of min(p, q) = 1 - TV(p, q).
      top1_agreement: 1 where the target's and the draft's most probable tokens are
        the same (lowest id on a tie), else 0: the acceptance of greedy decoding. It
        can be far from ``acceptance_rate`` on either side.
    """

    acceptance_rate: Values
    top1_agreement: Values


def acceptance_from_logits(
    target_logits: ArrayLike,
    draft_logits: ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    point_mass: bool = False,
) -> Acceptance:
    """Computes acceptance from the target's and the drafter's logits.

    Both are warped alike, in float64, by the library's one warp: temperature, then
    top-k, top-p, min-p. Average the rates over rows to get alpha.

    Args:
      target_logits: natural log scale, up to a constant a row, shape [..., V]; -inf
        removes a token.
      draft_logits: likewise, of the same shape.
      temperature: of both laws; 0 is the argmax, exactly.
      top_k: keep the k most probable tokens; 0 is off.
      top_p: keep the smallest set of most probable tokens whose mass reaches top_p;
        1 is off.
      min_p: keep tokens at least min_p times as probable as the most probable; 0 is
        off.
      point_mass: whether the drafter proposes its argmax rather than a sample. Its
        law is then one-hot and the rate is p of that token.

    Returns:
      Rate and agreement, each of shape [...].

    Raises:
      ValueError: shapes differ, a logit is nan or +inf, a row has no finite logit,
        or a setting is outside its range.

    References:
      Leviathan et al., 2023, arXiv:2211.17192, section 3.2 (beta and alpha).
    """
    p_logits = _logits("target_logits", target_logits)
    q_logits = _logits("draft_logits", draft_logits)
    if p_logits.shape != q_logits.shape:
        raise ValueError(
            f"target_logits have shape {p_logits.shape} and draft_logits "
            f"{q_logits.shape}; pad the smaller vocabulary with -inf."
        )
    settings = _check_warp(temperature, top_k, top_p, min_p)
    p = _law(p_logits, *settings)
    q = _law(q_logits, 0.0 if point_mass else settings[0], *settings[1:])
    agree = p_logits.argmax(axis=-1) == q_logits.argmax(axis=-1)
    return Acceptance(
        plain(np.minimum(p, q).sum(axis=-1)), plain(np.asarray(agree, np.float64))
    )


def expected_tokens_from_log_ratios(
    log_ratios: ArrayLike,
    *,
    rule: Literal["rejection", "block", "bound"] = "rejection",
    weights: ArrayLike | None = None,
) -> float:
    """Computes tokens per pass from log(p / q) of drafted tokens.

    Over whole drafts X of G tokens drawn from the draft law, r_i = p(X_i) / q(X_i)
    given the drafted prefix (verification scores all positions, also those after a
    rejection), tokens per pass are 1 + the mean over drafts of

    - ``rejection``: sum over j of min(1, r_1) ... min(1, r_j);
    - ``block``: sum over j of w_j, w_j = min(1, w_(j-1) r_j), w_0 = 1;
    - ``bound``: sum over j of min(1, r_1 ... r_j), which no verifier exceeds, even
      one that sees both laws in full.

    The expectation is exact if all drafts are given with their probabilities as
    weights, an unbiased estimate if they are samples. For drafts of looked-up or
    argmax tokens q is 1, and all three agree.

    Args:
      log_ratios: natural log, shape [N, G]; -inf where p is 0.
      rule: which verification.
      weights: of the drafts, [N], >= 0, normalised here; None weighs them alike.

    Returns:
      Tokens per pass, in [1, G + 1], correction or bonus token included.

    Raises:
      ValueError: shapes do not fit, a ratio is nan or +inf (a draft token has q > 0),
        weights are negative or all 0, or the rule is unknown.

    References:
      Sun et al., 2025, arXiv:2403.10444 (block verification).
    """
    logs = _log_ratios(log_ratios)
    if rule == "rejection":
        kept = np.cumsum(np.minimum(logs, 0), axis=1)
    elif rule == "bound":
        kept = np.minimum(np.cumsum(logs, axis=1), 0)
    elif rule == "block":
        kept = np.empty_like(logs)
        run = np.zeros(logs.shape[0])
        for j in range(logs.shape[1]):
            run = np.minimum(run + logs[:, j], 0)
            kept[:, j] = run
    else:
        raise ValueError(
            f"rule={rule!r} is unknown; use 'rejection', 'block' or 'bound'."
        )
    return float(1 + _weights(weights, logs.shape[0]) @ np.exp(kept).sum(axis=1))


def _log_ratios(log_ratios: ArrayLike) -> FloatArray:
    logs = np.asarray(log_ratios, np.float64)
    if logs.ndim != 2 or not logs.shape[0]:
        raise ValueError(
            f"log_ratios have shape {logs.shape}; give [N, G], one row a draft, N > 0."
        )
    if np.isnan(logs).any() or np.any(logs == np.inf):
        raise ValueError(
            "log_ratios hold nan or +inf, but a drafted token has q > 0; pass "
            "log p - log q of the tokens that were drawn, -inf where p is 0."
        )
    return logs


def _weights(weights: ArrayLike | None, n: int) -> FloatArray:
    if weights is None:
        return np.full(n, 1 / n)
    remedy = "Give the probability of each draft under the draft law."
    array = real("weights", weights, least=0, remedy=remedy)
    if array.shape != (n,) or not array.sum() > 0:
        raise ValueError(
            f"weights have shape {array.shape} and sum {array.sum():g}, but {n} drafts "
            f"need as many weights, not all 0. {remedy}"
        )
    return array / array.sum()


def _logits(name: str, value: ArrayLike) -> FloatArray:
    array = np.asarray(value, np.float64)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(f"{name} have shape {array.shape}; give [..., V], V > 0.")
    if np.isnan(array).any() or np.any(array == np.inf):
        raise ValueError(
            f"{name} hold nan or +inf; give logits of natural log scale, -inf for "
            "tokens that cannot be drawn."
        )
    if not np.isfinite(array).any(axis=-1).all():
        raise ValueError(f"{name} have a row of -inf only; leave such rows out.")
    return array


def _check_warp(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[float, int, float, float]:
    heat = real("temperature", temperature, least=0, remedy="0 is greedy.")
    k = whole("top_k", top_k, remedy="0 is off.")
    mass = real("top_p", top_p, least=0, most=1, open_least=True, remedy="1 is off.")
    floor = real("min_p", min_p, least=0, most=1, remedy="0 is off.")
    return (
        one("temperature", heat),
        int(one("top_k", k)),
        one("top_p", mass),
        one("min_p", floor),
    )


def _law(
    logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float
) -> FloatArray:
    """Warps logits to probabilities, [..., V]; ties go to the lowest id."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    scores = np.take_along_axis(logits, order, axis=-1)
    scores = scores - scores[..., :1]
    kept = np.zeros(scores.shape, bool)
    if temperature == 0:
        kept[..., 0] = True
    else:
        scores = scores / temperature
        kept[..., : top_k or None] = True
        mass = _normalise(np.where(kept, np.exp(scores), 0.0))
        if top_p < 1:
            kept &= np.cumsum(mass, axis=-1) - mass < top_p
        kept &= np.exp(scores) >= min_p
    law = np.zeros_like(scores)
    values = _normalise(np.where(kept, np.exp(scores), 0.0))
    np.put_along_axis(law, order, values, axis=-1)
    return law


def _normalise(weights: FloatArray) -> FloatArray:
    return weights / weights.sum(axis=-1, keepdims=True)

"""Advice in words, from the numbers."""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._acceptance import GAMMA, tokens_by_gamma
from specjax.theory._check import one, whole
from specjax.theory._deployment import (
    Deployment,
    gaining_batches,
    gaining_contexts,
    predict_cost_ratio,
    predict_verify_cost,
)
from specjax.theory._limits import break_even_acceptance, speedup_ceiling
from specjax.theory._pass_cost import VerifyCost, pass_cost
from specjax.theory._speedup import BestGamma, best_gamma, longest_gamma

#: Gains below this share are within what runs vary by.
_WORTH = 0.03


class Advice(NamedTuple):
    """What to change, and the numbers behind it.

    Attributes:
      speedup: predicted for the given gamma.
      best: the best gamma and its speed-up.
      ceiling: what wide passes at the price of narrow ones and an oracle of draft
        lengths would give, with the same acceptance and draft cost.
      break_even: the i.i.d. acceptance rate above which one draft a pass pays.
      lines: the advice, one sentence or two each, the most important first.
    """

    speedup: float
    best: BestGamma
    ceiling: float
    break_even: float
    lines: tuple[str, ...]


def advise(
    acceptance: ArrayLike,
    gamma: int,
    cost_ratio: float,
    verify_cost: VerifyCost = 1.0,
    *,
    max_gamma: int | None = None,
) -> Advice:
    """Says what to change: gamma, the drafter, or to switch speculation off.

    Args:
      acceptance: one rate, taken as i.i.d., or a list of conditional acceptances by
        position (each given that all earlier drafts were accepted), [G].
      gamma: draft tokens a pass now; whole, >= 0.
      cost_ratio: c >= 0, time of a draft step over a target decode step.
      verify_cost: v > 0, time of a (gamma + 1)-row pass over a one-row pass: one
        number, a table indexed by gamma (entry 0 is 1), or a function of the width.
      max_gamma: the longest draft to consider; by default as for ``speedup_curve``.

    Returns:
      The advice.

    Raises:
      ValueError: as for ``speedup_curve``.
    """
    drafts = whole("gamma", gamma, remedy=GAMMA)
    now = int(one("gamma", drafts))
    cost = one("pass cost", pass_cost(drafts, cost_ratio, verify_cost))
    speed = float(tokens_by_gamma(acceptance, now)[now] / cost)
    find = functools.partial(best_gamma, max_gamma=max_gamma)
    best = find(acceptance, cost_ratio, verify_cost)
    even = break_even_acceptance(1, cost_ratio, verify_cost)
    lines = [_on_gamma(now, speed, best, even)]
    if best.gamma:
        cheaper = find(acceptance, cost_ratio / 2, verify_cost).speedup
        fewer = (1 + np.asarray(acceptance, np.float64)) / 2
        better = find(fewer, cost_ratio, verify_cost).speedup
        lines.append(_on_drafter(cost_ratio, best.speedup, cheaper, better))
    return Advice(speed, best, _ceiling(acceptance, cost_ratio), even, tuple(lines))


def advise_deployment(
    deployment: Deployment,
    acceptance: ArrayLike,
    gamma: int,
    *,
    batch: int = 1,
    n_context: int = 0,
    max_gamma: int | None = None,
    max_batch: int = 4096,
) -> Advice:
    """Gives advice with costs from the roofline, batch and context included.

    Args:
      deployment: target, drafter and devices.
      acceptance: as for ``advise``.
      gamma: draft tokens a pass now; whole, >= 0.
      batch: sequences; whole, >= 1.
      n_context: cached tokens a sequence; whole, >= 0.
      max_gamma: the longest draft to consider.
      max_batch: the greatest batch to consider.

    Returns:
      The advice; further lines say from which batch speculation loses and in which
      contexts it gains.

    Raises:
      ValueError: as for ``predict_speedup``.
    """
    one("batch", whole("batch", batch, least=1, remedy="It counts sequences."))
    one("n_context", whole("n_context", n_context, remedy="It counts cached tokens."))
    now = int(one("gamma", whole("gamma", gamma, remedy=GAMMA)))
    at = {"batch": batch, "n_context": n_context}
    ratio = one("cost_ratio", np.asarray(predict_cost_ratio(deployment, **at)))
    widths = np.arange(1, 2 + max(now, longest_gamma(acceptance, 1.0, max_gamma)))
    costs = np.asarray(predict_verify_cost(deployment, widths, **at))
    advice = advise(acceptance, now, ratio, costs, max_gamma=max_gamma)
    drafts = now or advice.best.gamma
    if not drafts:
        return advice
    batches = gaining_batches(
        deployment, acceptance, drafts, n_context=n_context, max_batch=max_batch
    )
    contexts = gaining_contexts(deployment, acceptance, drafts, batch=batch)
    more = (
        _on_batch(drafts, batch, n_context, batches, max_batch),
        _on_context(drafts, batch, contexts),
    )
    return advice._replace(lines=(*advice.lines, *more))


def _ceiling(acceptance: ArrayLike, cost_ratio: float) -> float:
    """Gives what an oracle of draft lengths reaches, v = 1."""
    if np.ndim(acceptance) == 0:
        return speedup_ceiling(cost_ratio, float(np.asarray(acceptance, np.float64)))
    accepted = tokens_by_gamma(acceptance, np.size(acceptance))[-1] - 1
    return float((1 + accepted) / (1 + min(cost_ratio, 1.0) * accepted))


def _on_gamma(now: int, speed: float, best: BestGamma, even: float) -> str:
    if not best.gamma:
        need = (
            f"one draft a pass pays only above an acceptance rate of {even:.2f}"
            if even <= 1
            else "one draft a pass loses even if always accepted"
        )
        return f"Switch speculation off: no gamma gains; {need}."
    if now == best.gamma:
        return f"Keep gamma {now}: it is the best and gives {speed:.2f}."
    if speed >= 1 and best.speedup <= speed * (1 + _WORTH):
        return (
            f"Keep gamma {now}: it gives {speed:.2f}, hardly less than the best, "
            f"{best.gamma}, with {best.speedup:.2f}."
        )
    verb = "Raise" if best.gamma > now else "Lower"
    loses = ", which is slower than plain decoding" if speed < 1 else ""
    return (
        f"{verb} gamma from {now} to {best.gamma}: {best.speedup:.2f} instead of "
        f"{speed:.2f}{loses}."
    )


def _on_drafter(cost_ratio: float, now: float, cheaper: float, better: float) -> str:
    if not cost_ratio:
        return (
            "The drafter costs nothing, so only accuracy can gain: with half its "
            f"rejections the best would be {better:.2f}, now {now:.2f}."
        )
    way = "a cheaper drafter" if cheaper > better else "a more accurate drafter"
    return (
        f"If the drafter is to change, look for {way}: at half its cost the best "
        f"would be {cheaper:.2f}, with half its rejections {better:.2f}, now {now:.2f}."
    )


def _on_batch(
    gamma: int,
    batch: int,
    n_context: int,
    gaining: tuple[int, int] | None,
    max_batch: int,
) -> str:
    at = f"with gamma {gamma} in a context of {n_context}"
    if gaining is None:
        return f"Switch speculation off: {at} no batch up to {max_batch} gains."
    first, last = gaining
    now = "" if first <= batch <= last else f" Batch {batch} loses."
    if last < max_batch:
        below = f" and below {first}" if first > 1 else ""
        return f"Switch speculation off above batch {last}{below}, {at}.{now}"
    if first > 1:
        return f"Switch speculation off below batch {first}, {at}.{now}"
    return f"Every batch up to {max_batch} gains, {at}."


def _on_context(gamma: int, batch: int, gaining: tuple[int, int] | None) -> str:
    at = f"with gamma {gamma} at batch {batch}"
    if gaining is None:
        return f"No context gains, {at}."
    return f"Contexts of {gaining[0]} to {gaining[1]} tokens gain, {at}."

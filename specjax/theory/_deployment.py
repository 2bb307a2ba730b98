"""Predictions for one target, drafter and set of devices, from the roofline alone."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._acceptance import GAMMA, tokens_by_gamma
from specjax.theory._check import Values, one, plain, whole
from specjax.theory._hardware import Hardware, Rate
from specjax.theory._model_shape import ModelShape
from specjax.theory._roofline import pass_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is run on what.

    Attributes:
      target: counts of the target.
      hardware: one device.
      draft: counts of the draft model, None for a drafter that costs nothing
        (looked-up drafts). A self-draft with a bounded cache is the target's counts
        with ``draft_context``.
      draft_context: the most cached tokens that the drafter attends, None for all.
      n_devices: of tensor parallelism, for target and drafter alike.
      rate: number format of the arithmetic.
    """

    target: ModelShape
    hardware: Hardware
    draft: ModelShape | None = None
    draft_context: int | None = None
    n_devices: int = 1
    rate: Rate = "bf16"


def predict_verify_cost(
    deployment: Deployment,
    width: ArrayLike,
    *,
    batch: ArrayLike = 1,
    n_context: ArrayLike = 0,
) -> Values:
    """Predicts v, the time of a pass of ``width`` rows over a one-row pass.

    Args:
      deployment: target and devices.
      width: rows a sequence, gamma + 1; whole, >= 1.
      batch: sequences; whole, >= 1.
      n_context: cached tokens a sequence; whole, >= 0.

    Returns:
      v >= 1, of the broadcast shape; near 1 while memory is the limit, near ``width``
      where arithmetic is.

    Raises:
      ValueError: as for ``pass_time``.
    """
    return plain(
        _target_s(deployment, width, batch, n_context)
        / _target_s(deployment, 1, batch, n_context)
    )


def predict_cost_ratio(
    deployment: Deployment, *, batch: ArrayLike = 1, n_context: ArrayLike = 0
) -> Values:
    """Predicts c, the time of a draft step over a target decode step.

    Args:
      deployment: target, drafter and devices.
      batch: sequences; whole, >= 1.
      n_context: cached tokens a sequence; whole, >= 0.

    Returns:
      c >= 0, of the broadcast shape; 0 for a drafter that costs nothing.

    Raises:
      ValueError: as for ``pass_time``.
    """
    target_s = _target_s(deployment, 1, batch, n_context)
    if deployment.draft is None:
        return plain(np.zeros_like(target_s))
    context = whole("n_context", n_context, remedy="It counts cached tokens.")
    if deployment.draft_context is not None:
        remedy = "It counts cached tokens; None is all of them."
        most = whole("draft_context", deployment.draft_context, remedy=remedy)
        context = np.minimum(context, most)
    draft = pass_time(
        deployment.draft,
        deployment.hardware,
        batch=batch,
        n_context=context,
        n_devices=deployment.n_devices,
        rate=deployment.rate,
    )
    return plain(np.asarray(draft.total_s) / target_s)


def predict_speedup(
    deployment: Deployment,
    acceptance: ArrayLike,
    gamma: int,
    *,
    batch: ArrayLike = 1,
    n_context: ArrayLike = 0,
) -> Values:
    """Predicts the speed-up over plain decoding at the same batch and context.

    S = E / (gamma c + v) with c and v from the roofline. It is also the ratio of
    throughputs.

    Args:
      deployment: target, drafter and devices.
      acceptance: one rate, taken as i.i.d., or a list of conditional acceptances by
        position (each given that all earlier drafts were accepted), [G].
      gamma: draft tokens a pass; whole, >= 0.
      batch: sequences; whole, >= 1.
      n_context: cached tokens a sequence; whole, >= 0.

    Returns:
      The speed-up, of the broadcast shape of batch and n_context.

    Raises:
      ValueError: as for ``pass_time`` and ``speedup_curve``.
    """
    drafts = int(one("gamma", whole("gamma", gamma, remedy=GAMMA)))
    tokens = tokens_by_gamma(acceptance, drafts)[drafts]
    at = {"batch": batch, "n_context": n_context}
    c = np.asarray(predict_cost_ratio(deployment, **at))
    v = np.asarray(predict_verify_cost(deployment, drafts + 1, **at))
    return plain(np.asarray(tokens / (drafts * c + v)))


def gaining_batches(
    deployment: Deployment,
    acceptance: ArrayLike,
    gamma: int,
    *,
    n_context: int = 0,
    max_batch: int = 4096,
) -> tuple[int, int] | None:
    """Finds the least and the greatest batch at which speculation gains.

    Most loses at a large batch, where arithmetic is the limit. A self-draft with a
    bounded cache loses at a small one, where it reads as many weights as the target,
    and in a long context gains more and more as the batch grows.

    Args:
      deployment: target, drafter and devices.
      acceptance: as for ``predict_speedup``.
      gamma: draft tokens a pass; whole, >= 1.
      n_context: cached tokens a sequence.
      max_batch: the greatest batch looked at. Whether its cache fits in memory is not
        looked at.

    Returns:
      The first and the last batch up to max_batch whose predicted speed-up exceeds
      1, or None if there is none.

    Raises:
      ValueError: as for ``predict_speedup``.

    References:
      Chen et al., 2024, arXiv:2408.11049 (MagicDec).
    """
    _at_least_one(gamma)
    most = whole("max_batch", max_batch, least=1, remedy="It counts sequences.")
    batches = np.arange(1, int(one("max_batch", most)) + 1)
    return _ends(
        batches,
        predict_speedup(
            deployment, acceptance, gamma, batch=batches, n_context=n_context
        ),
    )


def losing_batch(
    deployment: Deployment,
    acceptance: ArrayLike,
    gamma: int,
    *,
    n_context: int = 0,
    max_batch: int = 4096,
) -> int | None:
    """Finds the batch from which on speculation loses.

    Args:
      deployment: target, drafter and devices.
      acceptance: as for ``predict_speedup``.
      gamma: draft tokens a pass; whole, >= 1.
      n_context: cached tokens a sequence.
      max_batch: the greatest batch looked at.

    Returns:
      The least batch such that it and all greater ones up to max_batch have a
      predicted speed-up of at most 1; None if max_batch itself gains.

    Raises:
      ValueError: as for ``predict_speedup``.
    """
    gaining = gaining_batches(
        deployment, acceptance, gamma, n_context=n_context, max_batch=max_batch
    )
    last = gaining[1] if gaining else 0
    return None if last == max_batch else last + 1


def gaining_contexts(
    deployment: Deployment,
    acceptance: ArrayLike,
    gamma: int,
    *,
    batch: int = 1,
    max_context: int = 131072,
) -> tuple[int, int] | None:
    """Finds the least and the greatest context in which speculation gains.

    At a large batch a short context loses, because products are bound by arithmetic,
    and a long one may gain, because the cache is bound by memory; a drafter whose
    own cache grows may lose in a long one.

    Args:
      deployment: target, drafter and devices.
      acceptance: as for ``predict_speedup``.
      gamma: draft tokens a pass; whole, >= 1.
      batch: sequences.
      max_context: the longest context looked at, cached tokens a sequence.

    Returns:
      The first and the last context up to max_context whose predicted speed-up
      exceeds 1, or None if there is none.

    Raises:
      ValueError: as for ``predict_speedup``.
    """
    _at_least_one(gamma)
    most = whole("max_context", max_context, remedy="It counts cached tokens.")
    contexts = np.arange(int(one("max_context", most)) + 1)
    return _ends(
        contexts,
        predict_speedup(deployment, acceptance, gamma, batch=batch, n_context=contexts),
    )


def _ends(points: np.ndarray, speedups: Values) -> tuple[int, int] | None:
    """Gives the first and the last point that gains."""
    gaining = points[np.asarray(speedups) > 1]
    return (int(gaining[0]), int(gaining[-1])) if gaining.size else None


def _at_least_one(gamma: int) -> None:
    whole("gamma", gamma, least=1, remedy="At gamma 0 nothing is drafted or gained.")


def _target_s(
    deployment: Deployment, width: ArrayLike, batch: ArrayLike, n_context: ArrayLike
) -> np.ndarray:
    """Gives the target's seconds a pass."""
    time = pass_time(
        deployment.target,
        deployment.hardware,
        width=width,
        batch=batch,
        n_context=n_context,
        n_devices=deployment.n_devices,
        rate=deployment.rate,
    )
    return np.asarray(time.total_s)

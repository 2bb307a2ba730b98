"""What speculation gains, by class of text: theory's arithmetic on what is known.

A drafter may propose nothing in some passes, which then are one row wide. Where it does
is a matter of the text: let t be the share of the text's tokens that come from passes
with drafts, of which a pass of gamma drafts commits D = 1 + a_1 + a_1 a_2 + ... The
average pass then commits E tokens, and a share f of the passes is wide,

    E = D / ((1 - t) D + t),    f = t / ((1 - t) D + t),

so that the speed-up is E / (gamma c + 1 - f + f v): the theory's, with a verify cost of
1 - f + f v and with the acceptances that give E. With t = 1 nothing changes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax import theory
from specjax.bench._plan_settings import Numbers, PlanSettings, positions
from specjax.drafters import PassCosts


@dataclasses.dataclass(frozen=True)
class Run:
    """What decoding a class of texts gave with one draft length.

    Attributes:
      gamma: draft tokens a pass.
      speedup: seconds of plain decoding over seconds of this, measured in turn.
      tokens_per_pass: tokens committed a pass.
      drafted: share of the passes in which anything was drafted.
      accepted_at: drafts kept at each draft position.
      reached_at: drafts at each position whose predecessors were all kept.
    """

    gamma: int
    speedup: float
    tokens_per_pass: float
    drafted: float
    accepted_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Profile:
    """How a drafter does on a class of texts.

    Attributes:
      name: of the class.
      acceptance: one rate, taken as i.i.d., or acceptances by draft position, each
        given that all earlier drafts were accepted.
      drafted: share of the tokens that come from passes with drafts.
      runs: what decoding gave, by growing gamma; empty where nothing was decoded.
    """

    name: str
    acceptance: Numbers
    drafted: float = 1.0
    runs: tuple[Run, ...] = ()


@dataclasses.dataclass(frozen=True)
class Costs:
    """What passes cost, in one-row passes of the target.

    Attributes:
      cost_ratio: c, one draft step.
      verify_cost: v, one number for all widths, or by gamma from 0 on.
      by_batch: v of a (gamma + 1)-row pass by batch, each over the one-row pass of the
        same batch; empty where not known.
      one_row_s: seconds of a pass of one row a sequence, at the batch that the costs
        were measured at, or None where not known.
    """

    cost_ratio: float
    verify_cost: Numbers
    by_batch: Mapping[int, float] = dataclasses.field(default_factory=dict)
    one_row_s: float | None = None

    def pass_costs(self, gamma: int) -> PassCosts:
        """What ``drafters.adaptive`` needs of it.

        Args:
          gamma: drafts a pass of the drafter that is to be adaptive.

        Returns:
          The costs of passes of 0 to gamma drafts.

        Raises:
          ValueError: fewer widths were measured.
        """
        if isinstance(self.verify_cost, int | float):
            verify = (1.0, *[float(self.verify_cost)] * gamma)
        else:
            verify = tuple(map(float, self.verify_cost))
        if len(verify) <= gamma:
            raise ValueError(
                f"The costs reach to {len(verify) - 1} drafts and {gamma=}: measure "
                f"them with max_gamma={gamma} or more."
            )
        return PassCosts(self.cost_ratio, verify[: gamma + 1])


@dataclasses.dataclass(frozen=True)
class ClassPlan:
    """Predictions for one class, beside what was measured.

    Attributes:
      profile: of the class.
      predicted: speed-up at the gamma in use.
      best: the gamma of the greatest speed-up.
      curve: speed-up of every gamma from 0 on.
      efficiency: of each of the profile's runs: measured speed-up over
        tokens per pass / (gamma c + v). What is missing to 1 is what the loop, the
        rule and the commit take, and noise.
      by_batch: speed-up at the gamma in use, by batch.
      advice: what to change, in sentences.
    """

    profile: Profile
    predicted: float
    best: theory.BestGamma
    curve: tuple[float, ...]
    efficiency: tuple[float, ...]
    by_batch: Mapping[int, float]
    advice: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SpeculationPlan:
    """Everything that ``scripts/plan.py`` shows.

    Attributes:
      settings: what was asked.
      max_gamma: the longest draft considered.
      costs: of passes.
      classes: predictions for each class of texts.
    """

    settings: PlanSettings
    max_gamma: int
    costs: Costs
    classes: tuple[ClassPlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it as plain JSON values."""
        record = dataclasses.asdict(self)
        for plan in record["classes"]:
            plan["best"] = plan["best"]._asdict()
        return record


def plan_class(
    profile: Profile,
    costs: Costs,
    *,
    gamma: int,
    max_gamma: int,
    deployment: theory.Deployment | None = None,
    n_context: int = 0,
) -> ClassPlan:
    """Applies the theory to one class.

    Args:
      profile: acceptance of the class.
      costs: of passes, up to ``max_gamma`` where by gamma.
      gamma: draft tokens a pass in use, >= 1.
      max_gamma: the longest draft to consider, >= gamma.
      deployment: where costs are its roofline's, the advice says more about batches
        and contexts.
      n_context: cached tokens a sequence, for that.

    Returns:
      The predictions.

    Raises:
      ValueError: a number is outside its range, or a list is too short.
    """
    acceptance, verify = _average(profile, costs.verify_cost, max_gamma)
    c = costs.cost_ratio
    curve = theory.speedup_curve(acceptance, c, verify, max_gamma=max_gamma)
    efficiency = tuple(_efficiency(run, costs) for run in profile.runs)
    by_batch = {
        batch: _at_batch(profile, c, v, gamma, batch)
        for batch, v in costs.by_batch.items()
    }
    if deployment is not None:
        advice = theory.advise_deployment(
            deployment, acceptance, gamma, n_context=n_context, max_gamma=max_gamma
        )
        lines = advice.lines
    else:
        advice = theory.advise(acceptance, gamma, c, verify, max_gamma=max_gamma)
        lines = (*_lines(profile, costs, advice, max_gamma), *_on(by_batch, gamma))
    return ClassPlan(
        profile=profile,
        predicted=advice.speedup,
        best=advice.best,
        curve=tuple(map(float, curve)),
        efficiency=efficiency,
        by_batch=by_batch,
        advice=lines,
    )


def _mixture(profile: Profile, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives E and f of the module for gamma 0..n, [n + 1] each."""
    a = positions(profile.acceptance, n)
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(a))])
    passes = (1 - profile.drafted) * tokens + profile.drafted
    return tokens / passes, profile.drafted / passes


def _average(
    profile: Profile, verify: Numbers, max_gamma: int
) -> tuple[Numbers, Numbers]:
    """Gives acceptances and verify costs of the average pass; see the module."""
    if profile.drafted == 1:
        given = profile.acceptance
        rate = not isinstance(given, tuple)
        return given if rate else positions(given, max_gamma), verify
    tokens, wide = _mixture(profile, max_gamma)
    # What is gained by each draft more never grows; rounding must not say otherwise.
    survival = np.minimum.accumulate(np.maximum(np.diff(tokens), 0.0))
    costs = 1 - wide + wide * _by_gamma(verify, max_gamma)
    costs[0] = 1.0
    a = theory.conditional_from_survival(survival)
    return tuple(map(float, a)), tuple(map(float, costs))


def _by_gamma(verify: Numbers, max_gamma: int) -> np.ndarray:
    """Gives v of gamma 0..max_gamma."""
    if isinstance(verify, tuple):
        return np.asarray(verify[: max_gamma + 1])
    return np.asarray([1.0] + [verify] * max_gamma)


def _efficiency(run: Run, costs: Costs) -> float:
    """Gives the measured speed-up over what its own tokens and widths promise."""
    wide = _by_gamma(costs.verify_cost, run.gamma)[run.gamma]
    cost = 1 - run.drafted + run.drafted * wide
    expected = theory.speedup_from_tokens(
        run.tokens_per_pass, run.gamma, costs.cost_ratio, cost
    )
    return float(run.speedup / expected)


def _at_batch(profile: Profile, c: float, v: float, gamma: int, batch: int) -> float:
    """Predicts the speed-up of a batch of one class, rows drafting independently.

    A pass is wide for all rows where one of them drafts.
    """
    tokens, share = (x[gamma] for x in _mixture(profile, gamma))
    wide = 1 - (1 - share) ** batch
    return float(theory.speedup_from_tokens(tokens, gamma, c, 1 - wide + wide * v))


def _lines(
    profile: Profile, costs: Costs, advice: theory.Advice, max_gamma: int
) -> tuple[str, ...]:
    """Gives theory's advice, in words that fit a drafter that is silent at times."""
    if profile.drafted == 1:
        return advice.lines
    if profile.drafted == 0:
        return ("Change the drafter: it proposed nothing on these texts.",)
    if not advice.best.gamma:
        even = _break_even(profile.drafted, costs)
        need = (
            f"one draft pays only above an acceptance rate of {even:.2f}"
            if even <= 1
            else "one draft loses even if always accepted"
        )
        return (f"Switch speculation off: no gamma gains; where it drafts, {need}.",)
    a = np.asarray(positions(profile.acceptance, max_gamma))

    def best(**changes: Any) -> float:
        changed = dataclasses.replace(profile, **changes)
        acceptance, verify = _average(changed, costs.verify_cost, max_gamma)
        return theory.best_gamma(
            acceptance, costs.cost_ratio, verify, max_gamma=max_gamma
        ).speedup

    return (
        advice.lines[0],
        f"Of the text {profile.drafted:.0%} comes from passes with drafts. If the "
        "drafter is to change: with half its rejections the best would be "
        f"{best(acceptance=tuple((1 + a) / 2)):.2f}, with drafts as good in every pass "
        f"{best(drafted=1.0):.2f}, now {advice.best.speedup:.2f}.",
    )


def _break_even(drafted: float, costs: Costs) -> float:
    """Gives the a_1 with E = c + 1 - f + f v at gamma 1; above it one draft pays."""
    c, v = costs.cost_ratio, _by_gamma(costs.verify_cost, 1)[1]
    gained = drafted - c * (1 - drafted)
    return max(drafted * (c + v) / gained - 1, 0.0) if gained > 0 else np.inf


def _on(by_batch: Mapping[int, float], gamma: int) -> tuple[str, ...]:
    """Says above which of the batches looked at speculation loses."""
    if len(by_batch) < 2:
        return ()
    batches = sorted(by_batch)
    listed = ", ".join(map(str, batches))
    gaining = [batch for batch in batches if round(by_batch[batch], 2) > 1]
    if not gaining:
        return (f"With gamma {gamma} none of the batches {listed} gains.",)
    each = ", ".join(f"{batch} ({by_batch[batch]:.2f})" for batch in gaining)
    most = gaining[-1]
    then = f" Switch speculation off above {most}." if most < batches[-1] else ""
    return (f"With gamma {gamma} these of the batches {listed} gain: {each}.{then}",)

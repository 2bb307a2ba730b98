"""Plain decoding and drafters on the same prompts, in turn, beside what theory says."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specjax import verify
from specjax.bench._plan import Costs
from specjax.bench._plan_measure import measure_costs
from specjax.bench._speed import Measurement, measure
from specjax.decode import Engine, Request, Stats
from specjax.drafters import (
    DrafterSpec,
    adaptive,
    check_name,
    for_target,
    plain,
)

if TYPE_CHECKING:
    from specjax.weights import Model


@dataclasses.dataclass(frozen=True)
class Entry:
    """A drafter to measure, by name.

    Attributes:
      drafter: its name, as ``drafters.usages`` has them.
      gamma: draft tokens a pass.
      adapts: whether ``drafters.adaptive`` chooses how many of them.
    """

    drafter: str
    gamma: int
    adapts: bool = False

    @property
    def name(self) -> str:
        """How the entry is written."""
        inner = f"adaptive({self.drafter})" if self.adapts else self.drafter
        return f"{inner}@{self.gamma}"

    @classmethod
    def parse(cls, text: str, gamma: int) -> "Entry":
        """Reads ``NAME``, ``NAME@GAMMA`` or ``adaptive(NAME)@GAMMA``.

        Args:
          text: the entry.
          gamma: where none is given.

        Returns:
          The entry.

        Raises:
          ValueError: it is not understood, or drafts nothing.
        """
        name, at, number = text.strip().partition("@")
        if at and not number.isdecimal():
            raise ValueError(
                f"{text!r} is not understood; write NAME, NAME@GAMMA or "
                "adaptive(NAME)@GAMMA."
            )
        gamma = int(number) if at else gamma
        adapts = name.startswith("adaptive(") and name.endswith(")")
        name = name[len("adaptive(") : -1] if adapts else name
        check_name(name, gamma)
        if name == "plain":
            raise ValueError("plain decoding is always measured; leave it out.")
        return cls(name, gamma, adapts)


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a drafter did on a class of texts.

    Attributes:
      speedup: seconds of plain decoding over seconds of this, all prompts of a round
        together; the median of the rounds.
      tokens_per_s: median over prompts and rounds.
      tokens_per_pass: tau, tokens committed a pass.
      acceptance: alpha, drafts kept of those that were tested (a draft is, if all
        before it were kept).
      accepted_at: the same by draft position; NaN where none was tested.
      drafted: share of the passes in which anything was drafted.
      pass_cost: gamma c + v of the average pass, in plain passes.
      predicted: tau / (gamma c + v).
    """

    speedup: float
    tokens_per_s: float
    tokens_per_pass: float
    acceptance: float
    accepted_at: tuple[float, ...]
    drafted: float
    pass_cost: float
    predicted: float

    @property
    def efficiency(self) -> float:
        """Measured over predicted: what is missing to 1 the loop takes, or is noise."""
        return self.speedup / self.predicted


class Contest:
    """Plain decoding and some drafters, each with an engine of its own.

    Attributes:
      costs: of each entry's passes, by the entry's name.
    """

    def __init__(
        self,
        model: "Model",
        entries: Sequence[Entry],
        *,
        capacity: int,
        n_context: int,
        rounds: int = 3,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Times passes and drafters alone, and makes the engines.

        Args:
          model: the target.
          entries: what to measure beside plain decoding.
          capacity: of the engines' slots.
          n_context: tokens in the cache while passes are timed.
          rounds: repetitions of that.
          tell: is given a line before each thing that takes time.

        Raises:
          ValueError: a drafter does not go with the model, or passes do not fit it.
        """
        self.costs: dict[str, Costs] = {}
        self._specs: dict[str, DrafterSpec] = {}
        self._engines = {"plain": self._engine(model, plain(), capacity)}
        drafts = {e: for_target(e.drafter, e.gamma, model) for e in entries}
        # Of a tree these are its nodes.
        longest = max((d.drafter.spec.gamma for d in drafts.values()), default=1)
        verify_cost = None
        for entry, made in drafts.items():
            tell(f"timing {entry.name}")
            own = made.drafter.spec.exit_block
            costs = measure_costs(
                model,
                made,
                max_gamma=entry.gamma if own else longest,
                n_context=n_context,
                rounds=rounds,
                verify_cost=None if own else verify_cost,
            )
            if not own:
                # One target, one set of passes.
                verify_cost = costs.verify_cost
            if entry.adapts:
                made = adaptive(made, costs.pass_costs(entry.gamma))
            self.costs[entry.name] = costs
            self._engines[entry.name] = self._engine(model, made, capacity)
            self._specs[entry.name] = made.drafter.spec

    def _engine(self, model: "Model", drafter, capacity: int) -> Engine:
        return Engine(
            model,
            drafter=drafter,
            rule=verify.coupled,
            batch_size=1,
            capacity=capacity,
        )

    def measure(self, request: Request) -> dict[str, Measurement]:
        """Times one request with every engine, one after the other."""
        return {name: measure(it, request) for name, it in self._engines.items()}

    def standing(
        self, name: str, runs: Sequence[Measurement], baseline: Sequence[float]
    ) -> Standing:
        """Sums up what an entry did.

        Args:
          name: of the entry.
          runs: its measurements: prompt after prompt, each with all its rounds.
          baseline: seconds of plain decoding, by round, of all prompts together.

        Returns:
          The standing.
        """
        return stand(runs, baseline, self.costs[name], self._specs[name])


def stand(
    runs: Sequence[Measurement],
    baseline: Sequence[float],
    costs: Costs,
    spec: DrafterSpec,
) -> Standing:
    """See ``Contest.standing``."""
    stats = Stats.total([m.stats for m in runs if m.stats is not None])
    seconds = round_seconds(runs, len(baseline))
    pairs = zip(baseline, seconds, strict=True)
    cost = _pass_cost(stats, costs, spec)
    tau = stats.committed / stats.passes
    tested = sum(stats.reached_at)
    return Standing(
        speedup=statistics.median(a / b for a, b in pairs),
        tokens_per_s=statistics.median(m.tokens_per_s for m in runs),
        tokens_per_pass=tau,
        acceptance=sum(stats.accepted_at) / tested if tested else math.nan,
        accepted_at=stats.acceptance_at,
        drafted=stats.verified_at[0] / stats.passes,
        pass_cost=cost,
        predicted=tau / cost,
    )


def round_seconds(runs: Sequence[Measurement], n_rounds: int) -> list[float]:
    """Returns seconds of all prompts together, by round."""
    return [sum(m.decode_s for m in runs[turn::n_rounds]) for turn in range(n_rounds)]


def _pass_cost(stats: Stats, costs: Costs, spec: DrafterSpec) -> float:
    """Returns what the average pass should have cost, in plain passes."""
    gamma = spec.gamma
    prices = costs.pass_costs(gamma)
    # A search costs the same however little of what it finds is looked at; a model is
    # asked for so many drafts as will be.
    steps = spec.draws != "point" or bool(spec.on_target)
    if spec.depth:
        # What is counted of a tree are its levels; it is verified whole.
        wide = stats.verified_at[0] / stats.passes
        drafting = prices.draft * gamma * (wide if steps else 1.0)
        return drafting + wide * prices.verify[gamma] + 1 - wide
    at_least = [stats.passes, *stats.verified_at, 0]
    total = 0.0
    for n in range(gamma + 1):
        n_passes = at_least[n] - at_least[n + 1]
        widest = min((w for w in (0, *spec.bank, gamma) if w >= n), default=gamma)
        drafting = prices.draft * (n if steps else gamma)
        total += n_passes * (drafting + prices.verify[widest])
    return total / stats.passes


def stand_all(
    contest: Contest, series: Mapping[str, Sequence[Measurement]], n_rounds: int
) -> dict[str, Standing]:
    """Sums up a class of prompts.

    Args:
      contest: what was measured.
      series: measurements by name, those of plain decoding as ``plain``.
      n_rounds: rounds of each prompt.

    Returns:
      Standings by entry.
    """
    baseline = round_seconds(series["plain"], n_rounds)
    return {
        name: contest.standing(name, runs, baseline)
        for name, runs in series.items()
        if name in contest.costs
    }

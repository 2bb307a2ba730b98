"""Searching for a self-draft: texts, costs, the search, and a look at other texts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from specjax import theory
from specjax.bench._plan_measure import pass_capacity
from specjax.bench._plan_settings import Numbers, check_output
from specjax.bench._skip_costs import CostSource, SkipCosts, skip_costs
from specjax.bench._skip_score import DraftScorer, Text, shape_of_both
from specjax.bench._skip_search import SkipDraft, SkipSearch, check_budget
from specjax.bench._workloads import WORKLOADS, read_workloads
from specjax.decode import encode_prompt, generate
from specjax.sampling import check_sampling, check_whole
from specjax.weights import load, load_config

if TYPE_CHECKING:
    from specjax.weights import Model

#: Rows of the table, the best draft and the best range included.
_SHOWN = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipSearchSettings:
    """What to search for, on what. All of it is checked when it is made.

    Attributes:
      target: model name, path or hub id.
      prompts: JSONL file, its ``category`` the class; None is the built-in set.
      per_class: prompts of each class, every other one held out.
      max_new_tokens: tokens that the target writes after each prompt, at most.
      temperature: that drafts are scored at; the texts are greedy ones in any case.
      max_gamma: the longest draft to consider; drafts are scored at this length.
      evaluations: subsets to score on the texts of the search.
      seed: of the restarts.
      costs: of sublayers: ``measured`` or ``bytes``.
      verify_cost: v, one number or by number of drafts from 0 on; None measures it.
      rounds: repetitions of what is timed.
      n_context: cached tokens in timed passes.
      dtype: of the parameters.
      output: JSON file of what was found, or None.

    Raises:
      ValueError: a value is not possible; the message names it and the remedy.
      OSError: a file cannot be read or written.
    """

    target: str = "smollm2-135m-instruct"
    prompts: str | None = None
    per_class: int = 4
    max_new_tokens: int = 48
    temperature: float = 0.0
    max_gamma: int = 4
    evaluations: int = 160
    seed: int = 0
    costs: CostSource = "measured"
    verify_cost: Numbers | None = None
    rounds: int = 5
    n_context: int = 200
    dtype: str = "float32"
    output: str | None = None

    def __post_init__(self) -> None:
        """Checks every value."""
        for name, least, note in (
            ("per_class", 2, "prompts of each class, half of them held out"),
            ("max_new_tokens", 1, "tokens to write after each prompt"),
            ("max_gamma", 1, "draft tokens of the longest draft"),
            ("evaluations", 2, "subsets to score"),
            ("seed", 0, "of the restarts"),
            ("rounds", 1, "repetitions"),
            ("n_context", 1, "cached tokens"),
        ):
            check_whole(name, getattr(self, name), least, 2**31, note)
        check_sampling(self.temperature, 0, 1.0, 0.0, 0)
        if self.costs not in get_args(CostSource):
            known = " or ".join(get_args(CostSource))
            raise ValueError(f"costs={self.costs!r} must be {known}.")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be float32 or bfloat16.")
        v = self.verify_cost
        if isinstance(v, tuple) and len(v) <= self.max_gamma:
            raise ValueError(
                f"verify_cost has {len(v)} entries, and drafts of {self.max_gamma} "
                f"tokens need {self.max_gamma + 1}, from no draft on; give as many, or "
                "one number."
            )
        if v is not None:
            theory.speedup_curve(0.5, 0.5, v, max_gamma=self.max_gamma)
        if self.prompts is not None and not Path(self.prompts).is_file():
            raise FileNotFoundError(
                f"prompts={self.prompts}: there is no such file; give a JSONL file, or "
                "none for the built-in prompts."
            )
        check_output("output", self.output)


@dataclasses.dataclass(frozen=True)
class SkipRow:
    """A draft, and how it did on the texts that the search did not see.

    Attributes:
      draft: as the search scored it.
      held_out: its acceptance on the other texts.
      held_out_speedup: predicted from that, with the same number of drafts.
    """

    draft: SkipDraft
    held_out: float
    held_out_speedup: float


@dataclasses.dataclass(frozen=True)
class SkipSearchResult:
    """What a search found.

    Attributes:
      settings: what was asked for.
      n_layers: blocks of the model.
      costs: of its sublayers and passes.
      n_evaluations: subsets that were scored.
      n_positions: of the texts of the search, and of the others.
      best: the best draft on the texts of the search.
      best_range: the best that leaves out whole blocks in a row, or None.
      rows: drafts of the Pareto front, few left out first, these two among them.
      classes: acceptance of the best draft by class, on the texts of the search and on
        the others; None where a class has none there.
    """

    settings: SkipSearchSettings
    n_layers: int
    costs: SkipCosts
    n_evaluations: int
    n_positions: tuple[int, int]
    best: SkipRow
    best_range: SkipRow | None
    rows: tuple[SkipRow, ...]
    classes: Mapping[str, tuple[float | None, float | None]]


def search_layer_skip(
    settings: SkipSearchSettings,
    *,
    tell: Callable[[str], object] = lambda line: None,
    progress: Callable[[int, SkipDraft], object] = lambda n, best: None,
) -> SkipSearchResult:
    """Searches for the sublayers that a self-draft should leave out.

    Half of the prompts of each class are for the search. What it finds is then scored
    on the others, once: a search among many subsets favours those that happen to suit
    its texts.

    Args:
      settings: what to search for, on what.
      tell: is given a line before each thing that takes time.
      progress: is given the number of evaluations and the best draft after each.

    Returns:
      What was found.

    Raises:
      ValueError: the target, the prompts or the numbers do not fit; as far as it can
        be known, before anything is computed.
      OSError: a file cannot be read.
    """
    config = load_config(settings.target, dtype=settings.dtype)
    check_budget(settings.evaluations, config.n_layers)
    groups = _prompts(settings)
    model = load(settings.target, dtype=settings.dtype)
    pass_capacity(model, settings.n_context, settings.max_gamma)
    tell("writing the target's answers")
    seen, unseen = _write(model, groups, settings)
    tell("timing passes")
    costs = skip_costs(
        model,
        settings.costs,
        verify_cost=settings.verify_cost,
        max_gamma=settings.max_gamma,
        n_context=settings.n_context,
        rounds=settings.rounds,
    )
    tell("compiling")
    shape = shape_of_both(seen, unseen, settings.max_gamma)
    scorer, other = (
        DraftScorer(
            model,
            texts,
            gamma=settings.max_gamma,
            temperature=settings.temperature,
            shape=shape,
        )
        for texts in (seen, unseen)
    )
    search = SkipSearch(
        scorer.acceptance,
        costs,
        max_gamma=settings.max_gamma,
        evaluations=settings.evaluations,
        seed=settings.seed,
        tell=progress,
    )
    tell("searching")
    search.run()
    tell("scoring on held-out texts")
    return _report(settings, costs, search, scorer, other)


def _prompts(settings: SkipSearchSettings) -> dict[str, Sequence[str]]:
    groups = read_workloads(settings.prompts) if settings.prompts else WORKLOADS
    if not any(len(prompts) > 1 for prompts in groups.values()):
        raise ValueError(
            f"prompts={settings.prompts} has no class of two prompts, and every other "
            "one of a class is held out; give more prompts, or fewer classes."
        )
    return {name: prompts[: settings.per_class] for name, prompts in groups.items()}


def _write(
    model: "Model", groups: Mapping[str, Sequence[str]], settings: SkipSearchSettings
) -> tuple[list[Text], list[Text]]:
    """Lets the target answer greedily; every other text of a class is held out."""
    prompts = [(name, i, p) for name, own in groups.items() for i, p in enumerate(own)]
    done = generate(
        model,
        [encode_prompt(model, prompt) for *_, prompt in prompts],
        drafter=None,
        max_new_tokens=settings.max_new_tokens,
    )
    halves: tuple[list[Text], list[Text]] = [], []
    for (name, i, _), c in zip(prompts, done, strict=True):
        halves[i % 2].append(Text(name, c.prompt_ids, c.ids))
    return halves


def _report(
    settings: SkipSearchSettings,
    costs: SkipCosts,
    search: SkipSearch,
    scorer: DraftScorer,
    other: DraftScorer,
) -> SkipSearchResult:
    def row(draft: SkipDraft) -> SkipRow:
        held_out = other.acceptance(draft.skip)
        curve = costs.curve(held_out, draft.cost, settings.max_gamma)
        return SkipRow(draft, held_out, curve[draft.gamma - 1])

    best, best_range = search.best, search.best_range
    named = [draft for draft in (best, best_range) if draft is not None]
    rows = {d.skip: row(d) for d in _some(search.front, named, _SHOWN)}
    seen, unseen = (it.by_class(best.skip) for it in (scorer, other))
    return SkipSearchResult(
        settings=settings,
        n_layers=len(costs.ff),
        costs=costs,
        n_evaluations=len(search.drafts),
        n_positions=(scorer.n_positions, other.n_positions),
        best=rows[best.skip],
        best_range=rows[best_range.skip] if best_range else None,
        rows=tuple(sorted(rows.values(), key=lambda r: (r.draft.size, r.draft.skip))),
        classes={n: (seen.get(n), unseen.get(n)) for n in seen | unseen},
    )


def _some(
    front: Sequence[SkipDraft], named: Sequence[SkipDraft], most: int
) -> list[SkipDraft]:
    """Chooses drafts evenly from a front, in its order, and adds some by name."""
    n = min(len(front), most - len(named))
    spread = np.linspace(0, len(front) - 1, n).round().astype(int)
    chosen = [front[i] for i in spread]
    return chosen + [draft for draft in named if draft not in chosen]

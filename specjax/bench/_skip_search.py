"""Which sublayers a self-draft should leave out: a search by acceptance per cost.

What is searched for is the greatest speed-up that theory predicts from a subset's
acceptance and cost, at its best draft length. Where no draft pays, plain decoding (no
drafts) would be best of every subset alike; so the search compares drafts of at least
one token, whose speed-up may be below 1, and says so in the end.

References: Zhang et al., "Draft & Verify", arXiv:2309.08168 (Bayesian optimisation);
Xia et al., "SWIFT", arXiv:2410.06916 (random and Bayesian); Minoux, "Accelerated greedy
algorithms", 1978 (lazy evaluation).
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from specjax.bench._skip_costs import SkipCosts
from specjax.models import LayerSkip

#: A sublayer: its block, and 0 for attention or 1 for the feed-forward network.
Sublayer = tuple[int, int]
Subset = frozenset[Sublayer]

_NOTHING: Subset = frozenset()


class SkipDraft(NamedTuple):
    """A draft that was scored.

    Attributes:
      skip: what it leaves out.
      acceptance: share of positions, or mean overlap, on the texts of the search.
      cost: c, a draft step in one-row passes of the target.
      gamma: the best number of drafts, at least 1.
      speedup: predicted with that many, over plain decoding; below 1 where none pays.
    """

    skip: LayerSkip
    acceptance: float
    cost: float
    gamma: int
    speedup: float

    @property
    def rank(self) -> tuple[float, float]:
        """What the search maximises: the speed-up, then what is saved."""
        return self.speedup, -self.cost

    @property
    def size(self) -> int:
        """How many sublayers it leaves out."""
        return len(self.skip.attention) + len(self.skip.ff)


def to_skip(subset: Subset) -> LayerSkip:
    """Names a subset as decoders take it."""
    of_kind = lambda kind: tuple(sorted(block for block, k in subset if k == kind))
    return LayerSkip(of_kind(0), of_kind(1))


def to_subset(skip: LayerSkip) -> Subset:
    """Takes what ``to_skip`` gives apart again."""
    return frozenset((b, kind) for kind, blocks in enumerate(skip) for b in blocks)


def is_range(skip: LayerSkip) -> bool:
    """Tells whether whole blocks in a row are left out, as layer_skip:FIRST-LAST."""
    blocks = skip.ff
    whole = bool(blocks) and skip.attention == blocks
    return whole and blocks[-1] - blocks[0] == len(blocks) - 1


def check_budget(evaluations: int, n_layers: int) -> None:
    """Checks that a search can look at each sublayer at least once.

    Args:
      evaluations: the budget.
      n_layers: blocks of the model.

    Raises:
      ValueError: it is too small.
    """
    if evaluations < 2 * n_layers:
        raise ValueError(
            f"{evaluations=} is too few for {n_layers} blocks: leaving out each of "
            f"their {2 * n_layers} sublayers alone comes first. Give as many at least, "
            "three times as many for a search worth its name."
        )


class SkipSearch:
    """A search with a budget of evaluations, deterministic for a seed.

    Attributes:
      drafts: everything that was evaluated, by subset, in the order of evaluation.
    """

    def __init__(
        self,
        accept: Callable[[LayerSkip], float],
        costs: SkipCosts,
        *,
        max_gamma: int,
        evaluations: int,
        seed: int = 0,
        tell: Callable[[int, SkipDraft], object] = lambda n, best: None,
    ) -> None:
        """Prepares a search.

        Args:
          accept: evaluates a subset.
          costs: of the sublayers and of verification.
          max_gamma: the longest draft to consider.
          evaluations: the budget.
          seed: of the restarts.
          tell: is given the number of evaluations and the best draft after each.

        Raises:
          ValueError: the budget is too small to leave out each sublayer once.
        """
        self.drafts: dict[Subset, SkipDraft] = {}
        self._accept, self._costs, self._max_gamma = accept, costs, max_gamma
        self._tell, self._rng = tell, np.random.default_rng(seed)
        self._n_layers = len(costs.ff)
        blocks = range(self._n_layers)
        self._all = [(block, kind) for block in blocks for kind in (0, 1)]
        check_budget(evaluations, self._n_layers)
        # Of all subsets: those with some attention left, but the empty one.
        n_subsets = (2**self._n_layers - 1) * 2**self._n_layers - 1
        self._most = min(evaluations, n_subsets)
        # By how much leaving a sublayer out changed acceptance when last looked at.
        self._factor: dict[Sublayer, float] = {}

    def run(self) -> SkipDraft:
        """Searches until the budget is spent or every subset is known.

        First each sublayer alone, then ranges of whole blocks, a quarter of what
        remains at most, then greedily, then by moves from the best and restarts.

        Returns:
          The best draft.
        """
        self._try_singles()
        self._try_ranges((self._most - len(self.drafts)) // 4)
        self._grow()
        self._improve()
        return self.best

    @property
    def best(self) -> SkipDraft:
        """The best draft so far, the first of equals."""
        return max(self.drafts.values(), key=lambda draft: draft.rank)

    @property
    def best_range(self) -> SkipDraft | None:
        """The best that leaves out whole blocks in a row; None if none was tried."""
        found = [d for d in self.drafts.values() if is_range(d.skip)]
        return max(found, key=lambda draft: draft.rank) if found else None

    @property
    def front(self) -> list[SkipDraft]:
        """Drafts of which none is both cheaper and as well accepted, dearest first."""
        kept: list[SkipDraft] = []
        order = lambda draft: (draft.cost, -draft.acceptance)
        for draft in sorted(self.drafts.values(), key=order):
            if not kept or draft.acceptance > kept[-1].acceptance:
                kept.append(draft)
        return kept[::-1]

    @property
    def _left(self) -> int:
        return self._most - len(self.drafts)

    def _evaluate(self, subset: Subset) -> SkipDraft:
        """Gives a subset's draft, evaluated if it is not known; budget must be left."""
        if subset not in self.drafts:
            assert self._left, "the budget is spent"
            skip = to_skip(subset)
            self.drafts[subset] = self._judge(subset, self._accept(skip))
            self._tell(len(self.drafts), self.best)
        return self.drafts[subset]

    def _judge(self, subset: Subset, acceptance: float) -> SkipDraft:
        skip = to_skip(subset)
        cost = self._costs.ratio(skip)
        curve = self._costs.curve(acceptance, cost, self._max_gamma)
        best = int(np.argmax(curve))
        return SkipDraft(skip, acceptance, cost, best + 1, curve[best])

    def _guess(
        self, base: float, subset: Subset, more: Subset, less: Subset = _NOTHING
    ) -> tuple[float, float]:
        """Ranks a subset by its neighbour's acceptance and what sublayers changed."""
        for sublayer in sorted(more):
            base *= self._factor[sublayer]
        for sublayer in sorted(less):
            factor = self._factor[sublayer]
            # Where the sublayer was all that mattered nothing is known without it.
            base = base / factor if factor else 1.0
        return self._judge(subset, min(base, 1.0)).rank

    def _possible(self, subset: Subset) -> bool:
        n_attention = sum(kind == 0 for _, kind in subset)
        return bool(subset) and n_attention < self._n_layers

    def _try_singles(self) -> None:
        for sublayer in self._all:
            subset = frozenset([sublayer])
            # The only attention of a decoder of one block stays.
            if self._possible(subset):
                self._factor[sublayer] = self._evaluate(subset).acceptance

    def _try_ranges(self, most: int) -> None:
        """Evaluates ranges of blocks, the most promising next.

        What is known of a range inside another takes the place of its sublayers, so
        that the longer one is guessed from how the shorter one did.
        """
        spans = itertools.combinations(range(self._n_layers + 1), 2)
        ranges = [frozenset(self._blocks(*span)) for span in spans]
        ranges = [subset for subset in ranges if self._possible(subset)]
        known: list[Subset] = []

        def rank(subset: Subset) -> tuple[float, float]:
            inside = [s for s in known if s < subset]
            core = max(inside, key=len, default=_NOTHING)
            base = self.drafts[core].acceptance if core else 1.0
            return self._guess(base, subset, subset - core)

        for _ in range(min(most, len(ranges))):
            subset = max((s for s in ranges if s not in known), key=rank)
            self._evaluate(subset)
            known.append(subset)

    def _blocks(self, first: int, stop: int) -> Iterator[Sublayer]:
        return ((block, kind) for block in range(first, stop) for kind in (0, 1))

    def _grow(self) -> None:
        """Adds the best sublayer again and again, lazily.

        A candidate is ranked by what it changed when last looked at, which with more
        left out is seldom less: whoever is at the top after being evaluated is taken.
        """
        here, acceptance = _NOTHING, 1.0
        while self._promising(acceptance):
            queue = []
            for i, sublayer in enumerate(self._all):
                subset = here | {sublayer}
                if sublayer not in here and self._possible(subset):
                    heapq.heappush(queue, self._entry(here, acceptance, i, subset))
            while queue:
                *_, i, subset, draft = heapq.heappop(queue)
                if draft is not None:
                    here, acceptance = subset, draft.acceptance
                    break
                if subset not in self.drafts and not self._left:
                    return
                draft = self._evaluate(subset)
                self._factor[self._all[i]] = draft.acceptance / acceptance
                heapq.heappush(queue, self._entry(here, acceptance, i, subset))
            else:
                return

    def _entry(self, here: Subset, acceptance: float, i: int, subset: Subset) -> tuple:
        """Makes a queue's entry: exact where the subset is known, else guessed."""
        draft = self.drafts.get(subset)
        rank = draft.rank if draft else self._guess(acceptance, subset, subset - here)
        return -rank[0], -rank[1], i, subset, draft

    def _promising(self, acceptance: float) -> bool:
        """Whether more left out could win if none of it lowered the acceptance."""
        if not acceptance:
            return False
        most = max(self._costs.curve(acceptance, self._costs.least, self._max_gamma))
        return most > self.best.speedup

    def _improve(self) -> None:
        """Moves on from the best while that helps, then from drafts near it."""
        here = self.best
        while self._left:
            moved = self._move(here)
            if moved is None and not self._left:
                return
            here = moved or self._shake()

    def _move(self, here: SkipDraft) -> SkipDraft | None:
        """Tries to leave out one more, one fewer or another, likely gains first."""
        subset = to_subset(here.skip)
        outside = [s for s in self._all if s not in subset]
        inside = [s for s in self._all if s in subset]
        one = lambda sublayers: [frozenset([s]) for s in sublayers]
        moves = [(more, _NOTHING) for more in one(outside)]
        moves += [(_NOTHING, less) for less in one(inside)]
        moves += list(itertools.product(one(outside), one(inside)))
        ranked = []
        for i, (more, less) in enumerate(moves):
            there = (subset | more) - less
            if self._possible(there) and there not in self.drafts:
                rank = self._guess(here.acceptance, there, more, less)
                ranked.append((*rank, -i, there))
        ranked.sort(key=lambda entry: entry[:3], reverse=True)
        # As many as there are sublayers; then elsewhere is the better bet.
        for *_, there in ranked[: min(len(self._all), self._left)]:
            draft = self._evaluate(there)
            if draft.rank > here.rank:
                return draft
        return None

    def _shake(self) -> SkipDraft:
        """Evaluates a subset that differs from the best in some random sublayers."""
        best = to_subset(self.best.skip)
        while True:
            # Mostly one to three, but any number: every subset is reached in the end.
            n = min(self._rng.geometric(0.5), len(self._all))
            picked = self._rng.choice(len(self._all), size=n, replace=False)
            there = best ^ {self._all[i] for i in picked}
            if self._possible(there) and there not in self.drafts:
                return self._evaluate(there)

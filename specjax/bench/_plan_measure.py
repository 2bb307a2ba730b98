"""Measuring what a plan needs: acceptance by class, cost ratio, verify cost."""

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from specjax import verify
from specjax.bench._micro import Case, bare_pass, interleave, prompt_ids
from specjax.bench._plan import Costs, Profile, Run
from specjax.bench._plan_settings import Numbers
from specjax.bench._speed import Measurement, measure, median_ratio
from specjax.decode import DecodeState, Engine, Request, Stats, fit_capacity
from specjax.drafters import (
    BoundDrafter,
    DraftContext,
    Drafter,
    TargetView,
    match_noise,
    plain,
    unbind,
)
from specjax.ops.platform import compiler_options
from specjax.theory import verify_cost_from_times
from specjax.typing import Params

if TYPE_CHECKING:
    from specjax.weights import Model

_PASSES = 12
#: A drafter that costs nothing is over before the clock ticks: repeat it this long.
_LEAST_S = 0.02


def draft_case(
    model: "Model",
    drafter: Drafter | BoundDrafter,
    *,
    capacity: int,
    length: int,
    batch: int = 1,
) -> Case:
    """Times a drafter alone, asked again and again after the same text.

    The text is prefilled as in decoding, so a drafter with a cache of its own has it.
    Then ``propose`` runs in a loop on the device. Each round puts the first draft in
    the pending token's place: the next depends on it, so the compiler cannot ask once
    and be done. What the drafter does between passes (``commit``) is not in this.
    Of an early exit this has the first blocks of the pass that verifies.

    Args:
      model: the target.
      drafter: the drafter, of gamma >= 1.
      capacity: of the slot.
      length: tokens of the text.
      batch: rows, all of the same text.

    Returns:
      The case: seconds of one ``propose``, all gamma drafts of it.
    """
    drafter, draft_params = unbind(drafter, None)
    filled = _prefilled(model, drafter, capacity, length, draft_params, batch)
    own_cache = bool(drafter.spec.on_target)
    # What the loop changes is donated, as in decoding: a cache is not copied.
    held = [(filled.tokens, filled.draft, filled.cache if own_cache else ())]

    def ask(params, target_params, tokens, own, cache):
        about = (filled.length, filled.settings, None, filled.n_new)
        context = DraftContext(tokens, *about)
        if own_cache:
            context = context._replace(target=TargetView(target_params, cache))
        proposal, own = drafter.propose(params, own, context)
        cache = proposal.cache if own_cache else cache
        return proposal._replace(cache=None), own, cache

    def loop(state, params, target_params, n):
        def body(carry):
            i, (tokens, *rest), _ = carry
            proposal, own, cache = ask(params, target_params, tokens, *rest)
            tokens = tokens.at[:, length - 1].set(proposal.tokens[:, 0])
            return i + 1, (tokens, own, cache), proposal

        # All of the proposal is carried, or what nobody looks at would not be made.
        like = jax.eval_shape(ask, params, target_params, *state)[0]
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        first = (jnp.int32(0), state, empty)
        return lax.while_loop(lambda c: c[0] < n, body, first)

    compiled = jax.jit(loop, donate_argnums=0, compiler_options=compiler_options())

    def once(n: int) -> float:
        began = time.perf_counter()
        out = compiled(held[0], draft_params, model.params, n)
        _, held[0], _ = jax.block_until_ready(out)
        return time.perf_counter() - began

    def run(n: int) -> float:
        took = once(n)
        if took < _LEAST_S:
            n *= math.ceil(_LEAST_S / took)
            took = once(n)
        return took / n

    return Case(f"draft, gamma {drafter.spec.gamma}", run)


def _prefilled(
    model: "Model",
    drafter: Drafter,
    capacity: int,
    length: int,
    draft_params: Params | None,
    batch: int,
) -> DecodeState:
    """Gives the state of decoding after a prompt of some length, in every row."""
    engine = Engine(
        model,
        drafter=drafter,
        rule=verify.coupled,
        batch_size=batch,
        capacity=capacity,
        draft_params=draft_params,
    )
    ids = tuple(map(int, prompt_ids(model, length)))
    n_new = drafter.spec.gamma + 1  # room for all drafts
    for _ in range(batch):
        engine.submit(Request(prompt_ids=ids, max_new_tokens=n_new, ignore_eos=True))
    engine.admit()
    engine.wait()
    return engine.state


def measure_costs(
    model: "Model",
    drafter: Drafter | BoundDrafter,
    *,
    max_gamma: int,
    n_context: int,
    batch: int = 1,
    batches: Sequence[int] = (1,),
    rounds: int = 3,
    cost_ratio: float | None = None,
    verify_cost: Numbers | None = None,
) -> Costs:
    """Times bare passes and the drafter in turn, and takes medians of ratios.

    v is the time of some rows over that of one row in the same round; widths between
    those measured are interpolated. c is the time of the drafter alone
    (``draft_case``) over gamma one-row passes. Of an early exit, c has the blocks that
    drafting and verification share and v of any draft at all the others alone.

    Args:
      model: the target.
      drafter: the drafter, of the gamma in use. One that draws is timed at temperature
        0, in its coupled form.
      max_gamma: the longest draft to consider.
      n_context: tokens in the cache.
      batch: sequences side by side, at which c and v by width are measured; rows are
        then those of each sequence.
      batches: at which v of gamma + 1 rows is measured.
      rounds: repetitions.
      cost_ratio: c where it is known.
      verify_cost: v where it is known; batches are then left out.

    Returns:
      The costs.

    Raises:
      ValueError: the passes do not fit the model's context.
    """
    bare, params = unbind(drafter, None)
    bare = match_noise(bare, verify.coupled.noise)
    gamma, capacity = bare.spec.gamma, pass_capacity(model, n_context, max_gamma)
    at = {"capacity": capacity, "length": n_context}
    widths, pairs = [1], [(batch, 1)]
    if verify_cost is None:
        widths = _widths(gamma, max_gamma)
        pairs = [(batch, width) for width in widths]
        pairs += [(b, width) for b in batches for width in (1, gamma + 1)]
    cases = _pass_cases(model, bare.spec.exit_block, pairs, **at)
    timed = [*cases.values()]
    if cost_ratio is None:
        timed += [draft_case(model, BoundDrafter(bare, params), batch=batch, **at)]
    seconds = interleave(timed, n=_PASSES, rounds=rounds)
    of = lambda *pair: seconds[cases[pair].name]
    ratio = lambda b, width: median_ratio(of(b, width), of(b, 1))
    if cost_ratio is None:
        cost_ratio = median_ratio(seconds[timed[-1].name], of(batch, 1)) / gamma
    by_batch = {}
    if verify_cost is None:
        times = [ratio(batch, width) for width in widths]
        verify_cost = tuple(map(float, verify_cost_from_times(widths, times)))
        by_batch = {b: ratio(b, gamma + 1) for b in batches}
    return Costs(cost_ratio, verify_cost, by_batch, statistics.median(of(batch, 1)))


def _pass_cases(
    model: "Model", exit_block: int, pairs: Iterable[tuple[int, int]], **at: int
) -> dict[tuple[int, int], Case]:
    """Makes the cases of passes by (batch, width); wide ones begin where drafts end."""
    entry = lambda width: exit_block if width > 1 else 0
    return {
        (b, w): bare_pass(model, width=w, batch=b, start=entry(w), **at)
        for b, w in pairs
    }


def pass_capacity(model: "Model", n_context: int, max_gamma: int) -> int:
    """Gives the cache that timed passes need.

    Raises:
      ValueError: the model's context is too short for it.
    """
    need = n_context + _PASSES + max_gamma + 1
    limit = model.config.max_context
    if need > limit:
        raise ValueError(
            f"n_context={n_context} and the {need - n_context} tokens that timing "
            f"writes do not fit the {limit} positions of {model.name}; lower n_context "
            "or max_gamma."
        )
    return fit_capacity(need, limit)


def _widths(gamma: int, max_gamma: int) -> list[int]:
    """Chooses the widths to measure: few, closer where they are small."""
    powers = {2**i + 1 for i in range(max_gamma.bit_length())}
    return sorted(
        w for w in {1, gamma + 1, max_gamma + 1, *powers} if w <= max_gamma + 1
    )


class Decoding:
    """Plain decoding and one engine for each draft length, to be timed in turn."""

    def __init__(
        self,
        model: "Model",
        drafters: Iterable[Drafter | BoundDrafter],
        classes: Mapping[str, Sequence[tuple[int, ...]]],
        *,
        max_new_tokens: int,
    ) -> None:
        """Makes the engines and checks that every prompt fits.

        Args:
          model: the target.
          drafters: of different gammas, ascending.
          classes: prompts by class, as ids.
          max_new_tokens: tokens to decode for each, end ids ignored.

        Raises:
          ValueError: a prompt does not fit the model's context.
        """
        zoo = [unbind(it, None) for it in (plain(), *drafters)]
        longest = max(len(ids) for prompts in classes.values() for ids in prompts)
        need = longest + max_new_tokens + zoo[-1][0].spec.gamma + 1
        capacity = fit_capacity(need, model.config.max_context)
        self._engines = {
            drafter.spec.gamma: Engine(
                model,
                drafter=drafter,
                rule=verify.coupled,
                batch_size=1,
                capacity=capacity,
                draft_params=params,
            )
            for drafter, params in zoo
        }
        self._requests = {
            name: [
                Request(prompt_ids=ids, max_new_tokens=max_new_tokens, ignore_eos=True)
                for ids in prompts
            ]
            for name, prompts in classes.items()
        }
        for requests in self._requests.values():
            for request in requests:
                for engine in self._engines.values():
                    engine.check(request)

    def profile(self, name: str, *, rounds: int) -> Profile:
        """Decodes a class, every prompt with every engine in turn, again and again.

        Acceptance is that of the longest draft, which has all positions, cut where no
        draft ever got. Speed-ups are medians over rounds of seconds of all prompts
        together.

        Args:
          name: of the class.
          rounds: repetitions that count; one more comes first, to compile and warm.

        Returns:
          The profile.
        """
        requests = self._requests[name]
        for request in requests:
            self._measure(request)
        turns = [[self._measure(r) for r in requests] for _ in range(rounds)]
        total_s = lambda turn, gamma: sum(m[gamma].decode_s for m in turn)
        runs = []
        for gamma in list(self._engines)[1:]:
            stats = Stats.total([s for m in turns[0] if (s := m[gamma].stats)])
            ratios = [total_s(turn, 0) / total_s(turn, gamma) for turn in turns]
            runs.append(
                Run(
                    gamma=gamma,
                    speedup=statistics.median(ratios),
                    tokens_per_pass=stats.tokens_per_pass,
                    drafted=stats.verified_at[0] / stats.passes,
                    accepted_at=stats.accepted_at,
                    reached_at=stats.reached_at,
                )
            )
            conditional = stats.acceptance_at
            # A pass without drafts commits one token.
            silent = stats.passes - stats.verified_at[0]
            drafted = 1 - silent / stats.committed
        missing = [j for j, a in enumerate(conditional) if math.isnan(a)]
        acceptance = conditional[: missing[0]] if missing else conditional
        return Profile(name, acceptance, drafted, tuple(runs))

    def _measure(self, request: Request) -> dict[int, Measurement]:
        return {gamma: measure(e, request) for gamma, e in self._engines.items()}

"""Draft lengths that follow what a row has accepted so far.

Reference: Liu et al., "Optimizing Speculative Decoding for Serving Large Language
Models Using Goodput", arXiv:2406.14066: the length that makes the most of a second.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.drafters._protocol import (
    BoundDrafter,
    DraftContext,
    Drafter,
    DrafterSpec,
    check_gamma,
    inherited,
    n_kept,
    unbind,
)
from specjax.typing import Array, Float, Int, Params

# Tests that a row's past is worth: each new one takes this share of it. A few dozen
# tests remember a paragraph, not the whole text.
_FORGET = 1 / 24

# A row starts as if it had passed this share of this many tests, and goes back there
# while nothing is drafted: so it tries again after a while.
_PRIOR, _PRIOR_TESTS = 0.8, 3.0


class PassCosts(NamedTuple):
    """What drafting and verifying cost, in plain passes of the target.

    Attributes:
      draft: cost ratio c: one draft step over a one-row pass.
      verify: v by number of drafts, [gamma + 1]: a pass of n + 1 rows over one of one
        row; the first is 1.
    """

    draft: float
    verify: tuple[float, ...]

    def at_one_width(self) -> "PassCosts":
        """Returns the costs where every pass is as wide as the widest (``exact``)."""
        return self._replace(verify=self.verify[-1:] * len(self.verify))


class AdaptiveState(NamedTuple):
    """What the policy remembers of each row.

    Attributes:
      inner: the drafter's own state.
      passed: tests passed, the older ones discounted. [B] float32
      tests: tests made, discounted alike. [B] float32
      base: tokens that were committed when the last drafts were made. [B]
      n_drafted: how many those were. [B]
      drafted: the drafts. [B, G]
    """

    inner: Any
    passed: Float[Array, " B"]
    tests: Float[Array, " B"]
    base: Int[Array, " B"]
    n_drafted: Int[Array, " B"]
    drafted: Int[Array, "B G"]


def adaptive(
    drafter: Drafter | BoundDrafter,
    costs: PassCosts,
    *,
    bank: Sequence[int] | None = None,
) -> BoundDrafter:
    """Drafts as much as pays, by each row's own acceptance and measured costs.

    Each pass takes, row by row, the length n of the bank with the largest

        E(a, n) / (n c + v(n)),   E(a, n) = (1 - a^(n + 1)) / (1 - a)

    where a is the row's share of drafts that passed, recent ones counting most. Length
    0 is plain decoding. It looks at committed text alone, never at the drafts it is
    about to cut: so it is exact for drawn drafts too, and a
    row's length does not depend on its neighbours.

    Args:
      drafter: any drafter.
      costs: of passes here, as ``bench.measure_costs(...).pass_costs(gamma)`` finds
        them or ``load_costs`` reads them; traced, so that other costs compile nothing.
        In an engine that is ``exact``: ``costs.at_one_width()``.
      bank: lengths to choose from, each compiled as a pass of its own width unless the
        engine is exact. None: 0, the powers of two below gamma, and gamma.

    Returns:
      The drafter, with the costs among its parameters.

    Raises:
      ValueError: a cost is missing, not finite or negative; a length is out of range.
    """
    inner, params = unbind(drafter, None)
    gamma = inner.spec.gamma
    check_gamma(gamma)
    check_chain(inner)
    if bank is None:
        bank = [0, *(2**i for i in range(1, 16) if 2**i < gamma), gamma]
    lengths = tuple(sorted({*bank}))
    if not lengths or lengths[0] < 0 or lengths[-1] > gamma:
        raise ValueError(
            f"bank={tuple(bank)} must hold draft lengths in [0, {gamma}], the drafts "
            f"that {inner.spec.name!r} makes."
        )
    verify = check_costs(costs, gamma, inner.spec.name)
    cost = costs.draft * np.arange(gamma + 1) + verify
    held = {"inner": params, "cost": jnp.asarray(cost[list(lengths)], jnp.float32)}
    return BoundDrafter(_adaptive(inner, lengths), held)


def check_chain(drafter: Drafter) -> None:
    """Checks that a drafter can be adaptive.

    Raises:
      ValueError: it drafts trees.
    """
    if drafter.spec.depth:
        raise ValueError(
            f"drafter {drafter.spec.name!r} drafts trees, and adaptive drafting "
            "reckons with chains; use a drafter of chains."
        )


def check_costs(costs: PassCosts, gamma: int, name: str) -> np.ndarray:
    """Checks that costs are there for every length and can be true.

    Args:
      costs: the costs.
      gamma: draft tokens a pass.
      name: of the drafter, for the message.

    Returns:
      v by number of drafts, [gamma + 1] float32.

    Raises:
      ValueError: a cost is missing, not finite or out of range.
    """
    verify = np.asarray(costs.verify, np.float32)
    if verify.shape != (gamma + 1,):
        raise ValueError(
            f"costs.verify has {verify.size} values; {name!r} needs one for each of 0 "
            f"to {gamma} drafts, {gamma + 1} in all."
        )
    if not (np.all(np.isfinite(verify)) and np.all(verify > 0)):
        raise ValueError(f"costs.verify={costs.verify} must be finite and above 0.")
    if not (np.isfinite(costs.draft) and costs.draft >= 0):
        raise ValueError(f"costs.draft={costs.draft} must be finite and at least 0.")
    return verify


@functools.cache
def _adaptive(inner: Drafter, lengths: tuple[int, ...]) -> Drafter:
    gamma, own = inner.spec.gamma, inner.spec

    def init(batch: int, capacity: int) -> AdaptiveState:
        return AdaptiveState(
            inner=inner.init(batch, capacity),
            passed=jnp.full((batch,), _PRIOR * _PRIOR_TESTS, jnp.float32),
            tests=jnp.full((batch,), _PRIOR_TESTS, jnp.float32),
            base=jnp.zeros((batch,), jnp.int32),
            n_drafted=jnp.zeros((batch,), jnp.int32),
            drafted=jnp.zeros((batch, gamma), jnp.int32),
        )

    def fresh(state: AdaptiveState, row: Array) -> AdaptiveState:
        return state._replace(
            passed=state.passed.at[row].set(_PRIOR * _PRIOR_TESTS),
            tests=state.tests.at[row].set(_PRIOR_TESTS),
            n_drafted=state.n_drafted.at[row].set(0),
        )

    def reset_row(state: AdaptiveState, row: Array) -> AdaptiveState:
        return fresh(state._replace(inner=inner.reset_row(state.inner, row)), row)

    def copy_row(state: AdaptiveState, source, row, length) -> AdaptiveState:
        assert inner.copy_row is not None
        copied = inner.copy_row(state.inner, source, row, length)
        return fresh(state._replace(inner=copied), row)

    def prefill(params: Params, state: AdaptiveState, *args) -> AdaptiveState:
        return state._replace(inner=inner.prefill(params["inner"], state.inner, *args))

    def propose(params: Params, state: AdaptiveState, context: DraftContext):
        best = best_lengths(state.passed / state.tests, params["cost"], lengths)
        if context.budget is not None:
            best = jnp.minimum(best, context.budget)
        proposal, own_state = inner.propose(
            params["inner"], state.inner, context._replace(budget=best)
        )
        proposal = proposal._replace(n_valid=jnp.minimum(proposal.n_valid, best))
        state = state._replace(
            inner=own_state,
            base=context.length,
            n_drafted=proposal.n_valid,
            drafted=proposal.tokens,
        )
        return proposal, state

    def commit(params: Params, state: AdaptiveState, context: DraftContext):
        state = state._replace(
            inner=inner.commit(params["inner"], state.inner, context)
        )
        return _learn(state, context)

    coupled = inner.coupled
    return Drafter(
        spec=DrafterSpec(
            name=f"adaptive({own.name})",
            gamma=gamma,
            draws=own.draws,
            **inherited(inner),
            bank=lengths,
        ),
        init=init,
        prefill=prefill,
        reset_row=reset_row,
        propose=propose,
        commit=commit,
        copy_row=None if inner.copy_row is None else copy_row,
        coupled=None if coupled is None else lambda: _adaptive(coupled(), lengths),
    )


def best_lengths(
    acceptance: Float[Array, " B"], cost: Float[Array, " K"], lengths: tuple[int, ...]
) -> Int[Array, " B"]:
    """Returns the draft length of each row that commits most a second.

    Args:
      acceptance: estimated, in [0, 1].
      cost: of a pass with each of the lengths, drafting included, in plain passes.
      lengths: to choose from, ascending.

    Returns:
      int32 lengths; of equally good ones the shortest.
    """
    powers = acceptance[:, None] ** jnp.arange(lengths[-1] + 1)[None, :]
    tokens = jnp.cumsum(powers, axis=1)[:, jnp.asarray(lengths)]
    return jnp.asarray(lengths, jnp.int32)[jnp.argmax(tokens / cost, axis=1)]


def _learn(state: AdaptiveState, context: DraftContext) -> AdaptiveState:
    """Counts the tests that the last pass made of each row."""
    # The last committed token is the rule's own, whatever the draft had there.
    end = jnp.minimum(context.length - 1, state.base + state.n_drafted)
    n_passed = n_kept(context, state.drafted, state.base, end)
    n_tests = jnp.minimum(n_passed + 1, state.n_drafted)
    moved = context.length > state.base
    n_passed = jnp.where(moved, n_passed, 0)
    n_tests = jnp.where(moved, n_tests, 0)
    keep = (1 - _FORGET) ** n_tests.astype(jnp.float32)
    passed = state.passed * keep + n_passed
    tests = state.tests * keep + n_tests
    # Without tests the past fades into the prior.
    idle = moved & (n_tests == 0)
    fade = jnp.where(idle, 1 - _FORGET, 1.0)
    prior = (1 - fade) * _PRIOR_TESTS
    return state._replace(
        passed=passed * fade + _PRIOR * prior, tests=tests * fade + prior
    )

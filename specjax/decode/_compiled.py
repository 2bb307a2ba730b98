"""The compiled programs of decoding: below the scripts, ``jax.jit`` is called here.

Operations jit themselves only to be traced once a shape.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decode._state import (
    DecodeState,
    RowStats,
    Status,
    TopTokens,
    init_state,
)
from specjax.decode._step import spec_step
from specjax.drafters import Drafter
from specjax.models import CACHE_SLACK, Target
from specjax.ops.platform import compiler_options, current_platform, row_invariant
from specjax.sampling import ControlSpec, ControlState, Settings
from specjax.typing import Array, Int, Params
from specjax.verify import VerifyRule

#: Rows of a prefill chunk. A prompt is cut into the largest that fit, and only a
#: last one of the smallest size is padded.
PREFILL_BUCKETS = (256, 64, 16)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a decode loop. Equal plans share compiled programs.

    Attributes:
      target: the target.
      drafter: the drafter.
      rule: the verify rule.
      batch: slots.
      capacity: most tokens a slot may hold.
      widths: widths a pass may have, ascending.
      exact: compute passes so that a row's bits depend neither on the width nor on
        the batch (``ops.platform.row_invariant``).
      n_stop_ids: stop ids a row may have.
      controls: what rows may ask of their logits.
      n_top: alternatives kept for each output token.
      n_ids: ids that have a token, or None where all of the vocabulary's have.
    """

    target: Target
    drafter: Drafter
    rule: VerifyRule
    batch: int
    capacity: int
    widths: tuple[int, ...]
    exact: bool = False
    n_stop_ids: int = 8
    controls: ControlSpec = ControlSpec()
    n_top: int = 0
    n_ids: int | None = None

    def __post_init__(self) -> None:
        """Checks that the widths hold the drafts."""
        ascending = list(self.widths) == sorted(set(self.widths))
        if not self.widths or not ascending or self.widths[0] < 1:
            raise ValueError(
                f"widths={self.widths} must be ascending, positive, and at least one."
            )
        gamma = self.drafter.spec.gamma
        if self.widths[-1] < gamma + 1:
            raise ValueError(
                f"A pass of {self.widths[-1]} rows cannot verify gamma={gamma} drafts; "
                f"the width must be at least {gamma + 1}."
            )


class Snapshot(NamedTuple):
    """What the host sees of the slots after some passes.

    Attributes:
      length: committed tokens. [B]
      status: ``Status``. [B]
      start: index of the first token in ``tokens``. [B]
      tokens: tokens from ``start`` on. [B, W]
      logprobs: their log-probabilities. [B, W]
      origin: their origins. [B, W]
      top: alternatives to them, or None.
      stats: counters.
    """

    length: Array
    status: Array
    start: Array
    tokens: Array
    logprobs: Array
    origin: Array
    top: TopTokens | None
    stats: RowStats


def programs(plan: Plan, n_passes: int) -> "Programs":
    """Returns a plan's compiled programs, the same object for equal plans."""
    return _programs(plan, n_passes, current_platform())


def forget_programs() -> None:
    """Drops all compiled programs, for tests that change what is traced."""
    _programs.cache_clear()


@functools.lru_cache(maxsize=64)
def _programs(plan: Plan, n_passes: int, platform: str) -> "Programs":
    return Programs(plan, n_passes)


class Programs:
    """Jitted functions on a donated ``DecodeState``; compiled at first use.

    Attributes:
      plan: the static side.
      n_passes: passes a call of ``run`` makes at most.
      prefill: (target_params, draft_params, state, row, n_real, size=) -> state.
      insert: (state, row, tokens, length, limit, max_drafts, stop_ids, settings,
        controls, source, keep) -> state; the slot's caches become what prefill of the
        first ``keep`` tokens would make them, from the row ``source`` that was filled
        with them; 0 empties them.
      release: (state, row) -> state.
      run: (target_params, draft_params, state, start, n) -> (state, Snapshot); makes
        n passes, at most ``n_passes``.
    """

    def __init__(self, plan: Plan, n_passes: int) -> None:
        self.plan = plan
        self.n_passes = n_passes
        jit = functools.partial(
            jax.jit, compiler_options=compiler_options(), donate_argnames="state"
        )
        self.prefill = jit(self._prefill, static_argnames="size")
        self.insert = jax.jit(self._insert, donate_argnames="state")
        self.release = jax.jit(self._release, donate_argnames="state")
        self.run = jit(self._run)

    def init(self) -> DecodeState:
        """Makes empty slots."""
        plan = self.plan
        return init_state(
            plan.target,
            plan.drafter,
            batch=plan.batch,
            capacity=plan.capacity,
            n_stop_ids=plan.n_stop_ids,
            controls=plan.controls,
            n_top=plan.n_top,
        )

    def _insert(
        self,
        state: DecodeState,
        row: Int[Array, ""],
        tokens: Int[Array, " L"],
        length: Int[Array, ""],
        limit: Int[Array, ""],
        max_drafts: Int[Array, ""],
        stop_ids: Int[Array, " N"],
        settings: Settings,
        controls: ControlState,
        source: Int[Array, ""],
        keep: Int[Array, ""],
    ) -> DecodeState:
        """Puts a prompt into a slot; it runs once its prefill is done."""
        target, drafter = self.plan.target, self.plan.drafter
        if drafter.copy_row is None:
            cache = target.reset_row(state.cache, row)
            draft = drafter.reset_row(state.draft, row)
        else:
            # One program whether there is something to copy or not.
            cache = target.copy_row(state.cache, source, row, keep)
            draft = drafter.copy_row(state.draft, source, row, keep)
        put = lambda old, new: old.at[row].set(new)
        mask = state.controls.mask
        own = jax.tree.map(
            put, state.controls._replace(mask=None), controls._replace(mask=None)
        )
        if mask is not None and controls.mask is not None:
            mask = mask._replace(state=put(mask.state, controls.mask.state))
        return state.replace(
            tokens=put(state.tokens, tokens),
            origin=put(state.origin, 0),
            length=put(state.length, length),
            prompt_length=put(state.prompt_length, length),
            limit=put(state.limit, limit),
            max_drafts=put(state.max_drafts, max_drafts),
            status=put(state.status, int(Status.RUNNING)),
            settings=jax.tree.map(put, state.settings, settings),
            controls=own._replace(mask=mask),
            stop_ids=put(state.stop_ids, stop_ids),
            cache=cache,
            draft=draft,
            n_new=put(state.n_new, length),
            stats=jax.tree.map(lambda x: put(x, 0), state.stats),
        )

    def _release(self, state: DecodeState, row: Int[Array, ""]) -> DecodeState:
        """Stops a slot: what it does from now on is of no interest."""
        return state.replace(status=state.status.at[row].set(int(Status.EMPTY)))

    def _prefill(
        self,
        target_params: Params,
        draft_params: Params | None,
        state: DecodeState,
        row: Int[Array, ""],
        n_real: Int[Array, ""],
        *,
        size: int,
    ) -> DecodeState:
        """Sends a slot's next prompt chunk through the target, in place.

        The chunk starts at the row's cache length; ``n_real`` of its ``size`` rows
        are committed, the rest is padding that the next write covers.
        """
        plan = self.plan
        start = (row, state.cache.length[row])
        tokens = lax.dynamic_slice(state.tokens, start, (1, size))
        _, features, cache = plan.target.forward(
            target_params, tokens, state.cache, row=row, with_logits=False
        )
        n = jnp.zeros((plan.batch,), jnp.int32).at[row].set(n_real)
        draft = plan.drafter.prefill(
            draft_params,
            state.draft,
            row,
            tokens,
            n_real,
            features if plan.drafter.spec.needs_features else None,
        )
        return state.replace(cache=plan.target.commit(cache, n), draft=draft)

    def _run(
        self,
        target_params: Params,
        draft_params: Params | None,
        state: DecodeState,
        start: Int[Array, " B"],
        n: Int[Array, ""],
    ) -> tuple[DecodeState, Snapshot]:
        """Runs passes until n are made, ``n_passes`` at most, or no slot runs."""
        plan = self.plan
        n = jnp.minimum(n, self.n_passes)

        def more(carry: tuple[Array, DecodeState]) -> Array:
            i, state = carry
            return (i < n) & jnp.any(state.status == Status.RUNNING)

        def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
            i, state = carry
            with row_invariant(plan.exact):
                state, _ = spec_step(
                    target_params,
                    draft_params,
                    state,
                    target=plan.target,
                    drafter=plan.drafter,
                    rule=plan.rule,
                    widths=plan.widths,
                    n_ids=plan.n_ids,
                )
            return i + 1, state

        _, state = lax.while_loop(more, body, (jnp.int32(0), state))
        return state, self._snapshot(state, start)

    def _snapshot(self, state: DecodeState, start: Int[Array, " B"]) -> Snapshot:
        """Cuts the tokens committed since ``start`` out of the slots."""
        width = min(self.n_passes * self.plan.widths[-1], state.tokens.shape[1])
        first = jnp.minimum(start, state.tokens.shape[1] - width)
        cut = jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, width))
        return Snapshot(
            length=state.length,
            status=state.status,
            start=first,
            tokens=cut(state.tokens, first),
            logprobs=cut(state.logprobs, first),
            origin=cut(state.origin, first),
            top=state.top and TopTokens(*(cut(x, first) for x in state.top)),
            stats=state.stats,
        )


def prefill_chunks(n: int) -> list[tuple[int, int]]:
    """Cuts n prompt tokens into (bucket, tokens that count) chunks.

    Args:
      n: tokens to send through the target; 0 gives no chunk.

    Returns:
      The chunks in order; only the last may be padded.
    """
    chunks = []
    for bucket in PREFILL_BUCKETS:
        while n >= bucket:
            chunks.append((bucket, bucket))
            n -= bucket
    if n:
        smallest = PREFILL_BUCKETS[-1]
        if smallest > CACHE_SLACK:
            raise ValueError(
                f"The smallest bucket, {smallest}, must fit {CACHE_SLACK=}."
            )
        chunks.append((smallest, n))
    return chunks

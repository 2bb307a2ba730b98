"""A smaller model as the drafter, token by token.

References: Leviathan, Kalman and Matias, arXiv:2211.17192; Chen et al.,
arXiv:2302.01318.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.drafters._drawing import Drawing
from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    n_kept,
    n_wanted,
)
from specjax.models import CACHE_SLACK, Target
from specjax.typing import Array, Int, Params

# After full acceptance the model has not read its own last draft: the first pass takes
# that token and the pending one, always, so that it needs no branch.
_WINDOW = 2

# Tokens a row may be behind for longer, where others drafted for a while, are read in
# chunks; a chunk's padding must fit what a cache keeps beyond its capacity.
_CHUNK = CACHE_SLACK


class ModelState(NamedTuple):
    """What the drafter carries.

    Attributes:
      cache: the draft model's; it holds ``seen`` committed tokens of each row.
      seen: [B] int32.
      base: tokens that were committed when the last drafts were made. [B]
      read: tokens it had read then, its own drafts included. [B]
      drafted: those drafts. [B, G]
      capacity: tokens a row of the cache may hold.
    """

    cache: Any
    seen: Int[Array, " B"]
    base: Int[Array, " B"]
    read: Int[Array, " B"]
    drafted: Int[Array, "B G"]
    capacity: Int[Array, ""]


class ModelDrafter:
    """The functions of the drafter, over its static side."""

    def __init__(self, draft: Target, gamma: int, drawing: Drawing) -> None:
        self.draft, self.gamma, self.drawing = draft, gamma, drawing
        # Slots for what rows that draft no more write beyond the capacity.
        self.spare = 0

    def spec(self, name: str) -> DrafterSpec:
        """Returns the drafter's static facts."""
        return DrafterSpec(name=name, gamma=self.gamma, draws=self.drawing.kind)

    def drafter(self, name: str, again: Callable[[], Drafter] | None) -> Drafter:
        """Returns the drafter; ``again`` makes its coupled form."""
        return Drafter(
            spec=self.spec(name),
            init=self.init,
            prefill=self.prefill,
            reset_row=self.reset_row,
            propose=self.propose,
            commit=self.commit,
            copy_row=self.copy_row,
            coupled=again,
        )

    def init(self, batch: int, capacity: int) -> ModelState:
        # Each a buffer of its own: the loop donates them all.
        zeros = lambda: jnp.zeros((batch,), jnp.int32)
        capacity = min(capacity, self.draft.spec.max_context)
        return ModelState(
            cache=self.draft.init_cache(batch, capacity + self.spare),
            seen=zeros(),
            base=zeros(),
            read=zeros(),
            drafted=jnp.zeros((batch, self.gamma), jnp.int32),
            capacity=jnp.int32(capacity),
        )

    def prefill(self, params, state, row, tokens, n_real, features) -> ModelState:
        """Reads a prompt chunk; a prompt beyond the draft's context is not read."""
        # Writes past the end would be moved back over what is there. Such a row never
        # drafts, so where its cache starts is of no interest.
        fits = state.seen[row] + tokens.shape[1] <= state.capacity + CACHE_SLACK
        only = jnp.zeros_like(state.seen).at[row]
        cache = self.draft.commit(
            state.cache, only.set(jnp.where(fits, 0, -state.seen[row]))
        )
        _, _, cache = self.draft.forward(
            params, self._known(tokens), cache, row=row, with_logits=False
        )
        seen = jnp.where(fits, state.seen[row] + n_real, 0)
        start = jnp.where(fits, state.seen[row], 0)
        return state._replace(
            cache=self.draft.commit(cache, only.set(seen - start)),
            seen=state.seen.at[row].set(seen),
        )

    def reset_row(self, state: ModelState, row: Array) -> ModelState:
        return state._replace(
            cache=self.draft.reset_row(state.cache, row), seen=state.seen.at[row].set(0)
        )

    def copy_row(self, state, source, row, length) -> ModelState:
        return state._replace(
            cache=self.draft.copy_row(state.cache, source, row, length),
            seen=state.seen.at[row].set(length),
        )

    def propose(
        self, params: Params, state: ModelState, context: DraftContext
    ) -> tuple[Proposal, ModelState]:
        length, gamma = context.length, self.gamma
        alive = (length > 0) & (length + gamma <= state.capacity)
        n_valid = jnp.where(alive, n_wanted(context, gamma), 0)
        steps = jnp.max(n_valid)
        empty = self.drawing.empty(length.shape[0], gamma)
        # Rows that draft no more write beyond the capacity, where nothing is read.
        beyond = jnp.where(alive, 0, state.capacity - state.seen)
        run = functools.partial(self._draft, params, context, alive, beyond, steps)
        (tokens, logprobs), cache, seen = lax.cond(
            steps > 0,
            run,
            lambda empty, cache, seen: (empty, cache, seen),
            empty,
            state.cache,
            state.seen,
        )
        read = jnp.where(alive & (steps > 0), length - 1 + steps, seen)
        state = state._replace(
            cache=cache, seen=seen, base=length, read=read, drafted=tokens
        )
        return Proposal(tokens, logprobs, n_valid), state

    def commit(
        self, params: Params, state: ModelState, context: DraftContext
    ) -> ModelState:
        """Keeps what it read of its drafts as far as they were committed."""
        n_same = n_kept(context, state.drafted, state.base, context.length)
        seen = jnp.maximum(state.seen, jnp.minimum(state.base + n_same, state.read))
        # Its last token stays pending, also of a row that got none.
        seen = jnp.clip(seen, 0, jnp.maximum(context.length - 1, 0))
        return state._replace(
            cache=self.draft.commit(state.cache, seen - state.seen), seen=seen
        )

    def _known(self, tokens: Array) -> Array:
        """Replaces what the draft model has no embedding for."""
        inside = (tokens >= 0) & (tokens < self.draft.spec.vocab_size)
        return jnp.where(inside, tokens, 0)

    def _text(self, context: DraftContext, start: Array, n: int) -> Array:
        """Returns n committed tokens of each row from a start, 0 beyond the text."""
        at = start[:, None] + jnp.arange(n)[None, :]
        size = context.history.shape[1]
        tokens = jnp.take_along_axis(context.history, jnp.minimum(at, size - 1), axis=1)
        return self._known(jnp.where(at < context.length[:, None], tokens, 0))

    def _read_up(self, params, context, alive, cache, seen):
        """Reads what rows are behind, up to the last tokens that ``_first`` takes."""
        length, draft = context.length, self.draft
        behind = lambda seen: jnp.where(alive, length - seen, 0)

        def read(carry):
            cache, seen = carry
            n = jnp.clip(behind(seen) - _WINDOW, 0, _CHUNK)
            tokens = self._text(context, seen, _CHUNK)
            _, _, cache = draft.forward(params, tokens, cache, with_logits=False)
            return draft.commit(cache, n), seen + n

        late = lambda carry: jnp.any(behind(carry[1]) > _WINDOW)
        cache, seen = lax.while_loop(late, read, (cache, seen))
        return cache, seen, behind(seen)

    def _first(self, params, context, seen, n, cache):
        """Reads the text's last n tokens; returns what follows, and the cache."""
        window = self._text(context, seen, _WINDOW)
        logits, _, cache = self.draft.forward(params, window, cache)
        last = jnp.maximum(n - 1, 0)[:, None, None]
        logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
        return logits, self.draft.commit(cache, n)

    def _draft(self, params, context, alive, beyond, steps, empty, cache, seen):
        """Reads what is missing and drafts; the cache ends at the committed text."""
        draft = self.draft
        cache = draft.commit(cache, beyond)
        cache, seen, n = self._read_up(params, context, alive, cache, seen)

        def first(cache, tokens):
            return self._first(params, context, seen, n, cache)

        def later(cache, token):
            logits, _, cache = draft.forward(params, self._known(token), cache)
            # Rows that draft no more stay where they are: all writes keep in bounds.
            return logits[:, 0], draft.commit(cache, alive.astype(jnp.int32))

        def step(carry):
            i, cache, kept = carry
            before = lax.dynamic_slice_in_dim(kept.tokens, i - 1, 1, axis=1)
            logits, cache = lax.cond(i == 0, first, later, cache, before)
            return i + 1, cache, self.drawing.put(kept, logits, context, i)

        more = lambda carry: carry[0] < steps
        _, cache, kept = lax.while_loop(more, step, (jnp.int32(0), cache, empty))
        cache = draft.commit(cache, jnp.where(alive, 1 - steps, -beyond))
        return kept, cache, seen + n

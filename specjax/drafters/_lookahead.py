"""Lookahead decoding: n-grams that the target itself guesses ahead of the text.

Reference: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead
Decoding", arXiv:2402.02057, Algorithm 2. Beside the drafts, each pass carries a window
of guesses for the positions ahead, several Jacobi steps deep; what the target answers
to its oldest trajectories makes n-grams, which are kept by their first token and are
the drafts wherever the text comes to that token.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    check_gamma,
    n_wanted,
    pending_token,
)
from specjax.trees import merge_continuations
from specjax.typing import Array, Int


class LookaheadState(NamedTuple):
    """What the drafter carries of each row.

    Attributes:
      window: guesses, G steps for each of W positions ahead, -1 before the first pass.
        [B, G, W] int32
      pool: the latest n-grams, G + 1 tokens each, a ring; -1 is none. [B, P, G + 1]
      head: where the ring goes on. [B]
      start: drafts of the last pass before the window's. [B]
    """

    window: Int[Array, "B G W"]
    pool: Int[Array, "B P G1"]
    head: Int[Array, " B"]
    start: Int[Array, " B"]


@functools.cache
def lookahead(
    gamma: int = 3, window: int = 5, guesses: int = 5, *, n_pool: int = 256
) -> Drafter:
    """Proposes n-grams that earlier passes found, and looks for more in each pass.

    No model and no text to look up: for answers that repeat nothing. A pass is wide,
    so this pays where a wide pass costs what a narrow one does: one row on a GPU or
    TPU. The window is drafted like the n-grams, as branches of one tree (its first
    step a chain, its later ones a branch at each link), so that every rule for trees
    verifies it; where a guess of the window itself is right, it is kept.

    Args:
      gamma: tokens of an n-gram after its first; the window has as many steps.
      window: positions ahead that are guessed, W.
      guesses: n-grams of a pass, at most, the latest first.
      n_pool: n-grams that a row keeps.

    Returns:
      The drafter; it has no parameters. Equal calls give the identical one.

    Raises:
      ValueError: a size is out of range.
    """
    check_gamma(gamma)
    for name, value in (("window", window), ("guesses", guesses)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number >= 1.")
    if n_pool < max(window, guesses):
        raise ValueError(
            f"{n_pool=} n-grams must hold those of a pass: {window=}, {guesses=}."
        )
    made = _Lookahead(gamma, window, guesses, n_pool)
    return Drafter(
        spec=DrafterSpec(
            name="lookahead", gamma=made.n_nodes, n_top=1, depth=window + gamma - 1
        ),
        init=made.init,
        prefill=lambda params, state, row, tokens, n_real, features: state,
        reset_row=made.reset_row,
        propose=made.propose,
        commit=made.commit,
        # Prompts teach nothing: what there is to copy is an empty pool.
        copy_row=lambda state, source, row, length: made.reset_row(state, row),
    )


class _Lookahead:
    """The functions of the drafter, over its static side."""

    def __init__(self, gamma: int, window: int, guesses: int, n_pool: int) -> None:
        self.gamma, self.window, self.guesses = gamma, window, guesses
        self.n_pool, self.n_window = n_pool, gamma * window
        self.n_nodes = self.n_window + guesses * gamma
        # Of the window: the first step a chain, each later one below the one before.
        node = np.arange(self.n_window)
        self.parents = np.where(node < window, node - 1, node - window)

    def init(self, batch: int, capacity: int) -> LookaheadState:
        none = lambda *shape: jnp.full((batch, *shape), -1, jnp.int32)
        zeros = lambda: jnp.zeros((batch,), jnp.int32)
        return LookaheadState(
            window=none(self.gamma, self.window),
            pool=none(self.n_pool, self.gamma + 1),
            head=zeros(),
            start=zeros(),
        )

    def reset_row(self, state: LookaheadState, row: Array) -> LookaheadState:
        return LookaheadState(
            window=state.window.at[row].set(-1),
            pool=state.pool.at[row].set(-1),
            head=state.head.at[row].set(0),
            start=state.start.at[row].set(0),
        )

    def propose(
        self, params: None, state: LookaheadState, context: DraftContext
    ) -> tuple[Proposal, LookaheadState]:
        fresh = (state.window[:, 0, 0] < 0)[:, None, None]
        window = jnp.where(fresh, self._first_window(context), state.window)
        merged = merge_continuations(
            self._found(state, context), self.guesses * self.gamma
        )
        start = merged.tree.n_nodes
        # The n-grams first: of equal children of a node rules enter the first.
        number = jnp.arange(self.n_nodes)[None, :]
        own = number < start[:, None]
        at = jnp.clip(number - start[:, None], 0, self.n_window - 1)
        guessed = window.reshape(-1, self.n_window)
        missing = [(0, 0), (0, self.n_window)]
        tokens = jnp.where(
            own,
            jnp.pad(merged.tokens, missing),
            jnp.take_along_axis(guessed, at, axis=1),
        )
        below = jnp.asarray(self.parents, jnp.int32)[at]
        below = jnp.where(below < 0, -1, below + start[:, None])
        parents = jnp.where(own, jnp.pad(merged.tree.parents, missing), below)
        n_nodes = jnp.where(context.length > 0, start + self.n_window, 0)
        counts = number < n_nodes[:, None]
        proposal = Proposal(
            jnp.where(counts, tokens, 0).astype(jnp.int32),
            None,
            jnp.minimum(n_nodes, n_wanted(context, self.n_nodes)),
            parents=jnp.where(counts, parents, -1).astype(jnp.int32),
        )
        return proposal, state._replace(window=window, start=start)

    def _first_window(self, context: DraftContext) -> Int[Array, "B G W"]:
        """Takes guesses from all over the text: any will do to begin with."""
        length, size = context.length[:, None, None], context.history.shape[1]
        column = jnp.arange(self.window)[None, None, :]
        at = (2 * column + 1) * length // (2 * self.window)
        at = (at + jnp.arange(self.gamma)[None, :, None]) % jnp.maximum(length, 1)
        flat = jnp.minimum(at, size - 1).reshape(len(context.length), -1)
        tokens = jnp.take_along_axis(context.history, flat, axis=1)
        return tokens.reshape(at.shape).astype(jnp.int32)

    def _found(
        self, state: LookaheadState, context: DraftContext
    ) -> Int[Array, "B R G"]:
        """Finds the latest n-grams that begin with the pending token; -1 is none."""
        number = jnp.arange(self.n_pool)[None, :]
        age = (state.head[:, None] - 1 - number) % self.n_pool
        match = state.pool[:, :, 0] == pending_token(context)
        order = jnp.argsort(jnp.where(match, age, self.n_pool), axis=1)
        first = order[:, : self.guesses]
        known = jnp.take_along_axis(match, first, axis=1)[..., None]
        found = jnp.take_along_axis(state.pool[:, :, 1:], first[..., None], axis=1)
        return jnp.where(known, found, -1)

    def commit(
        self, params: None, state: LookaheadState, context: DraftContext
    ) -> LookaheadState:
        """Learns what the target answered to the window, and moves it a step on."""
        assert context.scored is not None
        tokens, n_rows, top = context.scored
        if tokens.shape[1] < 1 + self.n_window:
            return state
        last = 1 + state.start + self.n_window - self.window
        at = last[:, None] + jnp.arange(self.window)[None, :]
        # A pass without its whole window, or of a row that did not run, says nothing.
        whole = (n_rows > at[:, -1]) & (state.window[:, 0, 0] >= 0)
        at = jnp.minimum(at, tokens.shape[1] - 1)
        answers = jnp.take_along_axis(top[:, :, 0], at, axis=1)
        grams = jnp.concatenate([state.window, answers[:, None]], axis=1)
        new = jnp.swapaxes(grams, 1, 2)
        # What is found again is the latest.
        again = jnp.all(state.pool[:, :, None] == new[:, None], axis=-1)
        pool = jnp.where(jnp.any(again, axis=-1)[..., None], -1, state.pool)
        slots = (state.head[:, None] + jnp.arange(self.window)) % self.n_pool
        pool = pool.at[jnp.arange(len(slots))[:, None], slots].set(new)
        keep = lambda new, old: jnp.where(whole[:, None, None], new, old)
        head = (state.head + self.window) % self.n_pool
        return state._replace(
            window=keep(grams[:, 1:], state.window),
            pool=keep(pool, state.pool),
            head=jnp.where(whole, head, state.head),
        )

"""How a draft is drawn from a draft model's logits."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.drafters._protocol import DraftContext, DrawKind
from specjax.ops.vocab import argmax, log_normalizer
from specjax.sampling import draft_noise, gumbel_argmax, gumbel_noise, warp
from specjax.typing import Array, Float, Int

#: How drafts are drawn: from the draft model's law under the row's settings, from the
#: same law with the target's own noise, or its most probable token.
Draws = Literal["sample", "coupled", "argmax"]


def check_draws(draws: str) -> None:
    """Checks a way of drawing.

    Raises:
      ValueError: it is not known.
    """
    if draws not in ("sample", "coupled", "argmax"):
        raise ValueError(f"{draws=} is not known; use 'sample', 'coupled' or 'argmax'.")


class Drafts(NamedTuple):
    """Drafts of a pass, and the laws they were drawn from where rules need them."""

    tokens: Int[Array, "B G"]
    logprobs: Float[Array, "B G V"] | None


class Drawing(NamedTuple):
    """A way of drawing.

    Attributes:
      vocab_size: of the target.
      n_ids: ids below this may be drawn.
      draws: how.
    """

    vocab_size: int
    n_ids: int
    draws: Draws

    @property
    def kind(self) -> DrawKind:
        """What ``DrafterSpec.draws`` says of it."""
        return "point" if self.draws == "argmax" else self.draws

    def empty(self, batch: int, gamma: int) -> Drafts:
        """Makes room for the drafts of a pass."""
        laws = None
        if self.draws == "sample":
            laws = jnp.zeros((batch, gamma, self.vocab_size), jnp.float32)
        return Drafts(jnp.zeros((batch, gamma), jnp.int32), laws)

    def put(
        self,
        drafts: Drafts,
        logits: Float[Array, "B D"],
        context: DraftContext,
        i: Int[Array, ""],
    ) -> Drafts:
        """Draws the i-th draft of each row and writes it down.

        Args:
          drafts: those before it.
          logits: the draft model's, of any width.
          context: of the pass.
          i: from 0.

        Returns:
          The drafts with the new one.
        """
        drawn = self._draw(self._fit(logits), context, i)

        def put(old: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(old, new[:, None], i, axis=1)

        laws = drafts.logprobs
        if laws is not None and drawn.logprobs is not None:
            laws = put(laws, drawn.logprobs)
        return Drafts(put(drafts.tokens, drawn.tokens), laws)

    def _draw(self, logits: Array, context: DraftContext, i: Array) -> Drafts:
        """Draws a draft of each row, and gives its law where it has one."""
        settings, size = context.settings, self.vocab_size
        if self.draws == "argmax":
            return Drafts(argmax(logits), None)

        def sampled(logits: Array) -> Drafts:
            scores = warp(logits[:, None], settings)[:, 0]
            if self.draws == "coupled":
                position = (context.length + i)[:, None]
                noise = gumbel_noise(settings.seed, position, size)[:, 0]
                return Drafts(gumbel_argmax(scores, noise), None)
            noise = draft_noise(settings.seed, context.length, i, size)
            laws = scores - log_normalizer(scores)[:, None]
            return Drafts(gumbel_argmax(scores, noise), laws)

        def greedy(logits: Array) -> Drafts:
            token = argmax(logits)
            if self.draws == "coupled":
                return Drafts(token, None)
            at = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            point = jnp.where(at == token[:, None], 0.0, -jnp.inf)
            # Also here a law that is none must be seen as such.
            spoilt = jnp.isnan(jnp.max(logits, axis=-1, keepdims=True))
            return Drafts(token, jnp.where(spoilt, jnp.nan, point))

        return lax.cond(jnp.any(settings.temperature > 0), sampled, greedy, logits)

    def _fit(self, logits: Array) -> Array:
        """Gives logits the target's width, -inf where not both have a token."""
        have = logits.shape[-1]
        logits = jnp.pad(logits, ((0, 0), (0, max(self.vocab_size - have, 0))))
        logits = logits[:, : self.vocab_size].astype(jnp.float32)
        if self.n_ids == self.vocab_size:
            return logits
        index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return jnp.where(index < self.n_ids, logits, -jnp.inf)

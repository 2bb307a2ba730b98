"""How a draft is drawn from a draft model's logits."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafters._protocol import DraftContext, DrawKind
from specjax.ops.vocab import argmax, log_normalizer
from specjax.sampling import Settings, draft_noise, gumbel_argmax, gumbel_noise, warp
from specjax.typing import Array, Float, Int

#: How drafts are drawn: from the draft model's law under the row's settings, from the
#: same law with the target's own noise, or its most probable token. Children of a node
#: are drawn independently, or in turn from what is left; or they are the most probable.
Draws = Literal["sample", "without_replacement", "coupled", "argmax"]


def check_draws(draws: str, *, tree: bool = False) -> None:
    """Checks a way of drawing.

    Args:
      draws: the way.
      tree: whether nodes have several children.

    Raises:
      ValueError: it is not known, or is one of trees.
    """
    known = ["sample", "coupled", "argmax"]
    if tree:
        known.insert(1, "without_replacement")
    if draws not in known:
        *others, last = map(repr, known)
        raise ValueError(f"{draws=} is not known; use {', '.join(others)} or {last}.")


#: Share of the unfiltered law in what children are drawn from without replacement.
_UNFILTERED = 2.0**-10


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
        if self.draws in ("sample", "without_replacement"):
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

    def siblings(
        self,
        logits: Float[Array, "B P D"],
        context: DraftContext,
        depth: int,
        nodes: np.ndarray,
    ) -> tuple[Int[Array, "B W P"], Float[Array, "B P V"] | None]:
        """Draws the children of some nodes of one depth.

        At temperature 0 they are the draft model's most probable tokens: rules know all
        but the first to have no probability in its law.

        Args:
          logits: the draft model's after each of P nodes, of any width.
          context: of the pass.
          depth: of the P nodes, 0 of the pending token.
          nodes: numbers of their children by rank, whose noise they have, [W, P].

        Returns:
          Tokens by rank, and the laws they were drawn from, where they have them.
        """
        logits = self._fit(logits)
        if self.draws == "argmax":
            return self._ranked(logits, len(nodes)), None
        settings = context.settings

        def drawn(logits: Array) -> tuple[Array, Array | None]:
            scores = self._scores(logits, settings)
            tokens = self._in_turn(logits, scores, context, depth, nodes)
            return tokens, self._laws(logits, scores)

        def ranked(logits: Array) -> tuple[Array, Array | None]:
            tokens = self._ranked(logits, len(nodes))
            index = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
            point = jnp.where(index == tokens[:, 0, :, None], 0.0, -jnp.inf)
            return tokens, self._laws(logits, point)

        return lax.cond(jnp.any(settings.temperature > 0), drawn, ranked, logits)

    def _scores(self, logits: Array, settings: Settings) -> Array:
        """Gives the law that children are drawn from, up to a constant."""
        scores = warp(logits, settings)
        if self.draws != "without_replacement":
            return scores
        # Filters may leave fewer tokens than there are children, and what is drawn
        # then would be any of the others; a little of the whole law ranks these.
        sampled = (settings.temperature > 0)[:, None, None]
        whole = logits / jnp.where(sampled, settings.temperature[:, None, None], 1.0)
        parts = [
            x - log_normalizer(x)[..., None] + np.float32(np.log(share))
            for x, share in ((scores, 1 - _UNFILTERED), (whole, _UNFILTERED))
        ]
        return jnp.where(sampled, jnp.logaddexp(*parts), scores)

    def _laws(self, logits: Array, scores: Array) -> Array | None:
        """Normalises scores, where rules need the laws of what is drawn."""
        if self.draws == "coupled":
            return None
        laws = scores - log_normalizer(scores)[..., None]
        # Also at temperature 0 a law that is none must be seen as such.
        spoilt = jnp.isnan(jnp.max(logits, axis=-1, keepdims=True))
        return jnp.where(spoilt, jnp.nan, laws)

    def _ranked(self, logits: Float[Array, "B P V"], n: int) -> Int[Array, "B N P"]:
        """Returns the n most probable tokens; of equal ones the lowest id first."""
        index = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        found = []
        for _ in range(n):
            found.append(argmax(logits))
            logits = jnp.where(index == found[-1][..., None], -jnp.inf, logits)
        return jnp.stack(found, axis=1)

    def _in_turn(
        self,
        logits: Float[Array, "B P V"],
        scores: Float[Array, "B P V"],
        context: DraftContext,
        depth: int,
        nodes: np.ndarray,
    ) -> Int[Array, "B W P"]:
        """Draws one rank after the other."""
        index = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        greedy = (context.settings.temperature == 0)[:, None]
        apart = greedy if self.draws == "sample" else jnp.ones_like(greedy)
        taken, found = jnp.zeros(logits.shape, bool), []
        for numbers in nodes:
            left = jnp.where(taken, -jnp.inf, scores)
            none = greedy | (jnp.max(left, axis=-1) == -jnp.inf)
            token = gumbel_argmax(left, self._noise(context, depth, numbers))
            ranked = argmax(jnp.where(taken, -jnp.inf, logits))
            token = jnp.where(none, ranked, token)
            taken |= (index == token[..., None]) & apart[..., None]
            found.append(token)
        return jnp.stack(found, axis=1)

    def _noise(
        self, context: DraftContext, depth: int, numbers: np.ndarray
    ) -> Float[Array, "B P Z"]:
        """Gumbel noise of nodes: the target's at their position, or each its own."""
        seed, length, size = context.settings.seed, context.length, self.vocab_size
        if self.draws == "coupled":
            return gumbel_noise(seed, (length + depth)[:, None], size)
        own = lambda i: draft_noise(seed, length, i, size)
        return jax.vmap(own, out_axes=1)(jnp.asarray(np.maximum(numbers, 0)))

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
        missing = max(self.vocab_size - logits.shape[-1], 0)
        logits = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)])
        logits = logits[..., : self.vocab_size].astype(jnp.float32)
        if self.n_ids == self.vocab_size:
            return logits
        index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jnp.where(index < self.n_ids, logits, -jnp.inf)

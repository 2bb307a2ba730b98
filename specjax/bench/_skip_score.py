"""How well a target with sublayers left out drafts for itself, for any of its subsets.

A draft of ``drafters.layer_skip`` attends to the keys and values that the target itself
computed for the committed text, and to its own for the tokens drafted before it in the
same pass. So it is scored here: prompt and output fill the target's cache once, outputs
are cut into passes of gamma tokens, and a draft reads the tokens of a pass behind the
target's keys of all that precedes it. While drafts are accepted the tokens it reads are
those it drafted, so what is counted is what the decode loop would accept.

Which sublayers run is an argument of the compiled program, so subsets compile nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from specjax import cache as kv
from specjax.models import NO_SKIP, Decoder, DecoderConfig, LayerSkip, decoder_target
from specjax.ops.platform import compiler_options
from specjax.ops.vocab import argmax
from specjax.typing import Array, Bool, Float, Int, Params

if TYPE_CHECKING:
    from specjax.weights import Model

#: Tokens of a pass that fills the cache.
_FILL = 64


class Text(NamedTuple):
    """A prompt, and what the target wrote after it.

    Attributes:
      name: of its class.
      prompt_ids: the prompt, at least one token.
      output_ids: the target's tokens, the positions that drafts are scored at.
    """

    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


def gated_blocks(config: DecoderConfig) -> Callable[..., Any]:
    """Makes a decoder's forward in which an array says what runs.

    Args:
      config: the decoder.

    Returns:
      (params, tokens [R, T], cache, runs [n_layers, 2]) -> (hidden [R, T, D], cache):
      the residual stream after the last block, as ``Halves.read`` takes it. Where
      runs[i, 0] is False, block i has no attention, and its part of the cache stays as
      it is; where runs[i, 1] is False, no feed-forward network.
    """
    abstract = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    graph, leaves = nnx.split(abstract)

    def forward(
        params: Params,
        tokens: Int[Array, "R T"],
        cache: kv.KVCache,
        runs: Bool[Array, "L 2"],
    ) -> tuple[Float[Array, "R T D"], kv.KVCache]:
        state = jax.tree.map(lambda leaf: leaf, leaves)
        nnx.replace_by_pure_dict(state, params)
        model = nnx.merge(graph, state)
        x, layers = model.embed(tokens), list(cache.layers)

        def attend(i: int, x: Array, layer: kv.LayerKV) -> tuple[Array, kv.LayerKV]:
            # One layer passes through the branch, or it would copy them all.
            own = cache.replace(layers=(*layers[:i], layer, *layers[i + 1 :]))
            only = LayerSkip(ff=(i,))
            x, _, own = model.run_blocks(x, own, start=i, stop=i + 1, skip=only)
            return x, own.layers[i]

        def feed(i: int, x: Array) -> Array:
            only = LayerSkip(attention=(i,))
            return model.run_blocks(x, cache, start=i, stop=i + 1, skip=only)[0]

        # Branches and not products with 0 and 1: what is left out takes no time.
        for i in range(config.n_layers):
            branch = functools.partial(attend, i)
            pass_by = lambda x, layer: (x, layer)
            x, layers[i] = lax.cond(runs[i, 0], branch, pass_by, x, layers[i])
            branch = functools.partial(feed, i)
            x = lax.cond(runs[i, 1], branch, lambda x: x, x)
        return x, cache.replace(layers=tuple(layers))

    return forward


class _Programs(NamedTuple):
    """Compiled functions of a decoder; C passes of G tokens for each of B texts.

    Attributes:
      fill: (params, cache, tokens [N, B, F]) -> cache that holds them.
      draft: (params, cache, tokens [C, B, G], starts [C, B], runs [L, 2]) -> hidden
        states [C, B, G, D].
      best: (params, hidden) -> most probable ids [C, B, G].
      overlap: (params, hidden, hidden, temperature) -> 1 - TV of the two laws, of the
        same shape.
    """

    fill: Callable[..., Any]
    draft: Callable[..., Any]
    best: Callable[..., Any]
    overlap: Callable[..., Any]


@functools.cache
def _programs(config: DecoderConfig, n_ids: int) -> _Programs:
    target, gated = decoder_target(config), gated_blocks(config)
    halves = target.halves
    assert halves is not None

    def fill(params, cache, tokens):
        def step(cache, tokens):
            _, _, cache = target.forward(params, tokens, cache, with_logits=False)
            return target.commit(cache, jnp.full(tokens.shape[:1], _FILL)), None

        return lax.scan(step, cache, tokens)[0]

    def draft(params, cache, tokens, starts, runs):
        def step(cache, given):
            tokens, start = given
            cache = cache.replace(length=start)
            hidden, cache = gated(params, tokens, cache, runs)
            return cache, hidden

        # The last pass first: it writes over the target's keys where no earlier pass
        # looks, so that one copy of the cache serves them all.
        return lax.scan(step, cache, (tokens, starts), reverse=True)[1]

    def read(params, hidden):
        logits = halves.read(params, hidden)
        known = lax.broadcasted_iota(jnp.int32, logits.shape, 2) < n_ids
        return jnp.where(known, logits, -jnp.inf)

    def best(params, hidden):
        return lax.map(lambda rows: argmax(read(params, rows)), hidden)

    def overlap(params, ours, theirs, temperature):
        law = lambda rows: jax.nn.softmax(read(params, rows) / temperature)
        both = lambda rows: jnp.minimum(law(rows[0]), law(rows[1])).sum(-1)
        # Equal laws overlap by 1, which rounding must not exceed.
        return jnp.minimum(lax.map(both, (ours, theirs)), 1.0)

    compiled = lambda f: jax.jit(f, compiler_options=compiler_options())
    # What fill is given is as large as the texts are: write in place.
    filled = jax.jit(fill, donate_argnums=1, compiler_options=compiler_options())
    return _Programs(filled, compiled(draft), compiled(best), compiled(overlap))


class DraftScorer:
    """Scores what drafts for some texts, whichever sublayers it leaves out."""

    def __init__(
        self,
        model: "Model",
        texts: Sequence[Text],
        *,
        gamma: int,
        temperature: float = 0.0,
        shape: tuple[int, int, int] | None = None,
    ) -> None:
        """Fills the target's cache with the texts.

        Args:
          model: the target.
          texts: what it wrote.
          gamma: draft tokens a pass.
          temperature: of both laws; 0 compares the most probable tokens.
          shape: ``texts_shape`` of these and other texts, so that both have one
            compiled program; None: of these.

        Raises:
          ValueError: there is nothing to score, or the target is no decoder whose
            blocks can be left out.
        """
        if model.target.halves is None or model.target != decoder_target(model.config):
            raise ValueError(
                f"{model.name} is no whole decoder: none of its sublayers can be left "
                "out. Give a model as specjax.load returns it."
            )
        if not any(text.output_ids for text in texts):
            raise ValueError(
                f"{model.name} wrote nothing after the {len(texts)} prompts, so there "
                "is no position to score; give other prompts."
            )
        self._params, self._texts = model.params, tuple(texts)
        self._programs = _programs(model.config, model.n_ids)
        self._n_layers, self._temperature = model.config.n_layers, temperature
        rows, n_passes, context = shape or texts_shape(texts, gamma)
        inputs = np.zeros((rows, n_passes * gamma), np.int32)
        starts = np.zeros((n_passes, rows), np.int32)
        held = np.zeros((rows, -(-context // _FILL) * _FILL), np.int32)
        for row, (_, prompt, output) in enumerate(texts):
            # Each token is read to score the next; the last one has none.
            ids, first = (*prompt, *output), len(prompt) - 1
            inputs[row, : len(output)] = ids[first:-1] if output else ()
            starts[:, row] = first + gamma * np.arange(n_passes)
            held[row, : len(ids)] = ids
        self._passes = inputs.reshape(rows, n_passes, gamma).swapaxes(0, 1), starts
        cache = model.target.init_cache(rows, max(context, held.shape[1]))
        chunks = held.reshape(rows, -1, _FILL).swapaxes(0, 1)
        self._cache = self._programs.fill(self._params, cache, chunks)
        self._hidden = self._draft(NO_SKIP)
        self._ids = np.asarray(self._programs.best(self._params, self._hidden))

    def score(self, skip: LayerSkip) -> list[np.ndarray]:
        """Scores every output token of every text.

        Args:
          skip: sublayers to leave out.

        Returns:
          For each text the acceptances of its output tokens, in [0, 1].
        """
        hidden = self._draft(skip)
        if self._temperature:
            at = jnp.float32(self._temperature)
            scores = self._programs.overlap(self._params, self._hidden, hidden, at)
        else:
            scores = self._programs.best(self._params, hidden) == self._ids
        rows = np.asarray(scores, np.float64).swapaxes(0, 1)
        flat = rows.reshape(len(rows), -1)
        pairs = zip(self._texts, flat[: len(self._texts)], strict=True)
        return [row[: len(text.output_ids)] for text, row in pairs]

    @property
    def n_positions(self) -> int:
        """How many output tokens are scored."""
        return sum(len(text.output_ids) for text in self._texts)

    def by_class(self, skip: LayerSkip) -> dict[str, float]:
        """Returns the mean acceptance of each class of texts that has output."""
        groups: dict[str, list[np.ndarray]] = {}
        for text, scores in zip(self._texts, self.score(skip), strict=True):
            groups.setdefault(text.name, []).append(scores)
        joined = {name: np.concatenate(parts) for name, parts in groups.items()}
        return {name: float(s.mean()) for name, s in joined.items() if len(s)}

    def acceptance(self, skip: LayerSkip) -> float:
        """Returns the mean acceptance over all positions."""
        return float(np.concatenate(self.score(skip)).mean())

    def _draft(self, skip: LayerSkip) -> Array:
        skip.check(self._n_layers)
        runs = np.ones((self._n_layers, 2), bool)
        runs[list(skip.attention), 0] = False
        runs[list(skip.ff), 1] = False
        return self._programs.draft(self._params, self._cache, *self._passes, runs)


def texts_shape(texts: Sequence[Text], gamma: int) -> tuple[int, int, int]:
    """Gives the room that texts take when they are scored side by side.

    Args:
      texts: the texts.
      gamma: draft tokens a pass.

    Returns:
      How many texts, passes of the longest output, and positions of the longest text,
      its last pass whole.
    """
    n_passes = max(-(-len(text.output_ids) // gamma) for text in texts)
    longest = max(len(text.prompt_ids) for text in texts) + n_passes * gamma
    return len(texts), n_passes, longest


def shape_of_both(
    texts: Sequence[Text], others: Sequence[Text], gamma: int
) -> tuple[int, int, int]:
    """Gives the room that either of two lists of texts fits in."""
    rows, n_passes, longest = map(
        max, texts_shape(texts, gamma), texts_shape(others, gamma)
    )
    return rows, n_passes, longest

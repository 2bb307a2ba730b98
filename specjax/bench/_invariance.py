"""How much the width of a pass changes what the target says."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decode import fit_capacity
from specjax.models import Target
from specjax.ops.platform import compiler_options, row_invariant
from specjax.typing import Array, Params

if TYPE_CHECKING:
    from specjax.weights import Model

#: Edges of the margin histogram, in natural-log units of probability.
MARGIN_EDGES = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, np.inf)


@dataclasses.dataclass(frozen=True)
class Flips:
    """Passes of one width against passes of one row, on the same texts.

    Attributes:
      width: rows of the wider passes.
      exact: whether both were computed as exact mode does.
      n_positions: positions compared.
      n_different: those where any logit differs in any bit.
      largest_difference: of two logits of one token.
      margins: at each position, how far the one-row pass puts its best token above its
        second best; [n_positions].
      flipped: whether the best token differs there; [n_positions].
    """

    width: int
    exact: bool
    n_positions: int
    n_different: int
    largest_difference: float
    margins: np.ndarray
    flipped: np.ndarray

    @property
    def flip_rate(self) -> float:
        """Positions whose best token differs, as a fraction."""
        return float(np.mean(self.flipped))

    def histogram(self) -> list[tuple[float, float, int, int]]:
        """Returns (from, to, positions, flips) for each bin of the margin."""
        pairs = zip(MARGIN_EDGES[:-1], MARGIN_EDGES[1:], strict=True)
        rows = []
        for low, high in pairs:
            inside = (self.margins >= low) & (self.margins < high)
            flips = int(np.sum(self.flipped & inside))
            rows.append((low, high, int(np.sum(inside)), flips))
        return rows


def count_flips(
    model: "Model",
    texts: Sequence[Sequence[int]],
    *,
    width: int,
    exact: bool,
    start: Sequence[int] | None = None,
) -> Flips:
    """Scores texts in passes of one row and of ``width`` rows and compares.

    Args:
      model: the model.
      texts: ids of each text.
      width: rows of the wider passes.
      exact: compute both as exact mode does, where they must not differ in any bit.
      start: position of each text from which on positions count; None is 0.

    Returns:
      The comparison.

    Raises:
      ValueError: the width is below 2, or no text is as long as a pass.
    """
    if width < 2:
        raise ValueError(f"{width=} must be at least 2: it is compared with 1.")
    longest = max((len(text) for text in texts), default=0)
    if longest < width:
        raise ValueError(f"No text is as long as a pass of {width=}; got {longest}.")
    blocks = -(-longest // width)
    margins, flipped, n_different, largest = [], [], 0, 0.0
    for text, first in zip(texts, start or [0] * len(texts), strict=True):
        padded = np.zeros((blocks * width,), np.int32)
        padded[: len(text)] = text
        one, wide = (
            _score(model, jnp.asarray(padded), width=w, exact=exact) for w in (1, width)
        )
        one, wide = one[first : len(text)], wide[first : len(text)]
        top = np.asarray(lax.top_k(one, 2)[0])
        margins.append(top[:, 0] - top[:, 1])
        best = [np.asarray(jnp.argmax(x, axis=-1)) for x in (one, wide)]
        flipped.append(best[0] != best[1])
        difference = np.asarray(jnp.max(jnp.abs(one - wide), axis=-1))
        n_different += int(np.sum(difference > 0))
        largest = max(largest, float(np.max(difference, initial=0.0)))
    joined = np.concatenate(margins)
    return Flips(
        width=width,
        exact=exact,
        n_positions=len(joined),
        n_different=n_different,
        largest_difference=largest,
        margins=joined,
        flipped=np.concatenate(flipped),
    )


def _score(model: "Model", ids: Array, *, width: int, exact: bool) -> Array:
    """Returns the logits that follow each id, [L, V], from passes of ``width``."""
    capacity = fit_capacity(len(ids), model.target.spec.max_context)
    score = _scorer(model.target, capacity, width, exact)
    return score(model.params, ids.reshape(-1, 1, width))


@functools.lru_cache(maxsize=8)
def _scorer(target: Target, capacity: int, width: int, exact: bool):
    def score(params: Params, blocks: Array) -> Array:
        def one_pass(cache, tokens):
            with row_invariant(exact):
                logits, _, cache = target.forward(params, tokens, cache)
            n = jnp.full((1,), width, jnp.int32)
            return target.commit(cache, n), logits[0]

        _, logits = lax.scan(one_pass, target.init_cache(1, capacity), blocks)
        return logits.reshape(-1, logits.shape[-1])

    return jax.jit(score, compiler_options=compiler_options())

"""Noise as a function of (seed, position), and draws from explicit noise."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.ops.vocab import argmax, lanes_log_normalizer
from specjax.typing import Array, Float, Int, UInt

# Separate streams of a request's seed. A stream is never shared between two kinds
# of decision: the residual draw with the draft's noise is a known biased sampler.
_STREAM_GUMBEL = 0
_STREAM_UNIFORM = 1
_STREAM_DRAFT = 2

# Tokens of a column; about the square root of the vocabularies in use.
_LANES = 256


class UniformNoise(NamedTuple):
    """Uniform numbers in [0, 1) for one pass.

    Attributes:
      accept: one for each draft position, [B, N].
      draw: for the correction or bonus token, [B].
    """

    accept: Float[Array, "B N"]
    draw: Float[Array, " B"]


def n_gumbels(vocab_size: int) -> int:
    """Returns how many Gumbel numbers a draw from a vocabulary takes."""
    columns = _n_columns(vocab_size)
    return vocab_size if columns == 1 else columns + _LANES


def gumbel_noise(
    seed: UInt[Array, " B"], position: Int[Array, "B N"], vocab_size: int
) -> Float[Array, "B N Z"]:
    """Returns standard Gumbel noise keyed by (seed, absolute position).

    The noise of an output position is the same whichever pass, batch row or block
    index reaches it.

    Args:
      seed: request seeds.
      position: absolute output positions.
      vocab_size: V.

    Returns:
      float32 noise for ``gumbel_argmax``, Z = n_gumbels(V).
    """
    n = n_gumbels(vocab_size)

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), _STREAM_GUMBEL)
        key = jax.random.fold_in(key, position)
        return jax.random.gumbel(key, (n,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(seed, position)


def draft_noise(
    seed: UInt[Array, " B"], length: Int[Array, " B"], index: Array, vocab_size: int
) -> Float[Array, "B Z"]:
    """Returns Gumbel noise for a draft, keyed by (seed, length, index).

    Not by position: whether a pass keeps a draft may depend on the later ones (block
    verification), so a position drafted anew needs noise of its own.

    Args:
      seed: request seeds.
      length: committed tokens of each row when the pass starts.
      index: of the draft in its pass.
      vocab_size: V.

    Returns:
      float32 noise for ``gumbel_argmax``, Z = n_gumbels(V).
    """
    n = n_gumbels(vocab_size)

    def one(seed: Array, length: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), _STREAM_DRAFT)
        key = jax.random.fold_in(jax.random.fold_in(key, length), index)
        return jax.random.gumbel(key, (n,), jnp.float32)

    return jax.vmap(one)(seed, length)


def gumbel_argmax(
    scores: Float[Array, "*rows V"], noise: Float[Array, "*rows Z"]
) -> Int[Array, "*rows"]:
    """Draws from exp(scores), normalised, as a function of explicit Gumbel noise.

    Up to 256 tokens this is argmax(scores + noise). A larger vocabulary is cut into
    columns of 256 tokens, v = lane * columns + column; first a column is drawn in
    proportion to its mass, then a token of it, both by Gumbel noise. That is exact:
    the largest perturbed score of a set of tokens is Gumbel noise around the log of
    their mass, and which of them it is does not depend on it (Maddison, Tarlow and
    Minka, arXiv:1411.0030, section 2). One number a token would be 49152 a position,
    more work than all else a rule does; this takes 448.

    Args:
      scores: log-probabilities up to a constant a row (natural log), -inf for none.
      noise: from ``gumbel_noise``. Equal noise draws equal tokens from equal scores,
        and mostly equal ones from similar scores.

    Returns:
      int32 ids; 0 for a row that holds NaN.
    """
    if _n_columns(scores.shape[-1]) == 1:
        return argmax(scores + noise)
    table, columns = _columns(scores), _perturbed_columns(scores, noise)
    column = argmax(columns)
    lanes = jnp.take_along_axis(table, column[..., None, None], axis=-1)[..., 0]
    lane = argmax(lanes + noise[..., columns.shape[-1] :])
    return lane * columns.shape[-1] + column


def gumbel_margin(
    scores: Float[Array, " V"], noise: Float[Array, " Z"], a: int, b: int
) -> Float[Array, ""]:
    """Returns by how much token a beats token b in ``gumbel_argmax``.

    Args:
      scores: of one row.
      noise: of one row.
      a: a token.
      b: another.

    Returns:
      The difference of what is compared: their perturbed scores where they share a
      column, otherwise those of their columns.
    """
    n_columns = _n_columns(scores.shape[-1])
    if n_columns == 1:
        return (scores[a] + noise[a]) - (scores[b] + noise[b])
    if a % n_columns != b % n_columns:
        columns = _perturbed_columns(scores, noise)
        return columns[a % n_columns] - columns[b % n_columns]
    lanes = noise[n_columns:]
    first, second = a // n_columns, b // n_columns
    return (scores[a] + lanes[first]) - (scores[b] + lanes[second])


def _perturbed_columns(scores: Array, noise: Array) -> Array:
    """Returns each column's log-mass with its noise; NaN where the row holds NaN."""
    table = _columns(scores)
    mass = lanes_log_normalizer(table)
    # A column that holds NaN would only lose the comparison.
    spoilt = jnp.any(jnp.isnan(mass), axis=-1, keepdims=True)
    return jnp.where(spoilt, jnp.nan, mass + noise[..., : table.shape[-1]])


def _n_columns(vocab_size: int) -> int:
    return -(-vocab_size // _LANES)


def _columns(scores: Float[Array, "*rows V"]) -> Float[Array, "*rows R C"]:
    """Views a row as lanes x columns, padded with impossible tokens."""
    n_columns = _n_columns(scores.shape[-1])
    pad = [(0, 0)] * (scores.ndim - 1) + [(0, _LANES * n_columns - scores.shape[-1])]
    padded = jnp.pad(scores, pad, constant_values=-jnp.inf)
    return padded.reshape(*scores.shape[:-1], _LANES, n_columns)


def uniform_noise(
    seed: UInt[Array, " B"], length: Int[Array, " B"], n_drafts: int
) -> UniformNoise:
    """Returns a pass's uniform numbers, keyed by (seed, length at its start).

    Passes start at strictly growing lengths, so no number is used twice, also not
    for a position that an earlier pass drafted and threw away.

    Args:
      seed: request seeds.
      length: committed tokens of each row when the pass starts.
      n_drafts: draft positions N.

    Returns:
      float32 numbers in [0, 1).
    """

    def one(seed: Array, length: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), _STREAM_UNIFORM)
        key = jax.random.fold_in(key, length)
        return jax.random.uniform(key, (n_drafts + 1,), jnp.float32)

    u = jax.vmap(one)(seed, length)
    return UniformNoise(accept=u[:, 1:], draw=u[:, 0])


def draw(weights: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """Draws from unnormalised weights by inverting their cumulative sum.

    Args:
      weights: non-negative, float32, with a positive sum.
      uniform: in [0, 1).

    Returns:
      The first index whose cumulative weight exceeds uniform times the total; its
      own weight is positive.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    # A rounded-up product could reach the total itself; then no index exceeds it.
    total = cumulative[:, -1]
    goal = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
    # A parallel sum need not grow monotonically in its last bits, so the index's
    # own weight is asked for as well.
    hit = (cumulative > goal[:, None]) & (weights > 0)
    size = weights.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)
    first = jnp.min(jnp.where(hit, index, size), axis=-1)
    last = jnp.max(jnp.where(weights > 0, index, 0), axis=-1)
    return jnp.where(first == size, last, first)

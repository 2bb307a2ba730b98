"""Noise as a function of (seed, position), and draws from explicit noise."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.typing import Array, Float, Int, UInt

# Separate streams of a request's seed. A stream is never shared between two kinds
# of decision: the residual draw with the draft's noise is a known biased sampler.
_STREAM_GUMBEL = 0
_STREAM_UNIFORM = 1


class UniformNoise(NamedTuple):
    """Uniform numbers in [0, 1) for one pass.

    Attributes:
      accept: one for each draft position, [B, N].
      draw: for the correction or bonus token, [B].
    """

    accept: Float[Array, "B N"]
    draw: Float[Array, " B"]


def gumbel_noise(
    seed: UInt[Array, " B"], position: Int[Array, "B N"], vocab_size: int
) -> Float[Array, "B N V"]:
    """Returns standard Gumbel noise keyed by (seed, absolute position, token).

    The noise of an output position is the same whichever pass, batch row or block
    index reaches it.

    Args:
      seed: request seeds.
      position: absolute output positions.
      vocab_size: V.

    Returns:
      float32 noise.
    """

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), _STREAM_GUMBEL)
        key = jax.random.fold_in(key, position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(seed, position)


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

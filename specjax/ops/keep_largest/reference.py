"""The definition: bisection for the threshold, whole rows at once."""

import jax.numpy as jnp
from jax import lax

from specjax.typing import Array, Bool, Float, Int


def keep_largest_reference(
    scores: Float[Array, "*rows V"],
    weights: Float[Array, "*rows V"],
    goal: Float[Array, "*rows"],
) -> Bool[Array, "*rows V"]:
    """Searches by 32 halvings over the whole rows; see ``keep_largest``."""
    keys = ordered_keys(scores)
    rows = scores.shape[:-1]
    least = jnp.full(rows, jnp.iinfo(jnp.int32).min, jnp.int32)
    most = jnp.full(rows, jnp.iinfo(jnp.int32).max, jnp.int32)
    return mark(keys, weights, goal, bisect(keys, weights, goal, least, most))


def ordered_keys(scores: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Maps float32 to int32 so that the order is kept (-0 and +0 together)."""
    # Adding 0.0 would do, but the compiler simplifies it away.
    zeroed = jnp.where(scores == 0, 0.0, scores)
    bits = lax.bitcast_convert_type(zeroed, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def mass(weights: Float[Array, "*rows V"], where: Array) -> Float[Array, "*rows"]:
    """Sums the weights of some elements of each row."""
    return jnp.sum(jnp.where(where, weights, 0.0), axis=-1)


def bisect(
    keys: Int[Array, "*rows V"],
    weights: Float[Array, "*rows V"],
    goal: Float[Array, "*rows"],
    low: Int[Array, "*rows"],
    high: Int[Array, "*rows"],
) -> Int[Array, "*rows"]:
    """Finds the largest threshold in [low, high) whose set reaches the goal.

    Args:
      keys: from ``ordered_keys``.
      weights: non-negative.
      goal: of the weights of the keys at the threshold and above.
      low: thresholds taken to reach the goal.
      high: thresholds taken to fall short of it.

    Returns:
      The thresholds, ``low`` where none above it reaches the goal.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # Midpoint without overflow.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reaches = mass(weights, keys >= middle[..., None]) >= goal
        # A row that has ended, at a low that does not reach, must not go below it.
        fall = jnp.maximum(middle, low + 1)
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, fall)

    apart = lambda bounds: jnp.any(bounds[0] < bounds[1] - 1)
    return lax.while_loop(apart, halve, (low, high))[0]


def mark(
    keys: Int[Array, "*rows V"],
    weights: Float[Array, "*rows V"],
    goal: Float[Array, "*rows"],
    threshold: Int[Array, "*rows"],
) -> Bool[Array, "*rows V"]:
    """Marks what lies above a threshold, and of what lies at it the lowest indices.

    Args:
      keys: from ``ordered_keys``.
      weights: non-negative, equal for equal keys.
      goal: what the marked weights are to reach.
      threshold: from ``bisect``.

    Returns:
      The marks.
    """
    above = keys > threshold[..., None]
    ties = keys == threshold[..., None]
    missing = goal - mass(weights, above)
    tie_weight = jnp.max(jnp.where(ties, weights, 0.0), axis=-1)
    n_ties = jnp.sum(ties, axis=-1)
    wanted = jnp.ceil(missing / jnp.where(tie_weight > 0, tie_weight, 1.0))
    wanted = jnp.clip(wanted.astype(jnp.int32), 1, n_ties)
    ties = lax.cond(
        jnp.any(wanted < n_ties),
        lambda t: t & (jnp.cumsum(t, axis=-1) <= wanted[..., None]),
        lambda t: t,
        ties,
    )
    return above | ties

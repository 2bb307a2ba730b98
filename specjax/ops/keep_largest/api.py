"""Chooses how the set is searched for."""

from specjax.ops.keep_largest.reference import keep_largest_reference
from specjax.ops.keep_largest.xla_cpu import LEAST_SIZE, keep_largest_in_chunks
from specjax.ops.platform import current_platform
from specjax.typing import Array, Bool, Float


def keep_largest(
    scores: Float[Array, "*rows V"],
    weights: Float[Array, "*rows V"],
    goal: Float[Array, "*rows"],
) -> Bool[Array, "*rows V"]:
    """Marks the smallest set of largest scores whose weights sum to the goal.

    Among equal scores the lowest indices are taken, as many as are needed. With
    weights of 1 that is top-k, with probabilities top-p.

    Args:
      scores: float32; NaN gives a row of junk, never an endless search.
      weights: float32, non-negative, equal for equal scores.
      goal: above 0. One that even all weights do not reach marks all of the row.

    Returns:
      True where the element is in the set.

    Raises:
      ValueError: shapes do not agree.
    """
    if scores.shape != weights.shape or goal.shape != scores.shape[:-1]:
        raise ValueError(
            f"{scores.shape=}, {weights.shape=} and {goal.shape=} do not agree."
        )
    if current_platform() == "cpu" and scores.shape[-1] >= LEAST_SIZE:
        return keep_largest_in_chunks(scores, weights, goal)
    return keep_largest_reference(scores, weights, goal)

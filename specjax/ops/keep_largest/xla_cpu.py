"""The search as XLA:CPU does it fast: few rows at a time, few candidates of each.

Bisection reads a row about 30 times. For 72 rows of 49152 (a batch of 8, 9 rows a
pass) that is 55 ms on two cores, half a pass of a 135M model. A few rows at a time
stay in the cache of a core (25 ms), and mostly all that matters of them lies in the
few blocks with the largest maxima (12 ms): a set that ends above the largest maximum
left out is found among the candidates alone. Rows so flat that it does not end there
are searched whole.
"""

import jax.numpy as jnp
from jax import lax

from specjax.ops.keep_largest.reference import bisect, mark, mass, ordered_keys
from specjax.typing import Array, Bool, Float, Int

# Rows searched together, always so many: sums round alike however many there are.
_ROWS = 4

# Neighbours that are candidates together, and how many such blocks are. A set of up to
# _N_BLOCKS elements is always found among them, ties at its end aside.
_BLOCK = 64
_N_BLOCKS = 128

#: Shorter rows than this are not worth the choosing.
LEAST_SIZE = 2 * _BLOCK * _N_BLOCKS


def keep_largest_in_chunks(
    scores: Float[Array, "*rows V"],
    weights: Float[Array, "*rows V"],
    goal: Float[Array, "*rows"],
) -> Bool[Array, "*rows V"]:
    """Searches candidates of a few rows at a time; see ``keep_largest``."""
    lead, size = scores.shape[:-1], scores.shape[-1]
    n_rows = goal.size
    missing_rows = max(_ROWS - n_rows, 0)
    pad = lambda x: jnp.pad(x, [(0, missing_rows)] + [(0, 0)] * (x.ndim - 1))
    keys = pad(ordered_keys(scores).reshape(n_rows, size))
    weights = pad(weights.reshape(n_rows, size))
    goal = pad(goal.reshape(n_rows).astype(jnp.float32))
    last = max(n_rows - _ROWS, 0)

    def search(i: Array, marks: Array) -> Array:
        # The last chunk overlaps the one before it rather than be smaller.
        start = jnp.minimum(i * _ROWS, last)
        rows = lambda x: lax.dynamic_slice_in_dim(x, start, _ROWS)
        k, w, g = rows(keys), rows(weights), rows(goal)
        found = mark(k, w, g, _threshold(k, w, g))
        return lax.dynamic_update_slice_in_dim(marks, found, start, 0)

    n_chunks = -(-n_rows // _ROWS)
    marks = lax.fori_loop(0, n_chunks, search, jnp.zeros(keys.shape, bool))
    return marks[:n_rows].reshape(*lead, size)


def _threshold(
    keys: Int[Array, "R V"], weights: Float[Array, "R V"], goal: Float[Array, " R"]
) -> Int[Array, " R"]:
    """Finds the threshold of each row, among candidates where they hold it."""
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    short = -keys.shape[-1] % _BLOCK
    blocks = lambda x, fill: jnp.pad(
        x, ((0, 0), (0, short)), constant_values=fill
    ).reshape(x.shape[0], -1, _BLOCK)
    key_blocks, weight_blocks = blocks(keys, least), blocks(weights, 0.0)
    peaks, index = lax.top_k(jnp.max(key_blocks, axis=-1), _N_BLOCKS + 1)
    take = lambda x: jnp.take_along_axis(x, index[:, :_N_BLOCKS, None], axis=1).reshape(
        x.shape[0], -1
    )
    some_keys, some_weights = take(key_blocks), take(weight_blocks)
    # Whatever is larger than the largest maximum left out is a candidate.
    cut, high = peaks[:, _N_BLOCKS], jnp.minimum(peaks[:, 0], most - 1) + 1
    ends_above = mass(some_weights, some_keys > cut[:, None]) >= goal
    return lax.cond(
        jnp.all(ends_above),
        lambda: bisect(some_keys, some_weights, goal, cut, high),
        lambda: bisect(keys, weights, goal, jnp.full_like(high, least), high),
    )

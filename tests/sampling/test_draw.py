"""Noise keyed by (seed, position), and draws from explicit noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import draw, gumbel_noise, uniform_noise
from specjax.testing.oracle import g_test

BELOW_ONE = np.float32(1 - 2.0**-24)

_DRAW = jax.jit(draw)
_GUMBEL = jax.jit(gumbel_noise, static_argnums=2)
_UNIFORM = jax.jit(uniform_noise, static_argnums=2)


def _seeds(*values):
    return jnp.asarray(values, jnp.uint32)


def _ints(*values):
    return jnp.asarray(values, jnp.int32)


# Draws.


def test_draw_inverts_the_cumulative_sum():
    weights = jnp.asarray([[1.0, 0.0, 2.0, 1.0]])
    for u, expected in (
        (0.0, 0),
        (0.2, 0),
        (0.25, 2),
        (0.5, 2),
        (0.74, 2),
        (0.75, 3),
        (BELOW_ONE, 3),
    ):
        assert int(_DRAW(weights, jnp.float32([u]))[0]) == expected


@pytest.mark.parametrize("u", [0.0, 1e-45, 0.5, BELOW_ONE])
def test_draw_never_takes_a_zero_weight(u):
    rng = np.random.default_rng(0)
    weights = rng.random((400, 33)).astype(np.float32)
    weights *= rng.random(weights.shape) < 0.3
    weights[:, 0], weights[:, -1] = 0, 0
    weights[np.arange(400), rng.integers(1, 32, size=400)] += 0.1
    scale = 10.0 ** rng.integers(-30, 30, size=(400, 1))
    weights = (weights * scale).astype(np.float32)
    got = np.asarray(_DRAW(jnp.asarray(weights), jnp.full((400,), u, jnp.float32)))
    assert np.all(weights[np.arange(400), got] > 0)
    if u == 0:
        np.testing.assert_array_equal(got, np.argmax(weights > 0, axis=-1))
    if u == BELOW_ONE:
        exact = np.cumsum(weights.astype(np.float64), -1)
        # All but less than a few millionths of the mass lies before or at it.
        at = exact[np.arange(400), got] / exact[:, -1]
        assert np.all(at > 1 - 1e-5)


@pytest.mark.parametrize("index", [0, 7, 49151])
def test_draw_from_a_point_mass(index):
    weights = jnp.zeros((3, 49152)).at[:, index].set(jnp.float32([1e-30, 1.0, 1e30]))
    for u in (0.0, 0.3, BELOW_ONE):
        got = _DRAW(weights, jnp.full((3,), u, jnp.float32))
        np.testing.assert_array_equal(got, index)


def test_draw_from_a_wide_law_at_the_ends():
    rng = np.random.default_rng(1)
    weights = rng.exponential(size=(64, 5000)).astype(np.float32) ** 8
    weights[:, -40:] = 0
    u = jnp.full((64,), BELOW_ONE)
    got = np.asarray(_DRAW(jnp.asarray(weights), u))
    assert np.all(weights[np.arange(64), got] > 0)


def test_draw_has_the_law_of_the_weights():
    weights = np.array([3.0, 0.0, 1.0, 0.5, 0.0, 2.5], np.float32)
    n = 200_000
    u = np.random.default_rng(2).random(n, np.float32)
    got = np.asarray(_DRAW(jnp.broadcast_to(weights, (n, 6)), jnp.asarray(u)))
    counts = np.bincount(got, minlength=6)
    assert g_test(counts, weights / weights.sum()) > 1e-4
    off = weights + np.float32([0.1, 0, 0, 0, 0, 0])
    assert g_test(counts, off / off.sum()) < 1e-4


def test_draw_rows_are_independent():
    rng = np.random.default_rng(3)
    weights = jnp.asarray(rng.random((9, 50)), jnp.float32)
    u = jnp.asarray(rng.random(9), jnp.float32)
    whole = _DRAW(weights, u)
    for r in range(9):
        assert _DRAW(weights[r : r + 1], u[r : r + 1])[0] == whole[r]
    spoilt = _DRAW(weights.at[4].set(jnp.nan), u)
    others = np.arange(9) != 4
    np.testing.assert_array_equal(spoilt[others], whole[others])


# Noise.


def test_gumbel_noise_is_keyed_by_seed_and_position():
    seeds = _seeds(3, 2**32 - 1)
    noise = np.asarray(_GUMBEL(seeds, _ints([5, 6, 7], [6, 5, 900]), 16))
    assert noise.shape == (2, 3, 16) and noise.dtype == np.float32
    one = lambda seed, at: np.asarray(_GUMBEL(_seeds(seed), _ints([at]), 16))[0, 0]
    for r, (seed, at) in enumerate(((3, (5, 6, 7)), (2**32 - 1, (6, 5, 900)))):
        for i, position in enumerate(at):
            # Whatever the batch, its row and its place in the block.
            np.testing.assert_array_equal(noise[r, i], one(seed, position))
    flat = noise.reshape(6, 16)
    for i in range(6):
        for j in range(i):
            assert not np.any(flat[i] == flat[j])


def test_gumbel_noise_is_stable_in_the_vocabulary():
    short = _GUMBEL(_seeds(1), _ints([4]), 100)
    long = _GUMBEL(_seeds(1), _ints([4]), 128)
    np.testing.assert_array_equal(short[0, 0], long[0, 0, :100])


def test_uniform_noise_is_keyed_by_seed_and_length():
    noise = _UNIFORM(_seeds(3, 3, 8), _ints(5, 6, 5), 4)
    assert noise.accept.shape == (3, 4) and noise.draw.shape == (3,)
    for r, (seed, length) in enumerate(((3, 5), (3, 6), (8, 5))):
        alone = _UNIFORM(_seeds(seed), _ints(length), 4)
        np.testing.assert_array_equal(alone.accept[0], noise.accept[r])
        np.testing.assert_array_equal(alone.draw[0], noise.draw[r])
    assert not np.any(noise.accept[0] == noise.accept[1])
    assert not np.any(noise.accept[0] == noise.accept[2])


@pytest.mark.parametrize("n_drafts", [0, 1, 7])
def test_uniform_noise_does_not_depend_on_the_width(n_drafts):
    wide = _UNIFORM(_seeds(9), _ints(33), 12)
    narrow = _UNIFORM(_seeds(9), _ints(33), n_drafts)
    np.testing.assert_array_equal(narrow.draw, wide.draw)
    np.testing.assert_array_equal(narrow.accept[0], wide.accept[0, :n_drafts])


def test_no_number_is_used_twice():
    # Every pass of a row that commits one token a time, the worst case.
    lengths = jnp.arange(1, 400, dtype=jnp.int32)
    noise = _UNIFORM(jnp.full(lengths.shape, 5, jnp.uint32), lengths, 5)
    numbers = np.concatenate([noise.accept, noise.draw[:, None]], axis=1)
    assert np.all((numbers >= 0) & (numbers < 1))
    # 2394 numbers of 23 bits: about a third of a chance pair is expected.
    assert len(np.unique(numbers)) >= numbers.size - 4
    # No pass shifts or repeats another's.
    for shift in range(-5, 6):
        a = numbers[:, max(shift, 0) : 6 + min(shift, 0)]
        b = numbers[:, max(-shift, 0) : 6 + min(-shift, 0)]
        assert not np.any(np.all(a[1:] == b[:-1], axis=1))
    correlation = np.corrcoef(numbers.T)
    assert np.all(np.abs(correlation - np.eye(6)) < 4.5 / np.sqrt(len(numbers)))


def test_streams_differ():
    gumbel = np.asarray(_GUMBEL(_seeds(5), _ints([7]), 6))[0, 0]
    uniform = _UNIFORM(_seeds(5), _ints(7), 5)
    uniform = np.concatenate([uniform.draw, uniform.accept[0]])
    for other in (np.exp(-np.exp(-gumbel)), 1 - np.exp(-np.exp(-gumbel))):
        assert np.abs(other[:, None] - uniform[None, :]).min() > 1e-6


@pytest.mark.parametrize("u", ["accept", "draw"])
def test_uniform_noise_is_uniform(u):
    n = 100_000
    noise = _UNIFORM(jnp.arange(n, dtype=jnp.uint32), jnp.full((n,), 11, jnp.int32), 2)
    numbers = np.ravel(getattr(noise, u))
    counts = np.bincount((numbers * 50).astype(int), minlength=50)
    assert g_test(counts, np.full(50, 1 / 50)) > 1e-4


def test_gumbel_noise_is_gumbel():
    n = 50_000
    position = jnp.arange(n, dtype=jnp.int32)[None]
    noise = np.asarray(_GUMBEL(_seeds(2), position, 2))[0]
    cells = (np.exp(-np.exp(-noise.astype(np.float64))) * 20).astype(int)
    for v in range(2):
        counts = np.bincount(cells[:, v], minlength=20)
        assert g_test(counts, np.full(20, 1 / 20)) > 1e-4
    pairs = np.bincount(cells[:, 0] // 4 * 5 + cells[:, 1] // 4, minlength=25)
    assert g_test(pairs, np.full(25, 1 / 25)) > 1e-4

"""The smallest set of largest scores: both searches against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops.keep_largest import keep_largest, keep_largest_reference, xla_cpu
from specjax.ops.platform import target_platform

SEARCHES = {
    "reference": keep_largest_reference,
    "chunks": xla_cpu.keep_largest_in_chunks,
}


def by_sorting(scores, weights, goal):
    """The definition on one row, in float64: descending scores, ties by index."""
    order = np.argsort(-scores, kind="stable")
    reached = np.cumsum(weights[order].astype(np.float64)) >= goal
    n = int(np.argmax(reached)) + 1 if reached.any() else len(scores)
    kept = np.zeros(len(scores), bool)
    kept[order[:n]] = True
    return kept


def weights_of(scores):
    """Weights that grow with the score and whose sums float32 holds exactly."""
    return np.clip(np.floor(scores) + 60, 0, 120).astype(np.float32)


def rows_of(kind, n_rows, size, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n_rows, size)) * 5
    if kind == "peaked":
        at = rng.integers(0, size, (n_rows, 40))
        np.put_along_axis(scores, at, rng.uniform(30, 60, at.shape), 1)
    elif kind == "tied":
        scores = np.round(scores / 4)
    elif kind == "few":
        scores = np.where(rng.random(scores.shape) < 3 / size, scores, -np.inf)
        scores[:, -1] = 0.0
    elif kind == "one block":
        scores[:, 64:128] = 50 + rng.random((n_rows, 64))
    return scores.astype(np.float32)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("kind", ["peaked", "flat", "tied", "few", "one block"])
@pytest.mark.parametrize(("n_rows", "size"), [(1, 16384), (5, 20001), (9, 49152)])
def test_top_k_and_weights_equal_the_sort(name, kind, n_rows, size):
    search = jax.jit(SEARCHES[name])
    scores = rows_of(kind, n_rows, size)
    finite = np.isfinite(scores)
    for k in (1, 50, 129, 3000):
        goal = np.minimum(k, finite.sum(1)).astype(np.float32)
        weights = finite.astype(np.float32)
        got = np.asarray(search(scores, weights, goal))
        for row in range(n_rows):
            want = by_sorting(scores[row], weights[row], goal[row])
            np.testing.assert_array_equal(got[row], want)
    weights = np.where(finite, weights_of(np.where(finite, scores, 0)), 0)
    weights = weights.astype(np.float32)
    for share in (0.001, 0.02, 0.5, 0.999):
        goal = np.maximum(np.floor(share * weights.sum(1)), 1).astype(np.float32)
        got = np.asarray(search(scores, weights, goal))
        for row in range(n_rows):
            want = by_sorting(scores[row], weights[row], goal[row])
            np.testing.assert_array_equal(got[row], want)


def test_a_row_needs_no_neighbours():
    """Chunks have one shape, so that sums round alike however many rows there are."""
    scores = np.concatenate([rows_of(k, 3, 32768) for k in ("peaked", "flat", "few")])
    weights = np.exp(scores - scores.max(1, keepdims=True)).astype(np.float32)
    goal = (0.9 * weights.sum(1)).astype(np.float32)
    search = jax.jit(xla_cpu.keep_largest_in_chunks)
    whole = np.asarray(search(scores, weights, goal))
    for row in range(9):
        alone = search(scores[row : row + 1], weights[row : row + 1], goal[row:][:1])
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[row])


def test_flat_rows_need_the_whole_search(monkeypatch):
    """A control: without the search of whole rows the sort would not be met."""
    scores = rows_of("flat", 4, 32768)
    weights = np.ones_like(scores)
    goal = np.full((4,), 20000, np.float32)
    monkeypatch.setattr(xla_cpu.lax, "cond", lambda p, yes, no, *args: yes(*args))
    got = np.asarray(xla_cpu.keep_largest_in_chunks(scores, weights, goal))
    want = [by_sorting(*row) for row in zip(scores, weights, goal, strict=True)]
    assert (got != np.stack(want)).any()


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.timeout(60)
def test_nan_and_infinity_end_the_search(name):
    scores = rows_of("peaked", 6, 16384)
    scores[1, 5] = np.nan
    scores[2] = np.nan
    scores[3, 7] = np.inf
    scores[4] = -np.inf
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(1, keepdims=True)).astype(np.float32)
    goal = (0.9 * weights.sum(1)).astype(np.float32)
    got = np.asarray(jax.jit(SEARCHES[name])(scores, weights, goal))
    for row in (0, 5):
        few = weights[row].astype(np.float64)
        np.testing.assert_array_equal(got[row], by_sorting(scores[row], few, goal[row]))


def test_an_unreachable_goal_marks_all():
    scores = rows_of("peaked", 2, 16384)
    weights = np.ones_like(scores)
    goal = np.full((2,), 1e9, np.float32)
    for search in SEARCHES.values():
        assert np.asarray(search(scores, weights, goal)).all()


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_each_platform_has_one_search(platform):
    args = (jnp.zeros((2, 20000)), jnp.ones((2, 20000)), jnp.ones((2,)))
    with target_platform(platform):
        # A new function: jaxprs are kept by function, not by platform.
        text = str(jax.make_jaxpr(lambda *a: keep_largest(*a))(*args))
    assert ("top_k" in text) == (platform == "cpu")


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="do not agree"):
        keep_largest(jnp.zeros((2, 8)), jnp.zeros((2, 8)), jnp.ones((3,)))

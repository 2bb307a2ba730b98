"""The warp against a float64 reference that sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.sampling import Settings, warp

_WARP = jax.jit(warp)


def _settings(*rows):
    """Settings from one dictionary a row."""
    default = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    columns = [[{**default, **row}[name] for row in rows] for name in Settings._fields]
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32)
    return Settings(*(jnp.asarray(c, d) for c, d in zip(columns, dtypes, strict=True)))


def _law(scores):
    """Probabilities of warped scores, float64."""
    scores = np.asarray(scores, np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One row in float64 by sorting: temperature, top-k, top-p, min-p.

    Returns the kept tokens, and the smallest distance of a decision from going the
    other way (of masses for top-p, of log-probabilities otherwise).
    """
    logits = np.asarray(logits, np.float64)
    temperature, top_p, min_p = (
        float(np.float32(x)) for x in (temperature, top_p, min_p)
    )
    if temperature == 0:
        return {int(np.argmax(logits))}, np.inf
    scores = logits / temperature
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[: top_k or None]
    margin = np.inf
    p = np.exp(scores[order] - scores[order[0]])
    p = p / p.sum()
    if top_p < 1:
        before = np.cumsum(p) - p
        margin = min(margin, np.abs(before[1:] - top_p).min(initial=np.inf))
        order = order[before < top_p]
    if min_p > 0:
        gap = scores[order] - scores[order[0]] - np.log(min_p)
        margin = min(margin, np.abs(gap).min())
        order = order[gap >= 0]
    return {int(i) for i in order}, margin


def _check(logits, **row):
    """Compares one row with the reference; returns what was kept."""
    logits = np.asarray(logits, np.float32)
    got = np.asarray(_WARP(jnp.asarray(logits)[None, None], _settings(row)))[0, 0]
    kept = {int(i) for i in np.flatnonzero(got > -np.inf)}
    expected, margin = _reference(logits, **row)
    possible = {int(i) for i in np.flatnonzero(logits > -np.inf)}
    expected &= possible
    if margin < 1e-6:
        # A borderline sum may go either way, for one token.
        assert len(kept ^ expected) <= 1, (kept, expected)
    else:
        assert kept == expected, (sorted(kept), sorted(expected), row)
    if row.get("temperature", 1.0) == 0:
        assert got[list(kept)] == 0
    else:
        scaled = logits.astype(np.float64) / np.float32(row.get("temperature", 1.0))
        at = sorted(kept)
        shift = got[at] - scaled[at]
        np.testing.assert_allclose(shift, shift[0], atol=1e-5 + 1e-6 * abs(shift[0]))
        np.testing.assert_allclose(got[at], scaled[at], rtol=1e-6)
    return kept


# Fixed cases.

CASE = np.log([0.35, 0.25, 0.20, 0.05, 0.03, 0.04, 0.04, 0.04])


def test_top_p_looks_at_what_top_k_kept():
    # Of p = (.35, .25, .20, .05) renormalised the first two have .71, three .94; of
    # the whole law the first three have .80 only, and a fourth would be kept.
    assert _check(CASE, top_k=4, top_p=0.82) == {0, 1, 2}
    assert _check(CASE, top_p=0.82) == {0, 1, 2, 3}
    assert _check(CASE, top_k=4) == {0, 1, 2, 3}


def test_temperature_comes_before_top_p():
    # At T = 2 the law is flatter and .82 takes more tokens, at T = .5 fewer.
    assert _check(CASE, temperature=2.0, top_p=0.82) == {0, 1, 2, 3, 5, 6}
    assert _check(CASE, temperature=0.5, top_p=0.82) == {0, 1, 2}
    assert _check(CASE, temperature=0.5, top_p=0.79) == {0, 1}


def test_min_p_is_a_share_of_the_largest():
    assert _check(CASE, min_p=0.5) == {0, 1, 2}
    assert _check(CASE, min_p=0.6) == {0, 1}
    assert _check(CASE, min_p=0.6, temperature=2.0) == {0, 1, 2}
    assert _check(CASE, min_p=0.999) == {0}
    assert _check(CASE, min_p=0.1, top_k=3) == {0, 1, 2}
    assert _check(CASE, min_p=0.1, top_p=0.5) == {0, 1}


def test_nothing_set_changes_nothing():
    logits = np.random.default_rng(0).normal(size=(2, 3, 17)).astype(np.float32)
    got = np.asarray(_WARP(jnp.asarray(logits), _settings({}, {})))
    np.testing.assert_array_equal(got, logits)


@pytest.mark.parametrize("top_k", [1, 3, 8, 9, 1000])
def test_equal_logits_keep_the_lowest_ids(top_k):
    kept = _check(np.zeros(8), top_k=top_k)
    assert kept == set(range(min(top_k, 8)))


@pytest.mark.parametrize(("top_p", "n"), [(0.05, 1), (0.26, 3), (0.49, 4), (0.95, 8)])
def test_equal_logits_under_top_p_keep_the_lowest_ids(top_p, n):
    assert _check(np.full(8, 3.0), top_p=top_p) == set(range(n))


def test_ties_at_the_edge_are_broken_by_id():
    logits = np.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0])
    assert _check(logits, top_k=3) == {1, 2, 3}
    assert _check(logits, top_k=4) == {1, 2, 3, 4}
    weights = np.exp(logits) / np.exp(logits).sum()
    # Between one and two of the three tokens of the middle level.
    top_p = 2 * weights[1] + 1.5 * weights[2]
    assert _check(logits, top_p=top_p) == {1, 2, 3, 4}


def test_signed_zeros_are_equal():
    assert _check(np.array([-0.0, 0.0, -0.0, 0.0, -1.0]), top_k=3) == {0, 1, 2}


def test_banned_tokens_stay_banned():
    logits = np.array([1.0, -np.inf, 0.5, -np.inf, 0.0])
    for row in (
        {},
        {"top_k": 4},
        {"top_p": 0.9999},
        {"min_p": 1e-6},
        {"temperature": 0.3, "top_k": 5, "top_p": 0.99, "min_p": 0.001},
    ):
        assert _check(logits, **row) <= {0, 2, 4}
    assert _check(logits, top_k=4) == {0, 2, 4}
    assert _check([-np.inf, -np.inf, 3.0], top_p=0.5, top_k=2) == {2}


def test_temperature_zero_is_one_hot_at_the_lowest_argmax():
    logits = np.array([1.0, 5.0, 2.0, 5.0])
    for row in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}):
        got = _WARP(
            jnp.asarray(logits, jnp.float32)[None, None],
            _settings({"temperature": 0.0, **row}),
        )
        np.testing.assert_array_equal(got[0, 0], [-np.inf, 0, -np.inf, -np.inf])


def test_large_logits_survive():
    for top in (80.0, 300.0, 1e30):
        logits = np.array([top, top - 1, 0.0, -top])
        _check(logits, top_k=2)
        _check(logits, top_p=0.99)
        _check(logits, min_p=0.2)


MIXED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]


def test_mixed_rows_equal_each_row_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(len(MIXED), 3, 40), scale=2).astype(np.float32)
    logits[3, 1, 5:20] = -np.inf
    logits[2] = np.round(logits[2])
    whole = np.asarray(_WARP(jnp.asarray(logits), _settings(*MIXED)))
    for r, row in enumerate(MIXED):
        alone = np.asarray(_WARP(jnp.asarray(logits[r : r + 1]), _settings(row)))
        assert alone[0].tobytes() == whole[r].tobytes(), row
        for n in range(3):
            _check(logits[r, n], **row)


def test_nan_row_disturbs_no_other():
    logits = np.random.default_rng(2).normal(size=(7, 1, 40)).astype(np.float32)
    before = np.asarray(_WARP(jnp.asarray(logits), _settings(*MIXED)))
    for junk in (np.nan, np.inf, -np.inf):
        logits[3] = junk
        after = np.asarray(_WARP(jnp.asarray(logits), _settings(*MIXED)))
        others = np.arange(7) != 3
        assert after[others].tobytes() == before[others].tobytes()


def test_changing_settings_compiles_nothing():
    fresh = jax.jit(lambda *args: warp(*args))
    logits = jnp.zeros((1, 1, 8))
    for row in MIXED:
        fresh(logits, _settings(row))
    assert fresh._cache_size() == 1


def test_jit_equals_eager():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(7, 2, 11)), jnp.float32)
    eager, compiled = warp(logits, _settings(*MIXED)), _WARP(logits, _settings(*MIXED))
    np.testing.assert_array_equal(np.isfinite(eager), np.isfinite(compiled))
    np.testing.assert_allclose(eager, compiled, rtol=1e-6)


def test_vocabulary_of_a_real_model():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(4, 1, 49152), scale=3).astype(np.float32)
    rows = [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 50, "top_p": 0.95},
        {"min_p": 0.02},
        {"temperature": 0.0},
    ]
    got = np.asarray(_WARP(jnp.asarray(logits), _settings(*rows)))
    for r, row in enumerate(rows):
        kept = {int(i) for i in np.flatnonzero(got[r, 0] > -np.inf)}
        expected, _ = _reference(logits[r, 0], **row)
        law = _law(logits[r, 0] / max(row.get("temperature", 1.0), 0.1))
        # The mass of what float32 sums decide otherwise: a token or two at the edge.
        assert law[sorted(kept ^ expected)].sum() < 1e-5
        assert len(kept ^ expected) <= 0.01 * len(expected)


# Anything else.


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    logits=st.lists(
        st.one_of(
            st.floats(-20, 20, width=16),
            st.sampled_from([0.0, 1.0, 2.0, -1.0]),
            st.just(-np.inf),
        ),
        min_size=9,
        max_size=9,
    ).filter(lambda x: max(x) > -np.inf),
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 1.5, 4.0]),
    top_k=st.integers(0, 11),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.999)),
)
def test_any_row_equals_the_reference(logits, temperature, top_k, top_p, min_p):
    kept = _check(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    assert kept and int(np.argmax(logits)) in kept


# The ends of the ranges that check_sampling lets through.


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-38, 1e-46])
def test_smallest_top_p_keeps_the_argmax(top_p):
    logits = jnp.asarray([[[1.0, 4.0, 3.0, 2.0]]])
    got = np.asarray(warp(logits, Settings.full(1, temperature=1.0, top_p=top_p)))
    np.testing.assert_array_equal(np.flatnonzero(got[0, 0] > -np.inf), [1])


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-2, 1e4])
def test_extreme_temperatures_give_a_law(temperature):
    logits = jnp.asarray([[[1.0, 40.0, 30.0, -1e30, -jnp.inf]]])
    got = np.asarray(warp(logits, Settings.full(1, temperature=temperature)))
    law = _law(got[0, 0])
    assert law[1] == law.max() and law[4] == 0
    if temperature < 1:
        np.testing.assert_array_equal(law, [0, 1, 0, 0, 0])
    else:
        np.testing.assert_allclose(law[:3], 1 / 3, atol=1e-2)

"""Tokens per pass: closed forms against enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.theory import (
    conditional_from_survival,
    expected_tokens_from_conditional,
    expected_tokens_per_pass,
    survival_from_conditional,
)

RATES = st.floats(0, 1)
GAMMAS = st.integers(0, 40)
LISTS = st.lists(RATES, min_size=1, max_size=12)


def _enumerated(conditional):
    """Tokens per pass by all 2^G outcomes of G independent tests."""
    total = 0.0
    for outcome in itertools.product([True, False], repeat=len(conditional)):
        chance = math.prod(
            a if ok else 1 - a for a, ok in zip(conditional, outcome, strict=True)
        )
        accepted = next((i for i, ok in enumerate(outcome) if not ok), len(outcome))
        total += chance * (accepted + 1)
    return total


@pytest.mark.parametrize(
    ("alpha", "tokens"), [(0.3, 1.43), (0.5, 1.94), (0.7, 2.77), (0.8, 3.36)]
)
def test_published_tokens_per_pass_at_gamma_4(alpha, tokens):
    assert expected_tokens_per_pass(alpha, 4) == pytest.approx(tokens, abs=0.0051)


def test_a_bigram_drafter_gains_a_quarter():
    assert expected_tokens_per_pass(0.2, 3) == pytest.approx(1.25, abs=0.005)


@given(RATES, st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_iid_tokens_equal_enumeration(alpha, gamma):
    expected = _enumerated([alpha] * gamma)
    assert expected_tokens_per_pass(alpha, gamma) == pytest.approx(expected, rel=1e-12)


@given(st.lists(RATES, max_size=8))
@settings(max_examples=50, deadline=None)
def test_tokens_by_position_equal_enumeration(conditional):
    assert expected_tokens_from_conditional(conditional) == pytest.approx(
        _enumerated(conditional), rel=1e-12
    )


def test_tokens_equal_simulation():
    rng = np.random.default_rng(0)
    conditional = np.array([0.9, 0.7, 0.8, 0.4])
    accepted = rng.random((200_000, 4)) < conditional
    tokens = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    error = tokens.std() / math.sqrt(len(tokens))
    assert abs(
        tokens.mean() - expected_tokens_from_conditional(conditional)
    ) < 4 * float(error)


@given(RATES, GAMMAS)
@settings(deadline=None)
def test_iid_is_the_case_of_equal_positions(alpha, gamma):
    assert expected_tokens_per_pass(alpha, gamma) == pytest.approx(
        expected_tokens_from_conditional([alpha] * gamma), rel=1e-12
    )


@given(RATES, RATES, GAMMAS)
@settings(deadline=None)
def test_tokens_grow_with_acceptance_and_gamma(one, other, gamma):
    low, high = sorted((one, other))
    tokens = expected_tokens_per_pass([low, high], gamma)
    assert tokens[1] >= tokens[0] * (1 - 1e-14)
    assert expected_tokens_per_pass(low, gamma + 1) >= tokens[0] * (1 - 1e-14)
    assert np.all(tokens >= 1 - 1e-14)
    assert np.all(tokens <= (gamma + 1) * (1 + 1e-14))


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_long_draft_gives_one_over_rejection(alpha):
    assert expected_tokens_per_pass(alpha, 10**6) == pytest.approx(1 / (1 - alpha))


def test_the_ends_of_the_range():
    assert expected_tokens_per_pass(0.0, 10**9) == 1
    assert expected_tokens_per_pass(1.0, 7) == 8
    assert expected_tokens_per_pass(0.3, 0) == 1
    almost = np.nextafter(1.0, 0.0)
    assert expected_tokens_per_pass(almost, 1000) == pytest.approx(1001, rel=1e-12)
    assert expected_tokens_from_conditional([]) == 1


def test_shapes_broadcast_and_scalars_stay_scalars():
    assert isinstance(expected_tokens_per_pass(0.5, 2), float)
    assert expected_tokens_per_pass([[0.5], [0.6]], [1, 2, 3]).shape == (2, 3)
    assert expected_tokens_from_conditional(np.full((2, 3), 0.5)).shape == (2,)


@given(LISTS)
@settings(deadline=None)
def test_conversions_undo_each_other(conditional):
    survival = survival_from_conditional(conditional)
    assert np.all(np.diff(survival) <= 0)
    reached = np.concatenate([[1.0], survival[:-1]]) > 1e-290
    back = conditional_from_survival(survival)
    np.testing.assert_allclose(
        back[reached], np.array(conditional)[reached], rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(
        survival_from_conditional(back), survival, rtol=1e-9, atol=1e-300
    )


def test_survival_of_nothing_is_nothing():
    np.testing.assert_array_equal(
        conditional_from_survival([0.5, 0.0, 0.0]), [0.5, 0.0, 0.0]
    )


@given(st.lists(st.floats(0.05, 0.999), min_size=2, max_size=12))
@settings(deadline=None)
def test_a_pooled_rate_gives_too_little_where_acceptance_decays(values):
    """Accepted over tested drafts, pooled over positions, is above the geometric mean.

    Extrapolating the first position's rate errs the other way.
    """
    conditional = sorted(values, reverse=True)
    survival = survival_from_conditional(conditional)
    pooled = survival.sum() / (1 + survival[:-1].sum())
    tokens = expected_tokens_from_conditional(conditional)
    gamma = len(conditional)
    assert expected_tokens_per_pass(pooled, gamma) <= tokens * (1 + 1e-12)
    assert expected_tokens_per_pass(conditional[0], gamma) >= tokens * (1 - 1e-12)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), float("inf"), "much", None])
def test_bad_rates_are_named(alpha):
    with pytest.raises(ValueError, match="acceptance_rate"):
        expected_tokens_per_pass(alpha, 4)


@pytest.mark.parametrize("gamma", [-1, 1.5, float("nan"), float("inf")])
def test_bad_gammas_are_named(gamma):
    with pytest.raises(ValueError, match="gamma"):
        expected_tokens_per_pass(0.5, gamma)


def test_the_message_points_at_the_element_and_the_remedy():
    with pytest.raises(ValueError, match=r"\[1\]=1.5 must be in \[0, 1\].*probability"):
        expected_tokens_per_pass([0.5, 1.5], 4)
    with pytest.raises(ValueError, match="cut the list before it"):
        expected_tokens_from_conditional([0.9, float("nan")])
    with pytest.raises(ValueError, match="position axis"):
        expected_tokens_from_conditional(0.5)
    with pytest.raises(ValueError, match="grows with the position"):
        conditional_from_survival([0.5, 0.6])

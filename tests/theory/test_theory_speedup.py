"""Speed-up, the best gamma and the limits, against published numbers."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import theory
from specjax.theory import (
    best_gamma,
    break_even_acceptance,
    expected_tokens_from_conditional,
    expected_tokens_per_pass,
    operations_factor,
    speedup,
    speedup_ceiling,
    speedup_curve,
    speedup_from_tokens,
    verify_cost_from_times,
)

RATES = st.floats(0, 1)
RATIOS = st.floats(0, 2)


@pytest.mark.parametrize(
    ("alpha", "gain"), [(0.3, 1.0), (0.5, 1.4), (0.7, 2.0), (0.8, 2.4)]
)
def test_published_speedup_at_gamma_4(alpha, gain):
    assert speedup(alpha, 4, 0.1) == pytest.approx(gain, abs=0.05)


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1_of_leviathan(alpha, gamma, operations, speed):
    assert operations_factor(alpha, gamma) == pytest.approx(operations, abs=0.0051)
    assert speedup(alpha, gamma, 0) == pytest.approx(speed, abs=0.0051)


# T5-XXL's tasks: (gamma, alpha) for T5-small, base and large, and the formula's value.
T5 = [
    [(7, 0.75, 3.16), (7, 0.80, 3.25), (7, 0.82, 2.50)],
    [(7, 0.62, 2.26), (5, 0.68, 2.35), (3, 0.71, 1.93)],
    [(5, 0.65, 2.40), (5, 0.73, 2.62), (3, 0.74, 2.02)],
    [(5, 0.53, 1.89), (3, 0.55, 1.80), (3, 0.56, 1.54)],
]


@pytest.mark.parametrize("task", T5)
def test_t5_predictions_of_leviathan(task):
    for (gamma, alpha, expected), c in zip(task, (0.02, 0.04, 0.11), strict=True):
        assert speedup(alpha, gamma, c) == pytest.approx(expected, abs=0.0051)


BEST = {
    0.01: [(5, 1.875), (7, 2.297), (9, 2.972), (14, 4.232), (24, 7.486)],
    0.02: [(4, 1.794), (6, 2.170), (8, 2.758), (11, 3.817), (19, 6.365)],
    0.05: [(3, 1.630), (4, 1.921), (6, 2.353), (8, 3.092), (13, 4.674)],
    0.10: [(2, 1.458), (3, 1.674), (4, 1.981), (6, 2.470), (10, 3.431)],
    0.20: [(1, 1.250), (2, 1.400), (3, 1.583), (4, 1.868), (7, 2.373)],
}


@pytest.mark.parametrize("c", list(BEST))
def test_table_of_best_gammas(c):
    for alpha, (gamma, gain) in zip((0.5, 0.6, 0.7, 0.8, 0.9), BEST[c], strict=True):
        best = best_gamma(alpha, c)
        assert best.gamma == gamma
        assert best.speedup == pytest.approx(gain, abs=0.00051)
        assert best.tokens_per_pass == expected_tokens_per_pass(alpha, gamma)


def test_where_speedups_top_out():
    best = best_gamma(0.95, 0.05)
    assert best.gamma == 21
    assert best.speedup == pytest.approx(6.6, abs=0.05)
    assert best_gamma(0.8, 0.05).speedup == pytest.approx(3.1, abs=0.05)


def test_the_optimum_is_flat():
    share = speedup_curve(0.8, 0.05) / best_gamma(0.8, 0.05).speedup
    assert [g for g in range(len(share)) if share[g] >= 0.97] == [6, 7, 8, 9, 10, 11]


def test_the_rule_of_thumb_drafts_too_much():
    """Gamma where alpha^gamma falls to c, against the true best."""
    alpha, c = 0.7, 0.1
    assert int(math.log(c) / math.log(alpha)) == 6
    assert best_gamma(alpha, c).gamma == 4


@given(st.floats(0.05, 0.95), st.floats(0.02, 1), st.floats(1, 2))
@settings(deadline=None)
def test_another_draft_pays_while_its_chance_exceeds_its_share(alpha, c, v):
    """alpha^(gamma + 1) > c S(gamma) is the rule that best_gamma states."""
    curve = speedup_curve(alpha, c, v, max_gamma=60)
    for gamma in range(1, 60):
        margin = alpha ** (gamma + 1) - c * curve[gamma]
        if abs(margin) > 1e-9:
            assert (curve[gamma + 1] > curve[gamma]) == (margin > 0)


@given(RATES, RATIOS, st.integers(0, 30))
@settings(deadline=None)
def test_gamma_0_is_plain_decoding_and_cost_only_slows(alpha, c, gamma):
    assert speedup(alpha, 0, c, 3.0) == 1
    gains = speedup(alpha, gamma, [c, c + 0.1])
    assert gains[1] <= gains[0]
    assert speedup(alpha, gamma, c, 1.5) <= gains[0]
    assert best_gamma(alpha, c, max_gamma=40).speedup >= 1


@given(RATES, RATIOS, st.integers(0, 60))
@settings(deadline=None)
def test_no_gamma_exceeds_the_ceiling(alpha, c, gamma):
    ceiling = speedup_ceiling(c, alpha)
    assert speedup(alpha, gamma, c) <= ceiling * (1 + 1e-12)
    assert ceiling <= speedup_ceiling(c) * (1 + 1e-12)


def test_the_ceiling_is_one_over_c():
    assert speedup_ceiling(0.05) == pytest.approx(20)
    assert speedup(1.0, 10**7, 0.05) == pytest.approx(20, rel=1e-5)
    assert speedup_ceiling(0.0) == math.inf
    assert speedup_ceiling(1.5) == 1
    assert speedup_ceiling(0.0, 0.8) == pytest.approx(5)


def test_an_oracle_gains_up_to_about_sixty_percent():
    gains = [
        speedup_ceiling(c, alpha) / best_gamma(alpha, c, max_gamma=2000).speedup
        for c in (0.002, 0.005, 0.01, 0.05, 0.1)
        for alpha in 1 - c * np.geomspace(0.3, 3, 7)
    ]
    assert 1.55 < max(gains) < 1.62
    assert min(gains) >= 1


@given(st.floats(0.01, 1), st.floats(0, 0.99))
@settings(deadline=None)
def test_if_alpha_exceeds_c_some_gamma_gains_at_least(alpha, share):
    c = alpha * share
    gain = best_gamma(alpha, c, max_gamma=8).speedup
    assert gain >= (1 + alpha) / (1 + c) * (1 - 1e-12)


@given(RATES, st.floats(0, 1))
@settings(deadline=None)
def test_below_the_cost_ratio_nothing_gains(alpha, excess):
    c = alpha + excess
    assert best_gamma(alpha, c, max_gamma=30).speedup <= 1 + 1e-12


@given(st.integers(1, 40), st.floats(0.001, 0.9), st.floats(1, 2))
@settings(deadline=None)
def test_break_even_is_where_the_speedup_is_one(gamma, c, v):
    alpha = break_even_acceptance(gamma, c, v)
    if alpha == math.inf:
        assert speedup(1.0, gamma, c, v) < 1
    else:
        assert speedup(alpha, gamma, c, v) == pytest.approx(1, abs=1e-9)


def test_break_even_at_gamma_1_is_the_cost_ratio_and_the_least():
    assert break_even_acceptance(1, 0.3) == pytest.approx(0.3)
    assert break_even_acceptance(1, 0.3, 1.2) == pytest.approx(0.5)
    rates = [break_even_acceptance(g, 0.3) for g in range(1, 10)]
    assert rates == sorted(rates)
    assert break_even_acceptance(2, 0.0) == 0
    assert break_even_acceptance(1, 0.5, 1.6) == math.inf


@given(RATES, st.integers(0, 30), RATIOS)
@settings(deadline=None)
def test_speculation_never_saves_operations(alpha, gamma, ratio):
    factor = operations_factor(alpha, gamma, ratio)
    assert factor >= 1 - 1e-12
    tokens = expected_tokens_per_pass(alpha, gamma)
    assert factor == pytest.approx((gamma * ratio + gamma + 1) / tokens)


def test_verify_cost_as_number_table_and_function():
    table = [1.0, 1.1, 1.3, 1.6]
    expected = speedup_curve(0.7, 0.1, table)
    assert expected.shape == (4,)
    by_function = speedup_curve(0.7, 0.1, lambda width: table[width - 1], max_gamma=3)
    np.testing.assert_array_equal(by_function, expected)
    by_number = [speedup(0.7, g, 0.1, table[g]) for g in range(4)]
    np.testing.assert_allclose(expected, by_number, rtol=1e-15)
    np.testing.assert_array_equal(speedup(0.7, [0, 1, 2, 3], 0.1, table), expected)
    assert best_gamma(0.7, 0.1, [1, 1, 9, 9]).gamma == 1


def test_verify_cost_from_measured_times():
    table = verify_cost_from_times([1, 2, 5], [0.02, 0.03, 0.06])
    np.testing.assert_allclose(table, [1, 1.5, 2, 2.5, 3])
    assert best_gamma(0.9, 0.0, table).gamma == 3


def test_by_position_agrees_with_tokens():
    conditional = [0.9, 0.8, 0.5, 0.2]
    curve = speedup_curve(conditional, 0.1, 1.1)
    assert curve.shape == (5,)
    for gamma in range(5):
        tokens = expected_tokens_from_conditional(conditional[:gamma])
        assert curve[gamma] == pytest.approx(
            speedup_from_tokens(tokens, gamma, 0.1, 1.1)
        )
    assert best_gamma(conditional, 0.1).gamma < best_gamma(0.9, 0.1).gamma
    assert best_gamma([0.6] * 30, 0.1) == best_gamma(0.6, 0.1, max_gamma=30)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((1.2, 4, 0.1), "acceptance_rate=1.2"),
        ((0.5, -1, 0.1), "gamma=-1"),
        ((0.5, 4, -0.1), "cost_ratio=-0.1.*free drafter"),
        ((0.5, 4, float("nan")), "cost_ratio=nan"),
        ((0.5, 4, 0.1, 0.0), "verify_cost=0.*papers"),
        ((0.5, 4, 0.1, -1.0), "verify_cost=-1"),
        ((0.5, 4, 0.1, lambda width: float("nan")), "verify_cost=nan"),
        ((0.5, 4, 0.1, [1.0, 1.1]), "table ends at gamma 1"),
        ((0.5, 1, 0.1, [2.0, 2.1]), "divide the times by the one-row time"),
    ],
)
def test_bad_arguments_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        speedup(*arguments)


def test_other_bad_arguments_are_named():
    with pytest.raises(ValueError, match="exceeds gamma"):
        speedup_from_tokens(6, 4, 0.1)
    with pytest.raises(ValueError, match="tokens_per_pass=0.5"):
        speedup_from_tokens(0.5, 4, 0.1)
    with pytest.raises(ValueError, match="as many acceptances by position"):
        speedup_curve([0.5, 0.4], 0.1, max_gamma=3)
    with pytest.raises(ValueError, match="cost_ratio"):
        speedup_curve(0.5, [0.1, 0.2])  # pyright: ignore
    with pytest.raises(ValueError, match="gamma=0"):
        break_even_acceptance(0, 0.1)
    with pytest.raises(ValueError, match="cost_ratio=-1"):
        speedup_ceiling(-1)
    with pytest.raises(ValueError, match="ops_ratio"):
        operations_factor(0.5, 4, -1)
    with pytest.raises(ValueError, match="must grow from 1"):
        verify_cost_from_times([2, 3], [1.0, 1.0])
    with pytest.raises(ValueError, match="one length"):
        verify_cost_from_times([1, 2], [1.0])
    with pytest.raises(ValueError, match=r"times_s\[1\]=0"):
        verify_cost_from_times([1, 2], [1.0, 0.0])


def test_the_example_of_the_package():
    assert doctest.testmod(theory).attempted == 3
    assert doctest.testmod(theory).failed == 0

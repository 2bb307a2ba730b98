"""Acceptance from logits, and tokens per pass of each rule, by enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import Settings, warp
from specjax.theory import acceptance_from_logits, expected_tokens_from_log_ratios


def _law(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _pair(seed, rows=5, vocab=17):
    rng = np.random.default_rng(seed)
    target = 2 * rng.normal(size=(rows, vocab))
    return target, target + rng.normal(size=(rows, vocab))


def test_rate_is_one_minus_total_variation():
    target, draft = _pair(0)
    found = acceptance_from_logits(target, draft)
    distance = 0.5 * np.abs(_law(target) - _law(draft)).sum(-1)
    np.testing.assert_allclose(found.acceptance_rate, 1 - distance, atol=1e-12)
    agree = target.argmax(-1) == draft.argmax(-1)
    np.testing.assert_array_equal(found.top1_agreement, agree)


def test_rate_is_how_often_the_rejection_rule_accepts():
    target, draft = _pair(1, rows=1)
    p, q = _law(target)[0], _law(draft)[0]
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(q), size=200_000, p=q)
    accepted = (rng.random(len(drawn)) * q[drawn] < p[drawn]).mean()
    rate = acceptance_from_logits(target[0], draft[0]).acceptance_rate
    assert isinstance(rate, float)
    assert abs(accepted - rate) < 4 * np.sqrt(rate * (1 - rate) / len(drawn))


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 9, "top_p": 0.85, "min_p": 0.05},
        {"temperature": 0.0},
    ],
)
def test_the_warp_is_the_librarys(setting):
    target, draft = _pair(2)
    rows = Settings.full(1, **{"temperature": 1.0, **setting})
    warped = [
        np.asarray(jax.jit(warp)(jnp.asarray(x, jnp.float32)[None], rows)[0])
        for x in (target, draft)
    ]
    p, q = (_law(np.asarray(x, np.float64)) for x in warped)
    found = acceptance_from_logits(target, draft, **setting)
    np.testing.assert_allclose(
        found.acceptance_rate, np.minimum(p, q).sum(-1), atol=1e-5
    )


def test_ties_go_to_the_lowest_id():
    found = acceptance_from_logits([0.0, 0.0, 0.0], [0.0, 0.0, -5.0], temperature=0)
    assert found == (1.0, 1.0)
    assert acceptance_from_logits([0.0, 0.0], [0.0, 1.0], top_k=1) == (0.0, 0.0)


def test_a_point_mass_is_accepted_with_p_of_its_token():
    target, draft = _pair(3)
    found = acceptance_from_logits(target, draft, point_mass=True)
    picked = np.take_along_axis(_law(target), draft.argmax(-1)[:, None], -1)[:, 0]
    np.testing.assert_allclose(found.acceptance_rate, picked, atol=1e-12)


def test_agreement_is_another_thing_than_the_rate():
    close = acceptance_from_logits([0.0, 0.01], [0.01, 0.0])
    assert close.acceptance_rate > 0.99
    assert close.top1_agreement == 0
    far = acceptance_from_logits([0.0, 9.0], [0.0, 0.1])
    assert far.acceptance_rate < 0.6
    assert far.top1_agreement == 1


def test_padding_does_not_count():
    target, draft = _pair(4)
    plain = acceptance_from_logits(target, draft)
    pad = np.full((5, 3), -np.inf)
    wide = acceptance_from_logits(
        np.concatenate([target, pad], -1), np.concatenate([draft, pad], -1)
    )
    np.testing.assert_allclose(wide.acceptance_rate, plain.acceptance_rate, rtol=1e-14)


def _drafts(p, q, gamma):
    """All drafts of a context-free pair: log ratios [N, G] and their probabilities."""
    p, q = np.array(p), np.array(q)
    tokens = np.array(list(itertools.product(range(len(q)), repeat=gamma)))
    return np.log(p / q)[tokens], q[tokens].prod(axis=1)


def _accepted(p, q, gamma):
    ratios, weights = _drafts(p, q, gamma)
    return tuple(
        expected_tokens_from_log_ratios(ratios, rule=rule, weights=weights) - 1
        for rule in ("rejection", "block", "bound")
    )


TOY = ((1 / 3, 2 / 3), (2 / 3, 1 / 3))
A = ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
B = ((0.6, 0.25, 0.1, 0.05), (0.3, 0.3, 0.3, 0.1))
C = ((0.7, 0.3), (0.5, 0.5))


@pytest.mark.parametrize(
    ("laws", "gamma", "accepted"),
    [
        (TOY, 1, (2 / 3, 2 / 3, 2 / 3)),
        (TOY, 2, (10 / 9, 11 / 9, 12 / 9)),
        (TOY, 3, (38 / 27, 5 / 3, 50 / 27)),
        (A, 2, (1.190, 1.250, 1.310)),
        (A, 3, (1.533, 1.695, 1.833)),
        (A, 4, (1.7731, 2.0635, 2.2939)),
        (B, 2, (1.190, 1.250, 1.310)),
        (B, 3, (1.533, 1.6995, 1.8465)),
        (B, 4, (1.7731, 2.077075, 2.3311)),
        (C, 2, (1.440, 1.500, 1.560)),
        (C, 3, (1.952, 2.128, 2.276)),
        (C, 4, (2.3616, 2.6950, 2.9368)),
    ],
)
def test_published_lengths_of_token_and_block_verification(laws, gamma, accepted):
    p, q = laws
    assert _accepted(p, q, gamma) == pytest.approx(accepted, abs=5.1e-5)


def _random_tree(rng, vocab, gamma):
    """Draws prefix-dependent laws; gives each draft's rows of P [G+1] and Q [G]."""
    laws = {}
    for depth in range(gamma + 1):
        for prefix in itertools.product(range(vocab), repeat=depth):
            laws[prefix] = rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.ones(vocab))
    return laws


def _block_accepted(draft, laws):
    """E[tau] of one draft by the published rule: tests h, the last success counts."""
    gamma = len(draft)
    w, tests = 1.0, []
    for i in range(1, gamma + 1):
        p, q = laws[draft[: i - 1]]
        w = min(1.0, w * p[draft[i - 1]] / q[draft[i - 1]])
        if i == gamma:
            tests.append(w)
            continue
        p, q = laws[draft[:i]]
        s = np.maximum(w * p - q, 0).sum()
        tests.append(s / (s + 1 - w) if s + 1 - w > 0 else 1.0)
    later = np.cumprod([1 - h for h in tests[::-1]])[::-1]
    after = [*later[1:], 1.0]
    return sum(
        i * h * miss for i, (h, miss) in enumerate(zip(tests, after, strict=True), 1)
    )


def _bound_accepted(laws, vocab, gamma):
    """Sum over lengths j and texts x of length j of min(P(x), Q(x))."""
    total = 0.0
    for length in range(1, gamma + 1):
        for text in itertools.product(range(vocab), repeat=length):
            steps = [(laws[text[:i]], text[i]) for i in range(length)]
            p = np.prod([law[0][token] for law, token in steps])
            q = np.prod([law[1][token] for law, token in steps])
            total += min(p, q)
    return total


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rules_on_conditional_laws_by_enumeration(gamma, seed):
    laws = _random_tree(np.random.default_rng(seed), 3, gamma)
    drafts = list(itertools.product(range(3), repeat=gamma))
    p, q = (
        np.array([[laws[x[:i]][side][x[i]] for i in range(gamma)] for x in drafts])
        for side in (0, 1)
    )
    chance = q.prod(axis=1)
    token, block, bound = (
        expected_tokens_from_log_ratios(np.log(p / q), rule=rule, weights=chance) - 1
        for rule in ("rejection", "block", "bound")
    )
    by_rule = [_block_accepted(x, laws) for x in drafts]
    assert block == pytest.approx(chance @ by_rule, abs=1e-12)
    assert bound == pytest.approx(_bound_accepted(laws, 3, gamma), abs=1e-12)
    assert 0 <= token <= block + 1e-12
    assert block <= bound + 1e-12
    if gamma == 1:
        assert token == pytest.approx(bound, abs=1e-12)


def test_point_masses_gain_nothing_from_block_verification():
    logs = np.log(np.random.default_rng(0).uniform(0.1, 1, (50, 4)))
    logs[0, 1] = -np.inf
    found = {
        rule: expected_tokens_from_log_ratios(logs, rule=rule)
        for rule in ("rejection", "block", "bound")
    }
    assert found["block"] == pytest.approx(found["rejection"], rel=1e-14)
    assert found["bound"] == pytest.approx(found["rejection"], rel=1e-14)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(draft_logits=[0.0, 1.0, 2.0]), "pad the smaller vocabulary"),
        (dict(draft_logits=[0.0, float("nan")]), "draft_logits hold nan"),
        (dict(target_logits=[float("inf"), 0.0]), "target_logits hold nan or \\+inf"),
        (dict(target_logits=[-float("inf")] * 2), "row of -inf"),
        (dict(temperature=-1), "temperature=-1"),
        (dict(top_k=1.5), "top_k=1.5"),
        (dict(top_p=0), "top_p=0"),
        (dict(min_p=2), "min_p=2"),
    ],
)
def test_bad_logits_and_settings_are_named(change, match):
    arguments = {"target_logits": [0.0, 1.0], "draft_logits": [1.0, 0.0], **change}
    with pytest.raises(ValueError, match=match):
        acceptance_from_logits(**arguments)


def test_bad_ratios_are_named():
    with pytest.raises(ValueError, match="q > 0"):
        expected_tokens_from_log_ratios([[float("inf")]])
    with pytest.raises(ValueError, match=r"\[N, G\]"):
        expected_tokens_from_log_ratios([0.0, 0.0])
    with pytest.raises(ValueError, match="'tree' is unknown"):
        expected_tokens_from_log_ratios([[0.0]], rule="tree")  # pyright: ignore
    with pytest.raises(ValueError, match="weights"):
        expected_tokens_from_log_ratios([[0.0]], weights=[0.0])

"""The exact law of every rule on table models, and broken rules that must be caught."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.drafters import Proposal
from specjax.sampling import UniformNoise, draw
from specjax.testing.oracle import (
    count,
    g_test,
    match_probability,
    rule_law,
    sample_rule,
    target_law,
    total_variation,
)
from specjax.testing.tables import (
    Drafts,
    constant_table,
    point_drafts,
    random_table,
    sampled_drafts,
)
from specjax.verify import Verdict, VerifyRule, accepted_prefix

A = ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
B = ((0.6, 0.25, 0.1, 0.05), (0.3, 0.3, 0.3, 0.1))
C = ((0.7, 0.3), (0.5, 0.5))

# Rules that compute in float32 whatever they are given are exact to its rounding.
_BOUND = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}

SHAPES = [(2, 1), (2, 3), (3, 2), (4, 3)]


def _bias(rule, table, gamma, **kwargs):
    law = rule_law(rule, table, gamma, **kwargs)
    return total_variation(law.tokens, target_law(table, gamma + 1)), law


def _assert_lossless(rule, table, gamma, **kwargs):
    bias, law = _bias(rule, table, gamma, **kwargs)
    assert law.n_impossible == 0
    assert bias < _BOUND[law.dtype], (rule.name, bias)
    assert abs(law.n_accepted.sum() - 1) < 1e-6
    return law


# The law of the library's rules.


@pytest.mark.parametrize("proposal", ["sampled", "point"])
@pytest.mark.parametrize(("vocab", "gamma"), SHAPES)
@pytest.mark.parametrize("rule", [verify.rejection, verify.coupled, verify.greedy])
def test_law_is_the_targets(rule, vocab, gamma, proposal):
    make = {"sampled": sampled_drafts, "point": point_drafts}[proposal]
    for seed in range(2):
        for zeros in (False, True):
            table = random_table(seed, vocab_size=vocab, depth=gamma + 1, zeros=zeros)
            table = table.greedy() if rule.greedy_only else table
            _assert_lossless(rule, table, gamma, drafts=make(table, gamma))


@pytest.mark.parametrize("rule", [verify.rejection, verify.coupled])
def test_law_in_float64(rule):
    table = random_table(3, vocab_size=3, depth=3, zeros=True)
    for drafts in (sampled_drafts(table, 2), point_drafts(table, 2)):
        _assert_lossless(rule, table, 2, drafts=drafts, dtype=np.float64)


@pytest.mark.parametrize("rule", [verify.rejection, verify.coupled])
def test_every_point_mass_is_lossless(rule):
    table = random_table(5, vocab_size=3, depth=3, zeros=True)
    for tokens in np.ndindex(3, 3):
        law = _assert_lossless(rule, table, 2, drafts=point_drafts(table, 2, tokens))
        first = table.target(())[tokens[0]]
        second = table.target(tokens[:1])[tokens[1]]
        # A point mass x is accepted with probability p(x).
        np.testing.assert_allclose(law.mean_accepted, first + first * second, atol=1e-6)


@pytest.mark.parametrize("rule", [verify.rejection, verify.coupled])
def test_rows_may_propose_fewer_tokens(rule):
    table = random_table(7, vocab_size=3, depth=3)
    drafts = sampled_drafts(table, 2)
    # Stop after a token 0, itself included: known when the next is not drawn yet.
    n_valid = np.where(drafts.tokens[:, 0] == 0, 1, 2).astype(np.int32)
    for n in (n_valid, np.zeros_like(n_valid), np.ones_like(n_valid)):
        _assert_lossless(rule, table, 2, drafts=drafts._replace(n_valid=n))


@pytest.mark.parametrize("rule", [verify.rejection, verify.coupled])
def test_no_drafts_is_plain_decoding(rule):
    table = random_table(8, vocab_size=4, depth=1)
    drafts = Drafts(
        np.ones(1), np.zeros((1, 0), np.int32), np.zeros((1, 0, 4)), np.zeros(1, int)
    )
    law = _assert_lossless(rule, table, 0, drafts=drafts)
    assert law.mean_accepted == 0


@pytest.mark.parametrize("rule", [verify.rejection, verify.coupled])
def test_draft_equal_to_target(rule):
    table = random_table(9, vocab_size=3, depth=3)
    table = type(table)(table.target_rows, table.target_rows)
    law = _assert_lossless(rule, table, 2)
    if rule is verify.rejection:
        np.testing.assert_allclose(law.mean_accepted, 2, atol=1e-6)


def test_supports_that_do_not_meet():
    table = constant_table((0.5, 0.5, 0, 0), (0, 0, 0.5, 0.5), depth=3)
    for rule in (verify.rejection, verify.coupled):
        assert _assert_lossless(rule, table, 2).mean_accepted == 0


# Closed numbers, by enumeration in the block verification paper's setting: token
# verification accepts a + a^2 + ... + a^gamma drafts for i.i.d. acceptance a.


@pytest.mark.parametrize(
    ("vector", "gamma", "expected"),
    [
        (A, 1, 0.7),
        (A, 2, 1.190),
        (A, 3, 1.533),
        (A, 4, 1.7731),
        (B, 2, 1.190),
        (B, 3, 1.533),
        (C, 2, 1.440),
        (C, 3, 1.952),
        (C, 4, 2.3616),
        (((1 / 3, 2 / 3), (2 / 3, 1 / 3)), 1, 2 / 3),
        (((1 / 3, 2 / 3), (2 / 3, 1 / 3)), 2, 10 / 9),
        (((1 / 3, 2 / 3), (2 / 3, 1 / 3)), 3, 38 / 27),
    ],
)
def test_mean_accepted_of_the_token_rule(vector, gamma, expected):
    table = constant_table(*vector, depth=gamma + 1)
    law = _assert_lossless(verify.rejection, table, gamma)
    np.testing.assert_allclose(law.mean_accepted, expected, atol=1e-6)


@pytest.mark.parametrize("vector", [A, B, C])
def test_first_draft_is_accepted_as_often_as_possible(vector):
    p, q = map(np.asarray, vector)
    law = rule_law(verify.rejection, constant_table(p, q, depth=2), 1)
    np.testing.assert_allclose(law.mean_accepted, np.minimum(p, q).sum(), atol=1e-6)


@pytest.mark.parametrize(
    ("vector", "expected"), [(A, 0.630769), (B, 0.658887), (C, 0.8)]
)
def test_match_probability_of_shared_noise(vector, expected):
    p, q = map(np.asarray, vector)
    exact = match_probability(p, q)
    np.testing.assert_allclose(exact, expected, atol=1e-6)
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) <= exact + 1e-12 and exact <= overlap + 1e-12
    n = 100_000
    samples = sample_rule(
        verify.coupled,
        constant_table(p, q, depth=2),
        1,
        n_samples=n,
        coupled_drafts=True,
    )
    rate = samples.n_accepted.mean()
    assert abs(rate - exact) < 4 * np.sqrt(exact * (1 - exact) / n)


# The law on real noise.


@pytest.mark.parametrize(
    ("rule", "coupled_drafts"),
    [(verify.rejection, False), (verify.coupled, False), (verify.coupled, True)],
)
def test_law_on_real_noise(rule, coupled_drafts):
    table = random_table(11, vocab_size=3, depth=3, zeros=False)
    samples = sample_rule(
        rule, table, 2, n_samples=100_000, seed=1, coupled_drafts=coupled_drafts
    )
    counts = count(samples, 3)
    assert g_test(counts, target_law(table, 3)) > 1e-4
    for axis in range(3):
        others = tuple(a for a in range(3) if a != axis)
        assert g_test(counts.sum(others), target_law(table, 3).sum(others)) > 1e-4
    # The test has teeth: the draft's own law, or a law 2 % off, fails it.
    assert g_test(counts, target_law(random_table(12, vocab_size=3, depth=3), 3)) < 1e-9
    off = target_law(table, 3).copy()
    off[0] *= 1.05
    assert g_test(counts, off / off.sum()) < 1e-4


def test_coupled_text_does_not_depend_on_the_draft():
    table = random_table(13, vocab_size=4, depth=3)
    run = lambda t, coupled: sample_rule(
        verify.coupled, t, 2, n_samples=2000, coupled_drafts=coupled
    )
    one, two = run(table, True), run(table, False)
    n = np.minimum(one.n_accepted, two.n_accepted)
    for i in range(3):
        both = n >= i
        np.testing.assert_array_equal(one.tokens[both, i], two.tokens[both, i])
    assert one.n_accepted.mean() > two.n_accepted.mean()


# The oracle itself, on a rule that keeps float64, and on broken ones.


def _token_rule(
    name="token",
    *,
    passes=lambda u, p, q: u * q < p,
    chance=lambda p, q: jnp.where(p > 0, jnp.minimum(p / jnp.maximum(q, 1e-300), 1), 0),
    residual=lambda p, q: jnp.maximum(p - q, 0),
    row=lambda n, n_drafts: n,
    point=False,
    limit=lambda proposal: proposal.n_valid,
    pick=lambda weights, p: weights,
):
    """The token rule in the inputs' precision, with a handle for every mistake."""

    def rule(proposal, scores, noise):
        p = jax.nn.softmax(scores, axis=-1)
        n_drafts, batch = proposal.tokens.shape[1], jnp.arange(scores.shape[0])
        q = jnp.exp(proposal.logprobs)
        of = lambda law: jnp.take_along_axis(law, proposal.tokens[..., None], -1)[
            ..., 0
        ]
        p_token, q_token = of(p[:, :n_drafts]), of(q)
        q_token = jnp.ones_like(q_token) if point else q_token
        accept = passes(noise.accept, p_token, q_token)
        n = accepted_prefix(accept, limit(proposal))
        at = jnp.minimum(n, n_drafts - 1)
        p_next = p[batch, row(n, n_drafts)]
        rest = residual(p_next, q[batch, at])
        rejected = (n < limit(proposal)) & (jnp.abs(rest).sum(-1) > 0)
        weights = jnp.where(rejected[:, None], rest, p_next)
        info = {"accept_prob": chance(p_token, q_token), "next_weights": weights}
        return Verdict(n, draw(pick(weights, p_next), noise.draw), info)

    return VerifyRule(name, False, "uniform", False, rule)


def test_oracle_is_exact_in_float64():
    for seed in range(4):
        table = random_table(seed, vocab_size=3, depth=3, zeros=seed % 2 == 1)
        law = _assert_lossless(_token_rule(), table, 2, dtype=np.float64)
        assert law.dtype == np.float64


def _ratio(factor=1.0, extra=0.0):
    """Acceptance with the ratio p/q changed, told truthfully."""
    change = lambda p, q: jnp.where(q > 0, factor * p / (q + extra), 1.0)
    return {
        "passes": lambda u, p, q: u < jnp.where(p > 0, change(p, q), 0),
        "chance": lambda p, q: jnp.where(p > 0, jnp.minimum(change(p, q), 1), 0),
    }


# Rule, and the least bias that enumeration must show in float32.
BROKEN = {
    "residual is p": (_token_rule(residual=lambda p, q: p), 1e-2),
    "residual is |p - q|": (_token_rule(residual=lambda p, q: jnp.abs(p - q)), 1e-2),
    "residual is p - 0.98 q": (
        _token_rule(residual=lambda p, q: jnp.maximum(p - 0.98 * q, 0)),
        1e-4,
    ),
    "q of the draft is 1": (_token_rule(point=True), 1e-2),
    "bonus from the row before": (
        _token_rule(row=lambda n, g: jnp.minimum(n, g - 1)),
        1e-3,
    ),
    "correction from the row after": (
        _token_rule(row=lambda n, g: jnp.minimum(n + 1, g)),
        1e-2,
    ),
    "2 % too generous": (_token_rule(**_ratio(factor=1.02)), 1e-3),
    "epsilon in the ratio": (_token_rule(**_ratio(extra=1e-3)), 1e-4),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_shows_its_bias(name):
    rule, least = BROKEN[name]
    # Four tokens: a residual on one token would hide mistakes in its weights.
    table = random_table(1, vocab_size=4, depth=3)
    bias, law = _bias(rule, table, 2)
    assert bias > least, bias
    assert abs(law.tokens.sum() - 1) < 1e-6


LYING = {
    "residual without clamp": _token_rule(residual=lambda p, q: p - q),
    "next token from p": _token_rule(pick=lambda weights, p: p),
    "threshold 2 % off": _token_rule(passes=lambda u, p, q: 0.98 * u * q < p),
    "accepts beyond n_valid": _token_rule(
        limit=lambda proposal: jnp.full_like(proposal.n_valid, 2)
    ),
}


@pytest.mark.parametrize("name", LYING)
def test_rule_that_contradicts_itself_is_refused(name):
    table = random_table(1, vocab_size=3, depth=3)
    drafts = sampled_drafts(table, 2)
    if name == "accepts beyond n_valid":
        drafts = drafts._replace(n_valid=np.ones_like(drafts.n_valid))
    with pytest.raises(ValueError):
        rule_law(LYING[name], table, 2, drafts=drafts)


def test_test_that_is_not_strict_is_seen_at_zero():
    table = random_table(1, vocab_size=3, depth=3, zeros=True)
    loose = _token_rule(passes=lambda u, p, q: u * q <= p)
    bias, law = _bias(loose, table, 2)
    # Its law is right: only a uniform of exactly 0 gives it away.
    assert bias < 1e-6 and law.n_impossible > 0
    assert _bias(_token_rule(), table, 2)[1].n_impossible == 0


def test_argmax_draft_declared_as_softmax_is_seen():
    biases = []
    for seed in range(10):
        table = random_table(seed, vocab_size=4, depth=2)
        honest = point_drafts(table, 1)
        wrong = honest._replace(logprobs=np.log(table.draft(()))[None, None])
        biases.append(_bias(verify.rejection, table, 1, drafts=wrong)[0])
        _assert_lossless(verify.rejection, table, 1, drafts=honest)
    assert np.mean(biases) > 0.1


def test_dropping_a_draft_after_looking_at_it_is_seen():
    table = random_table(2, vocab_size=3, depth=2)
    drafts = sampled_drafts(table, 1)
    picky = (drafts.tokens[:, 0] == 0).astype(np.int32)
    drafts = drafts._replace(n_valid=picky)
    assert _bias(verify.rejection, table, 1, drafts=drafts)[0] > 1e-2
    # The coupled rule's text is the target's own whatever is proposed.
    _assert_lossless(verify.coupled, table, 1, drafts=drafts)


def _coupled_variant(name, decide):
    return VerifyRule(name, False, "gumbel", False, decide)


def _accepts_what_is_possible(proposal, scores, noise):
    chosen = jnp.argmax(scores + noise, axis=-1)
    n_drafts = proposal.tokens.shape[1]
    score = jnp.take_along_axis(scores[:, :n_drafts], proposal.tokens[..., None], -1)
    n = accepted_prefix(score[..., 0] > -1.0, proposal.n_valid)
    return Verdict(n, jnp.take_along_axis(chosen, n[:, None], 1)[:, 0], {})


def _bonus_from_the_row_before(proposal, scores, noise):
    chosen = jnp.argmax(scores + noise, axis=-1)
    n_drafts = proposal.tokens.shape[1]
    n = accepted_prefix(proposal.tokens == chosen[:, :n_drafts], proposal.n_valid)
    at = jnp.minimum(n, n_drafts - 1)
    return Verdict(n, jnp.take_along_axis(chosen, at[:, None], 1)[:, 0], {})


@pytest.mark.parametrize(
    "decide", [_accepts_what_is_possible, _bonus_from_the_row_before]
)
def test_broken_coupling_shows_its_bias(decide):
    table = random_table(1, vocab_size=3, depth=3)
    assert _bias(_coupled_variant(decide.__name__, decide), table, 2)[0] > 1e-2


def test_temperature_applied_twice_is_seen_on_real_noise():
    # Forced choices cannot see what is done to the scores before the argmax.
    def sharpened(proposal, scores, noise):
        return verify.coupled.verify(proposal, 1.05 * scores, noise)

    table = random_table(11, vocab_size=3, depth=3)
    samples = sample_rule(
        _coupled_variant("sharpened", sharpened), table, 2, n_samples=100_000
    )
    assert g_test(count(samples, 3), target_law(table, 3)) < 1e-4


@pytest.mark.parametrize(
    ("p", "q", "biased"),
    [
        ((0.4, 0.4, 0.1, 0.1), (0.1, 0.2, 0.4, 0.3), (0.4331, 0.3669, 0.0999, 0.1001)),
        ((0.35, 0.3, 0.25, 0.1), (0.3, 0.1, 0.1, 0.5), (0.3173, 0.3241, 0.2586, 0.1)),
        # A residual on one token hides the mistake.
        ((0.6, 0.25, 0.1, 0.05), (0.3, 0.3, 0.3, 0.1), None),
    ],
)
def test_residual_with_the_drafts_noise_is_biased(p, q, biased):
    # The draft and the residual both come from argmax(log law + G); the rule decides.
    n, vocab = 400_000, len(p)
    rng = np.random.default_rng(0)
    exact = np.asarray(p)
    first = {}
    for shared in (True, False):
        noise = rng.gumbel(size=(n, vocab))
        tokens = np.argmax(np.log(q) + noise, axis=-1)[:, None]
        proposal = Proposal(
            tokens=jnp.asarray(tokens, jnp.int32),
            logprobs=jnp.broadcast_to(jnp.log(jnp.asarray(q)), (n, 1, vocab)),
            n_valid=jnp.ones((n,), jnp.int32),
        )
        scores = np.broadcast_to(np.log(p), (n, 2, vocab)).astype(np.float32)
        uniform = UniformNoise(
            jnp.asarray(rng.random((n, 1)), jnp.float32), jnp.full((n,), 0.5)
        )
        verdict = jax.jit(verify.rejection.verify)(proposal, scores, uniform)
        if not shared:
            noise = rng.gumbel(size=(n, vocab))
        with np.errstate(divide="ignore"):
            law = np.log(np.asarray(verdict.info["next_weights"]))
        drawn = np.argmax(law + noise, axis=-1)
        accepted = np.asarray(verdict.n_accepted) == 1
        first[shared] = np.bincount(
            np.where(accepted, tokens[:, 0], drawn), minlength=vocab
        )
    assert g_test(first[False], exact) > 1e-4
    if biased is None:
        assert g_test(first[True], exact) > 1e-4
    else:
        assert g_test(first[True], exact) < 1e-9
        np.testing.assert_allclose(first[True] / n, biased, atol=3e-3)


def test_oracle_says_what_it_cannot_do():
    table = random_table(0, vocab_size=2, depth=2)
    with pytest.raises(ValueError, match="depth"):
        rule_law(verify.rejection, table, 2)
    with pytest.raises(ValueError, match="outside"):
        table.target((2,))
    with pytest.raises(ValueError, match="differ"):
        total_variation(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="gumbel"):
        sample_rule(verify.rejection, table, 1, n_samples=4, coupled_drafts=True)
    with pytest.raises(ValueError, match="laws over one V"):
        constant_table((0.5, 0.6), (0.5, 0.5), depth=1)


def test_tables_are_a_function_of_the_seed():
    a, b, c = (random_table(s, vocab_size=3, depth=3) for s in (4, 4, 5))
    for x, y, z in zip(a.target_rows, b.target_rows, c.target_rows, strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.array_equal(x, z)
    assert not np.array_equal(a.target((0,)), a.target((1,)))
    for level in (*a.target_rows, *a.draft_rows):
        np.testing.assert_allclose(level.sum(-1), 1, atol=1e-15)

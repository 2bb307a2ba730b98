"""The exact law of every lossless rule on table models, and on real noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.drafters import Proposal
from specjax.sampling import UniformNoise
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

A = ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
B = ((0.6, 0.25, 0.1, 0.05), (0.3, 0.3, 0.3, 0.1))
C = ((0.7, 0.3), (0.5, 0.5))

# Rules that compute in float32 whatever they are given are exact to its rounding.
_BOUND = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}

SAMPLED = [verify.rejection, verify.block, verify.sample_and_match, verify.coupled]
LOSSLESS = [*SAMPLED, verify.greedy]
# Rules for trees are these on chains; see test_verify_trees.py for what they are else.
ON_CHAINS = {
    verify.recursive_rejection: verify.rejection,
    verify.k_seq: verify.rejection,
    verify.traversal: verify.block,
}
# Vocabulary, drafts, and the precision of what the rule is given.
SHAPES = [
    (2, 1, np.float32),
    (2, 4, np.float64),
    (3, 2, np.float64),
    (4, 3, np.float32),
]


def _names(rules):
    return [rule.name for rule in rules]


def _bias(rule, table, gamma, **kwargs):
    law = rule_law(rule, table, gamma, **kwargs)
    return total_variation(law.tokens, target_law(table, gamma + 1)), law


@pytest.fixture
def assert_lossless(record_law):
    def check(rule, table, gamma, *, proposal="drawn", **kwargs):
        bias, law = _bias(rule, table, gamma, **kwargs)
        record_law(rule, proposal, law, bias)
        assert law.n_impossible == 0
        assert bias < _BOUND[law.dtype], (rule.name, bias)
        assert abs(law.n_accepted.sum() - 1) < _BOUND[law.dtype]
        return law

    return check


def test_every_lossless_rule_is_proved():
    claimed = {rule.name for rule in verify.REGISTRY.values() if rule.lossless}
    assert claimed == {*_names(LOSSLESS), *_names(ON_CHAINS)}


@pytest.mark.parametrize("rule", ON_CHAINS, ids=_names(ON_CHAINS))
def test_rules_for_trees_are_known_ones_on_chains(rule):
    table = random_table(6, vocab_size=3, depth=3)
    for drafts in (sampled_drafts(table, 2), point_drafts(table, 2)):
        one, two = (
            rule_law(r, table, 2, drafts=drafts) for r in (rule, ON_CHAINS[rule])
        )
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.n_accepted, two.n_accepted)


@pytest.mark.parametrize("proposal", ["drawn", "point"])
@pytest.mark.parametrize(("vocab", "gamma", "dtype"), SHAPES)
@pytest.mark.parametrize("rule", LOSSLESS, ids=_names(LOSSLESS))
def test_law_is_the_targets(assert_lossless, rule, vocab, gamma, proposal, dtype):
    make = {"drawn": sampled_drafts, "point": point_drafts}[proposal]
    for seed in range(2):
        for zeros in (False, True):
            table = random_table(seed, vocab_size=vocab, depth=gamma + 1, zeros=zeros)
            table = table.greedy() if rule.greedy_only else table
            drafts = make(table, gamma)
            law = assert_lossless(
                rule, table, gamma, proposal=proposal, drafts=drafts, dtype=dtype
            )
            assert law.dtype == dtype


@pytest.mark.parametrize("rule", SAMPLED, ids=_names(SAMPLED))
def test_every_point_mass_is_lossless(assert_lossless, rule):
    table = random_table(5, vocab_size=3, depth=3, zeros=True)
    for tokens in np.ndindex(3, 3):
        drafts = point_drafts(table, 2, tokens)
        law = assert_lossless(rule, table, 2, proposal="point", drafts=drafts)
        first = table.target(())[tokens[0]]
        second = table.target(tokens[:1])[tokens[1]]
        # A point mass x is accepted with probability p(x), whatever the rule: block
        # verification gains nothing.
        np.testing.assert_allclose(law.mean_accepted, first + first * second, atol=1e-6)


@pytest.mark.parametrize("rule", SAMPLED, ids=_names(SAMPLED))
def test_rows_may_propose_fewer_tokens(assert_lossless, rule):
    table = random_table(7, vocab_size=3, depth=4)
    drafts = sampled_drafts(table, 3)
    # Stop after a token 0, itself included: known when the next is not drawn yet.
    zero = drafts.tokens == 0
    stop = np.where(zero.any(1), zero.argmax(1) + 1, 3).astype(np.int32)
    least = np.zeros_like(stop)
    for n in (stop, least, least + 1, least + 2):
        assert_lossless(
            rule, table, 3, proposal="fewer", drafts=drafts._replace(n_valid=n)
        )


@pytest.mark.parametrize("rule", SAMPLED, ids=_names(SAMPLED))
def test_no_drafts_is_plain_decoding(assert_lossless, rule):
    table = random_table(8, vocab_size=4, depth=1)
    drafts = Drafts(
        np.ones(1), np.zeros((1, 0), np.int32), np.zeros((1, 0, 4)), np.zeros(1, int)
    )
    law = assert_lossless(rule, table, 0, proposal="none", drafts=drafts)
    assert law.mean_accepted == 0


@pytest.mark.parametrize("rule", SAMPLED, ids=_names(SAMPLED))
def test_draft_equal_to_target(assert_lossless, rule):
    table = random_table(9, vocab_size=3, depth=3)
    table = type(table)(table.target_rows, table.target_rows)
    law = assert_lossless(rule, table, 2)
    if rule in (verify.rejection, verify.block):
        np.testing.assert_allclose(law.mean_accepted, 2, atol=1e-6)


def test_supports_that_do_not_meet(assert_lossless):
    table = constant_table((0.5, 0.5, 0, 0), (0, 0, 0.5, 0.5), depth=3)
    for rule in SAMPLED:
        assert assert_lossless(rule, table, 2).mean_accepted == 0


@pytest.mark.parametrize(
    ("vector", "expected"), [(A, 0.630769), (B, 0.658887), (C, 0.8)]
)
def test_match_probability_of_shared_noise(vector, expected):
    p, q = np.array(vector)
    exact = match_probability(p, q)
    np.testing.assert_allclose(exact, expected, atol=1e-6)
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) <= exact + 1e-12 and exact <= overlap + 1e-12
    n = 100_000
    samples = sample_rule(
        verify.coupled,
        constant_table(*vector, depth=2),
        1,
        n_samples=n,
        coupled_drafts=True,
    )
    rate = samples.n_accepted.mean()
    assert abs(rate - exact) < 4 * np.sqrt(exact * (1 - exact) / n)


# The law on real noise.


@pytest.mark.parametrize(
    ("rule", "coupled_drafts"),
    [*((rule, False) for rule in SAMPLED), (verify.coupled, True)],
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
    off[0] *= 1.1
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


# What a proposal must be for a law to be kept.


@pytest.mark.parametrize("rule", [verify.rejection, verify.block])
def test_argmax_draft_declared_as_softmax_is_seen(assert_lossless, rule):
    biases = []
    for seed in range(10):
        table = random_table(seed, vocab_size=4, depth=2)
        honest = point_drafts(table, 1)
        wrong = honest._replace(logprobs=np.log(table.draft(()))[None, None])
        biases.append(_bias(rule, table, 1, drafts=wrong)[0])
        assert_lossless(rule, table, 1, proposal="point", drafts=honest)
    assert np.mean(biases) > 0.1


def test_dropping_a_draft_after_looking_at_it_is_seen(assert_lossless):
    table = random_table(2, vocab_size=3, depth=2)
    drafts = sampled_drafts(table, 1)
    picky = (drafts.tokens[:, 0] == 0).astype(np.int32)
    drafts = drafts._replace(n_valid=picky)
    for rule in (verify.rejection, verify.block):
        assert _bias(rule, table, 1, drafts=drafts)[0] > 1e-2
    # What matching rules emit is the target's own whatever is proposed.
    for rule in (verify.coupled, verify.sample_and_match):
        assert_lossless(rule, table, 1, proposal="dropped", drafts=drafts)


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

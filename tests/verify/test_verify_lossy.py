"""Rules that change the law: the law each claims, to rounding."""

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
    rule_law,
    sample_rule,
    target_law,
    total_variation,
)
from specjax.testing.tables import (
    constant_table,
    point_drafts,
    random_table,
    sampled_drafts,
)
from specjax.verify import Evidence

_BOUND = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}


def _even(features, tokens):
    """A judge that approves even tokens."""
    return jnp.where(tokens % 2 == 0, 1.0, 0.0)


def _likely(features, tokens):
    """A judge that approves by the features: here log-probabilities of the rows."""
    rows = features[:, : tokens.shape[1]]
    return jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]


def _never(features, tokens):
    return jnp.zeros(tokens.shape)


# What a position that is drafted does, as each docstring has it: the mass of every
# token that is kept as a draft, and of every token that is emitted instead.


def _approved(accepts):
    def law(p, q, t):
        approved = accepts(t)
        return q * approved, (1 - q[approved].sum()) * p

    return law


def _judged(accepts):
    def law(p, q, t):
        approved = accepts(t)
        others = q * ~approved
        # A draft that is not approved is kept where it equals the draw.
        return q * approved + others * p, (others.sum() - others) * p

    return law


def _typical(epsilon, delta):
    def accepts(t):
        entropy = -np.sum(t[t > 0] * np.log(t[t > 0]))
        return t > min(epsilon, delta * np.exp(-entropy))

    return _approved(accepts)


def _relaxed(top_n, delta):
    def accepts(t):
        rank = np.empty(len(t), int)
        rank[np.argsort(-t, kind="stable")] = np.arange(len(t))
        return (rank < top_n) & (t >= t.max() - delta) & (t > 0)

    return _approved(accepts)


def _lenient(leniency):
    def law(p, q, t):
        kept = np.minimum(q, p / leniency)
        rest = np.maximum(p - q, 0)
        rejected = max(1 - kept.sum(), 0)
        return kept, rejected * (rest / rest.sum() if rest.sum() > 0 else p)

    return law


RULES = {
    "typical": (verify.typical(), _typical(0.09, 0.3)),
    "typical sharp": (verify.typical(0.5, 0.9), _typical(0.5, 0.9)),
    "relaxed": (verify.relaxed(), _relaxed(10, 0.6)),
    "relaxed top 2": (verify.relaxed(2, 0.2), _relaxed(2, 0.2)),
    "lenient": (verify.lenient(), _lenient(0.9)),
    "lenient half": (verify.lenient(0.5), _lenient(0.5)),
    "judge": (
        verify.judge(_even, 0.5),
        _judged(lambda t: (np.arange(len(t)) % 2 == 0) & (t > 0)),
    ),
    "judge by features": (
        verify.judge(_likely, -1.2),
        _judged(lambda t: t >= np.exp(-1.2)),
    ),
}


def _induced(law, table, unwarped, gamma, prefix=()):
    """The law of the tokens a pass emits from a prefix on, drafts being drawn."""
    n_tokens, vocab = gamma + 1 - len(prefix), table.vocab_size
    if n_tokens == 1:
        return table.target(prefix)
    kept, instead = law(
        table.target(prefix), table.draft(prefix), unwarped.target(prefix)
    )
    out = np.zeros((vocab,) * n_tokens)
    for v in range(vocab):
        after = (*prefix, v)
        if kept[v] > 0:
            out[v] += kept[v] * _induced(law, table, unwarped, gamma, after)
        if instead[v] > 0:
            out[v] += instead[v] * target_law(table, n_tokens - 1, after)
    return out


@pytest.mark.parametrize(
    ("vocab", "gamma", "dtype"), [(3, 3, np.float64), (4, 2, np.float32)]
)
@pytest.mark.parametrize("name", RULES)
def test_law_is_the_one_that_is_claimed(record_law, name, vocab, gamma, dtype):
    rule, claimed = RULES[name]
    worst = 0.0
    for seed in range(3):
        for zeros in (False, True):
            table = random_table(
                seed + 20, vocab_size=vocab, depth=gamma + 1, zeros=zeros
            )
            law = rule_law(rule, table, gamma, dtype=dtype)
            expected = _induced(claimed, table, table, gamma)
            np.testing.assert_allclose(expected.sum(), 1)
            error = total_variation(law.tokens, expected)
            record_law(rule, "drawn", law, error, against="docstring")
            assert law.dtype == dtype and error < _BOUND[law.dtype]
            assert law.n_impossible == 0
            worst = max(
                worst, total_variation(law.tokens, target_law(table, gamma + 1))
            )
    # Lossy: not the target's law.
    assert worst > 1e-2


@pytest.mark.parametrize("name", RULES)
def test_point_masses_follow_the_claim(record_law, name):
    rule, claimed = RULES[name]
    table = random_table(31, vocab_size=3, depth=3)
    for tokens in np.ndindex(3, 3):
        drafts = point_drafts(table, 2, tokens)
        law = rule_law(rule, table, 2, drafts=drafts)
        rows = [np.tile(np.eye(3)[x], (3**i, 1)) for i, x in enumerate(tokens)]
        point = type(table)(table.target_rows, (*rows, table.draft_rows[2]))
        error = total_variation(law.tokens, _induced(claimed, point, table, 2))
        record_law(rule, "point", law, error, against="docstring")
        assert error < _BOUND[law.dtype]


@pytest.mark.parametrize(
    ("rule", "p", "expected"),
    [
        # Entropy 0.8018: the threshold is 0.3 * 0.4485 = 0.1346, below epsilon.
        (verify.typical(0.15, 0.3), (0.7, 0.2, 0.1), (0.55, 0.4, 0.05)),
        # Now epsilon is the threshold, and every token passes.
        (verify.typical(0.09, 0.3), (0.7, 0.2, 0.1), (0.2, 0.3, 0.5)),
        (verify.relaxed(2, 0.25), (0.5, 0.3, 0.2), (0.45, 0.45, 0.1)),
        (verify.relaxed(2, 0.1), (0.5, 0.3, 0.2), (0.6, 0.24, 0.16)),
        (verify.relaxed(1, 1.0), (0.5, 0.3, 0.2), (0.6, 0.24, 0.16)),
        (verify.lenient(0.5), (0.5, 0.3, 0.2), (0.3, 0.3, 0.4)),
        (verify.lenient(1.0), (0.5, 0.3, 0.2), (0.5, 0.3, 0.2)),
        (verify.judge(_even, 0.5), (0.5, 0.3, 0.2), (0.35, 0.09, 0.56)),
        (verify.judge(_never, 0.5), (0.5, 0.3, 0.2), (0.5, 0.3, 0.2)),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else None,
)
def test_laws_by_hand(rule, p, expected):
    law = rule_law(rule, constant_table(p, (0.2, 0.3, 0.5), depth=2), 1)
    np.testing.assert_allclose(law.tokens.sum(1), expected, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_law_at_temperature_zero(name):
    """The warped scores are the argmax; the evidence still knows the others."""
    rule, claimed = RULES[name]
    lossy = 0.0
    for seed in range(3):
        table = random_table(seed + 40, vocab_size=4, depth=3, zeros=seed == 2)
        cold = table.greedy()
        law = rule_law(rule, cold, 2, unwarped=table)
        assert law.n_impossible == 0
        expected = _induced(claimed, cold, table, 2)
        assert total_variation(law.tokens, expected) < 1e-6
        lossy = max(lossy, total_variation(law.tokens, target_law(cold, 3)))
        # An argmax draft passes every rule but a judge's approval, and is matched.
        drafts = point_drafts(cold, 2, _argmaxes(cold))
        assert rule_law(rule, cold, 2, drafts=drafts, unwarped=table).mean_accepted == 2
    # Leniency has nothing to forgive: p is 0 or 1. The others must not be cut short.
    assert (lossy > 1e-2) == rule.evidence


def _argmaxes(table):
    first = int(np.argmax(table.target(())))
    return first, int(np.argmax(table.target((first,))))


def test_thresholds_mean_the_same_at_every_temperature():
    table = random_table(60, vocab_size=4, depth=3)
    drafts = sampled_drafts(table, 2)
    for name in ("typical", "relaxed", "relaxed top 2"):
        rule, _ = RULES[name]
        warm, cold = (
            rule_law(rule, laws, 2, drafts=drafts, unwarped=table)
            for laws in (table, table.greedy())
        )
        np.testing.assert_array_equal(warm.n_accepted, cold.n_accepted)


def test_lenient_tokens_keep_their_bounds():
    for seed in range(5):
        table = random_table(seed, vocab_size=4, depth=2, zeros=True)
        p, q = table.target(()), table.draft(())
        for leniency in (0.9, 0.3):
            law = rule_law(verify.lenient(leniency), table, 1).tokens.sum(1)
            assert np.all(law <= np.minimum(p / leniency, np.maximum(p, q)) + 1e-6)
            assert np.all(law >= np.minimum(p, q) - 1e-6)


@pytest.mark.parametrize("name", ["relaxed", "lenient half", "judge"])
def test_law_on_real_noise(name):
    rule, claimed = RULES[name]
    table = random_table(11, vocab_size=3, depth=3)
    counts = count(sample_rule(rule, table, 2, n_samples=100_000, seed=2), 3)
    assert g_test(counts, _induced(claimed, table, table, 2)) > 1e-4
    assert g_test(counts, target_law(table, 3)) < 1e-9


# Decisions.


def _case(seed=0, batch=400, n_drafts=4, vocab=5):
    rng = np.random.default_rng(seed)
    proposal = Proposal(
        jnp.asarray(rng.integers(vocab, size=(batch, n_drafts)), jnp.int32),
        jax.nn.log_softmax(
            jnp.asarray(rng.normal(size=(batch, n_drafts, vocab)), jnp.float32)
        ),
        jnp.asarray(rng.integers(n_drafts + 1, size=batch), jnp.int32),
    )
    scores = jnp.asarray(rng.normal(size=(batch, n_drafts + 1, vocab)), jnp.float32)
    u = jnp.asarray(rng.random((batch, n_drafts + 1)), jnp.float32)
    return proposal, scores, UniformNoise(u[:, 1:], u[:, 0])


def _same(a, b):
    np.testing.assert_array_equal(a.n_accepted, b.n_accepted)
    np.testing.assert_array_equal(a.next_token, b.next_token)


@pytest.mark.parametrize("kind", ["drawn", "point"])
def test_full_leniency_is_rejection(kind):
    proposal, scores, noise = _case()
    if kind == "point":
        proposal = proposal._replace(logprobs=None)
    lenient, rejection = (
        jax.jit(rule.verify)(proposal, scores, noise)
        for rule in (verify.lenient(1), verify.rejection)
    )
    _same(lenient, rejection)


def test_judge_that_approves_nothing_is_sample_and_match():
    proposal, scores, noise = _case()
    evidence = Evidence(jax.nn.log_softmax(scores), jnp.zeros(proposal.tokens.shape))
    run = jax.jit(verify.judge(_never, 0.5).verify)
    judged = run(proposal, scores, noise, evidence)
    _same(judged, jax.jit(verify.sample_and_match.verify)(proposal, scores, noise))
    sure = evidence._replace(judge_scores=jnp.full(proposal.tokens.shape, 0.5))
    judged = run(proposal, scores, noise, sure)
    np.testing.assert_array_equal(judged.n_accepted, proposal.n_valid)


@pytest.mark.parametrize(
    "rule",
    [verify.typical(1e-6, 1e-6), verify.relaxed(9, 1.0), verify.judge(_never, -1.0)],
    ids=lambda rule: rule.name,
)
def test_banned_token_is_never_accepted(rule):
    # Even where nearly everything passes: a weak best token is within delta of 0.
    logprobs = jnp.log(jnp.tile(jnp.asarray([0.3, 0.3, 0.4, 0.0]), (4, 2, 1)))
    proposal = Proposal(jnp.asarray([[0], [1], [2], [3]]), None, jnp.ones(4, int))
    evidence = Evidence(logprobs, jnp.zeros((4, 1)))
    for u in (0.0, 0.3, 1 - 2.0**-24):
        noise = UniformNoise(jnp.full((4, 1), u), jnp.full((4,), u))
        verdict = jax.jit(rule.verify)(proposal, logprobs, noise, evidence)
        np.testing.assert_array_equal(verdict.n_accepted, [1, 1, 1, 0])
        assert np.all(verdict.next_token < 3)


def test_relaxed_breaks_ties_by_the_lowest_id():
    scores = jnp.log(jnp.asarray([[[0.4, 0.2, 0.2, 0.2]] * 2] * 4))
    proposal = Proposal(jnp.asarray([[0], [1], [2], [3]]), None, jnp.ones(4, int))
    noise = UniformNoise(jnp.full((4, 1), 0.9), jnp.full((4,), 0.1))
    rule = verify.relaxed(2, 0.5)
    verdict = jax.jit(rule.verify)(proposal, scores, noise, Evidence(scores))
    np.testing.assert_array_equal(verdict.n_accepted, [1, 1, 0, 0])
    np.testing.assert_array_equal(verdict.next_token, [0, 0, 0, 0])


# Making them.


def test_equal_arguments_give_the_identical_rule():
    assert verify.typical() is verify.typical(0.09, delta=0.3)
    assert verify.relaxed(delta=0.6) is verify.relaxed(10)
    assert verify.lenient(1) is verify.lenient(leniency=1.0)
    assert verify.judge(_even, 0) is verify.judge(score=_even, threshold=0.0)
    assert verify.typical(0.1) is not verify.typical(0.2)
    assert verify.judge(_even, 0) is not verify.judge(_never, 0)
    for name in ("typical", "relaxed", "lenient"):
        assert verify.by_name(name) is getattr(verify, name)()
    assert "judge" not in verify.REGISTRY


def test_flags_tell_what_a_rule_needs():
    for rule, _ in RULES.values():
        assert not rule.lossless and not rule.greedy_only and rule.noise == "uniform"
        assert rule.evidence == (rule.name != "lenient")
        assert (rule.judge is not None) == (rule.name == "judge")
    assert verify.judge(_even, 0).judge is _even
    for rule in verify.REGISTRY.values():
        assert not (rule.lossless and rule.evidence)


@pytest.mark.parametrize(
    ("make", "arguments", "match"),
    [
        *(
            (verify.lenient, {"leniency": bad}, r"leniency=.*\(0, 1\]")
            for bad in (0, -0.5, 1.5, float("nan"), float("inf"), "0.5", True, None)
        ),
        *(
            (verify.typical, {"epsilon": bad}, r"epsilon=.*\(0, 1\]")
            for bad in (0, 2, float("nan"))
        ),
        (verify.typical, {"delta": 0}, "delta="),
        *((verify.relaxed, {"top_n": bad}, "top_n") for bad in (0, 1.5, True)),
        (verify.relaxed, {"delta": -0.1}, r"delta=.*\[0, 1\]"),
        (verify.judge, {"score": 3, "threshold": 0.5}, "score"),
        *(
            (verify.judge, {"score": _even, "threshold": bad}, "threshold")
            for bad in (float("nan"), "high", None, True)
        ),
    ],
)
def test_bad_arguments_are_refused(make, arguments, match):
    with pytest.raises(ValueError, match=match):
        make(**arguments)


def test_judge_without_scores_is_refused():
    proposal, scores, noise = _case()
    with pytest.raises(ValueError, match="judge_scores"):
        verify.judge(_even, 0).verify(proposal, scores, noise, Evidence(scores))

"""What each rule does with one given proposal, score table and noise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.drafters import Proposal
from specjax.sampling import Settings, UniformNoise, warp
from specjax.verify import Evidence, accepted_prefix

JUDGE = verify.judge(lambda features, tokens: (tokens % 3).astype(jnp.float32), 1.5)
RULES = [*verify.REGISTRY.values(), JUDGE]
BY_Q = [verify.rejection, verify.block, verify.lenient(0.5)]
MATCHING = [verify.greedy, verify.coupled, verify.sample_and_match]
BELOW_ONE = 1 - 2.0**-24

_each = functools.partial(pytest.mark.parametrize, "rule", ids=lambda rule: rule.name)


def _eager(rule, proposal, scores, noise, verify=None):
    """Runs a rule, giving it the evidence it asks for: here, the scores' own."""
    verify = rule.verify if verify is None else verify
    if not rule.evidence:
        return verify(proposal, scores, noise)
    judge = rule.judge and rule.judge(None, proposal.tokens)
    evidence = Evidence(jax.nn.log_softmax(scores, axis=-1), judge)
    return verify(proposal, scores, noise, evidence)


@pytest.fixture
def run():
    return lambda rule, *args: _eager(rule, *args, verify=jax.jit(rule.verify))


def _proposal(tokens, logprobs=None, n_valid=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    full = np.full(tokens.shape[0], tokens.shape[1])
    return Proposal(
        tokens,
        None if logprobs is None else jnp.asarray(logprobs, jnp.float32),
        jnp.asarray(full if n_valid is None else n_valid, jnp.int32),
    )


def _log(p):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def _uniform(accept, draw=0.5):
    accept = jnp.asarray(accept, jnp.float32)
    return UniformNoise(accept, jnp.broadcast_to(jnp.float32(draw), accept.shape[:1]))


def _noise(rule, batch, n_drafts, vocab, seed=0):
    rng = np.random.default_rng(seed)
    if rule.noise == "none":
        return None
    if rule.noise == "gumbel":
        return jnp.asarray(rng.gumbel(size=(batch, n_drafts + 1, vocab)), jnp.float32)
    u = jnp.asarray(rng.random((batch, n_drafts + 1)), jnp.float32)
    return UniformNoise(u[:, 1:], u[:, 0])


def _case(rule, batch=6, n_drafts=4, vocab=5, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(batch, n_drafts + 1, vocab)).astype(np.float32)
    logprobs = jax.nn.log_softmax(rng.normal(size=(batch, n_drafts, vocab)))
    tokens = rng.integers(vocab, size=(batch, n_drafts))
    # Half of the drafts are right for the rules that match.
    choice = np.argmax(scores, -1)[:, :n_drafts]
    tokens = np.where(rng.random(tokens.shape) < 0.5, tokens, choice)
    n_valid = rng.integers(n_drafts + 1, size=batch)
    proposal = _proposal(tokens, logprobs, n_valid)
    return proposal, jnp.asarray(scores), _noise(rule, batch, n_drafts, vocab, seed)


def _rows(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def test_accepted_prefix_counts_leading_valid_passes():
    for n_drafts in range(4):
        patterns = np.array(
            list(itertools.product([False, True], repeat=n_drafts)), bool
        )
        patterns = patterns.reshape(2**n_drafts, n_drafts)
        for n_valid in range(n_drafts + 1):
            expected = [
                next((i for i in range(n_valid) if not p[i]), n_valid) for p in patterns
            ]
            got = accepted_prefix(
                jnp.asarray(patterns), jnp.full(len(patterns), n_valid, jnp.int32)
            )
            np.testing.assert_array_equal(got, expected)


@_each(RULES)
def test_counts_lie_in_range_for_every_n_valid(run, rule):
    for seed in range(3):
        proposal, scores, noise = _case(rule, seed=seed)
        verdict = run(rule, proposal, scores, noise)
        n = np.asarray(verdict.n_accepted)
        assert np.all((n >= 0) & (n <= np.asarray(proposal.n_valid)))
        assert np.all((verdict.next_token >= 0) & (verdict.next_token < 5))
        assert verdict.info["accept_prob"].shape == proposal.tokens.shape
        np.testing.assert_array_equal(n[proposal.n_valid == 0], 0)


@_each(RULES)
def test_jit_decides_as_eager_does(run, rule):
    case = _case(rule)
    compiled, eager = run(rule, *case), _eager(rule, *case)
    np.testing.assert_array_equal(compiled.n_accepted, eager.n_accepted)
    np.testing.assert_array_equal(compiled.next_token, eager.next_token)
    for key, value in compiled.info.items():
        np.testing.assert_allclose(value, eager.info[key], atol=1e-6)


@_each(RULES)
def test_nothing_is_promoted_by_chance(run, rule):
    proposal, scores, noise = _case(rule)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        verdict = run(rule, proposal, scores, noise)
    assert verdict.n_accepted.dtype == verdict.next_token.dtype == jnp.int32
    for key, value in verdict.info.items():
        assert value.dtype == jnp.float32, key


@_each(RULES)
def test_what_lies_beyond_n_valid_changes_nothing(run, rule):
    proposal, scores, noise = _case(rule)
    before = run(rule, proposal, scores, noise)
    beyond = np.arange(4)[None, :] >= np.asarray(proposal.n_valid)[:, None]
    junk = proposal._replace(
        tokens=jnp.where(beyond, (proposal.tokens + 1) % 5, proposal.tokens),
        logprobs=jnp.where(beyond[..., None], jnp.nan, jnp.asarray(proposal.logprobs)),
    )
    later = np.arange(5)[None, :] > np.asarray(proposal.n_valid)[:, None]
    scores = jnp.where(later[..., None], jnp.nan, scores)
    after = run(rule, junk, scores, noise)
    np.testing.assert_array_equal(before.n_accepted, after.n_accepted)
    np.testing.assert_array_equal(before.next_token, after.next_token)


@_each(RULES)
def test_rows_are_independent(run, rule):
    proposal, scores, noise = _case(rule)
    whole = run(rule, proposal, scores, noise)
    for r in (0, 5):
        alone = run(rule, *_rows((proposal, scores, noise), slice(r, r + 1)))
        assert alone.n_accepted[0] == whole.n_accepted[r]
        assert alone.next_token[0] == whole.next_token[r]
    order = np.array([3, 0, 5, 5, 1, 2])
    moved = run(rule, *_rows((proposal, scores, noise), order))
    np.testing.assert_array_equal(moved.n_accepted, whole.n_accepted[order])
    np.testing.assert_array_equal(moved.next_token, whole.next_token[order])


@_each(RULES)
def test_nan_row_disturbs_no_other(run, rule):
    proposal, scores, noise = _case(rule, batch=4)
    before = run(rule, proposal, scores, noise)
    after = run(rule, proposal, scores.at[2].set(jnp.nan), noise)
    others = np.array([0, 1, 3])
    np.testing.assert_array_equal(after.n_accepted[others], before.n_accepted[others])
    np.testing.assert_array_equal(after.next_token[others], before.next_token[others])
    # Nothing out of the vocabulary, so that whoever flags the row can index by it.
    assert 0 <= after.next_token[2] < 5 and 0 <= after.n_accepted[2] <= 4


@_each(RULES)
@pytest.mark.parametrize("logprobs", [True, False])
def test_no_draft_positions(run, rule, logprobs):
    scores = jnp.asarray([[[0.0, 3.0, 1.0]], [[2.0, -1.0, -jnp.inf]]])
    proposal = _proposal(np.zeros((2, 0)), np.zeros((2, 0, 3)) if logprobs else None)
    noise = {
        "none": None,
        "uniform": _uniform(np.zeros((2, 0)), 0.5),
        "gumbel": jnp.zeros((2, 1, 3)),
    }[rule.noise]
    verdict = run(rule, proposal, scores, noise)
    np.testing.assert_array_equal(verdict.n_accepted, [0, 0])
    np.testing.assert_array_equal(verdict.next_token, [1, 0])
    assert verdict.info["accept_prob"].shape == (2, 0)


def test_greedy_continues_with_the_argmax(run):
    scores = np.zeros((3, 3, 4), np.float32)
    scores[:, 0, 1] = scores[:, 1, 2] = scores[:, 2, 3] = 1
    proposal = _proposal([[1, 2], [1, 3], [0, 2]])
    verdict = run(verify.greedy, proposal, jnp.asarray(scores), None)
    np.testing.assert_array_equal(verdict.n_accepted, [2, 1, 0])
    np.testing.assert_array_equal(verdict.next_token, [3, 2, 1])
    np.testing.assert_array_equal(verdict.info["accept_prob"], [[1, 1], [1, 0], [0, 1]])


def test_greedy_takes_the_lowest_of_ties(run):
    scores = jnp.asarray([[[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]])
    for token, accepted, following in ((1, 1, 0), (2, 0, 1)):
        verdict = run(verify.greedy, _proposal([[token]]), scores, None)
        assert int(verdict.n_accepted[0]) == accepted
        assert int(verdict.next_token[0]) == following


def test_coupled_takes_the_lowest_of_ties(run):
    scores = jnp.asarray([[[1.0, 0.0, -jnp.inf], [0.0, 0.0, 0.0]]])
    noise = jnp.asarray([[[0.0, 1.0, 50.0], [2.0, 2.0, 2.0]]])
    verdict = run(verify.coupled, _proposal([[0]]), scores, noise)
    assert int(verdict.n_accepted[0]) == 1 and int(verdict.next_token[0]) == 0


@_each([*MATCHING, verify.typical(), verify.relaxed(), JUDGE])
def test_rules_without_q_ignore_what_the_draft_says_of_itself(run, rule):
    proposal, scores, noise = _case(rule)
    with_q = run(rule, proposal, scores, noise)
    without = run(rule, proposal._replace(logprobs=None), scores, noise)
    np.testing.assert_array_equal(with_q.n_accepted, without.n_accepted)
    np.testing.assert_array_equal(with_q.next_token, without.next_token)


@pytest.mark.parametrize("token", [-1, 4, 2**31 - 1])
@_each(MATCHING)
def test_matching_rules_reject_ids_outside(run, rule, token):
    scores = jnp.zeros((1, 2, 4)).at[:, :, 3].set(9.0)
    noise = {
        "none": None,
        "uniform": _uniform([[0.5]]),
        "gumbel": jnp.zeros((1, 2, 4)),
    }[rule.noise]
    verdict = run(rule, _proposal([[token]]), scores, noise)
    assert int(verdict.n_accepted[0]) == 0 and int(verdict.next_token[0]) == 3


@_each([*BY_Q, verify.sample_and_match])
@pytest.mark.parametrize("draft", [(0.0, 0.7, 0.3), (0.0, 0.0, 1.0), None])
def test_impossible_token_is_not_accepted_at_zero(run, rule, draft):
    # Token 1 or 2 is proposed, the target allows 0 alone; the uniform is exactly 0.
    target = _log([[[1.0, 0.0, 0.0]] * 2])
    logprobs = None if draft is None else _log([[draft]])
    for token in (1, 2):
        proposal = _proposal([[token]], logprobs)
        verdict = run(rule, proposal, target, _uniform([[0.0]], 0.0))
        assert int(verdict.n_accepted[0]) == 0
        assert int(verdict.next_token[0]) == 0
        assert float(verdict.info["accept_prob"][0, 0]) == 0.0


@_each([*BY_Q, verify.sample_and_match])
def test_nothing_is_accepted_after_an_impossible_token_at_zero(run, rule):
    # The drafts after it are the likeliest there are; every uniform is exactly 0.
    target = _log([[[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [0.1, 0.0, 0.9], [0.3] * 3]])
    logprobs = _log([[[0.2, 0.2, 0.6], [0.5, 0.1, 0.4], [0.6, 0.2, 0.2]]])
    for q in (logprobs, None):
        proposal = _proposal([[2, 1, 2]], q)
        verdict = run(rule, proposal, target, _uniform([[0.0] * 3], 0.0))
        assert int(verdict.n_accepted[0]) == 0
        assert int(verdict.next_token[0]) == 0


@_each([rule for rule in verify.REGISTRY.values() if not rule.evidence])
@pytest.mark.parametrize("kind", ["drawn", "point"])
def test_temperature_zero_is_greedy(run, rule, kind):
    proposal, logits, noise = _case(rule, batch=100)
    proposal = proposal if kind == "drawn" else proposal._replace(logprobs=None)
    warped = jax.jit(warp)(logits, Settings.full(100))
    got = run(rule, proposal, warped, noise)
    expected = run(verify.greedy, proposal, logits, None)
    np.testing.assert_array_equal(got.n_accepted, expected.n_accepted)
    np.testing.assert_array_equal(got.next_token, expected.next_token)
    assert set(np.unique(got.n_accepted)) == {0, 1, 2, 3, 4}


@_each(BY_Q)
def test_draft_of_probability_zero_gives_no_nan(run, rule):
    # q(x) = 0 cannot be drawn; whatever happens, the numbers stay numbers.
    target, logprobs = _log([[[0.5, 0.5, 0.0]] * 2]), _log([[[1.0, 0.0, 0.0]]])
    for token in (1, 2):
        verdict = run(
            rule,
            _proposal([[token]], logprobs),
            target,
            _uniform([[BELOW_ONE]]),
        )
        assert np.all(np.isfinite(verdict.info["accept_prob"]))
        assert np.all(np.isfinite(verdict.info["next_weights"]))
        expected = 1 if token == 1 else 0
        assert int(verdict.n_accepted[0]) == expected
        assert float(verdict.info["accept_prob"][0, 0]) == expected


@_each([verify.rejection, verify.block])
def test_residual_of_nothing_falls_back_to_the_target(run, rule):
    p = np.array([0.5, 0.3, 0.2])
    # q above p everywhere, as rounding may leave it: rejected, yet no residual.
    logprobs = np.log(p)[None, None] + 1e-3
    target = _log([[p, p[::-1]]])
    proposal = _proposal([[0]], logprobs)
    expected = {0.1: 0, 0.6: 1, 0.9: 2}
    for u, token in expected.items():
        verdict = run(rule, proposal, target, _uniform([[BELOW_ONE]], u))
        assert int(verdict.n_accepted[0]) == 0
        np.testing.assert_allclose(verdict.info["next_weights"][0], p, atol=1e-6)
        assert int(verdict.next_token[0]) == token


@_each(BY_Q)
def test_equal_laws_accept_whatever_the_uniform(run, rule):
    p = np.random.default_rng(0).dirichlet(np.ones(5), (1, 3))
    proposal = _proposal([[4, 0]], np.log(p[:, :2]))
    for u in (0.0, 0.5, 1 - 1e-5):
        verdict = run(rule, proposal, _log(p), _uniform([[u, u]]))
        assert int(verdict.n_accepted[0]) == 2


def test_rejection_draws_from_the_residual_and_the_bonus_row(run):
    p = np.array([[[0.4, 0.4, 0.2], [0.1, 0.2, 0.7], [0.0, 1.0, 0.0]]])
    q = np.array([[[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]])
    cases = {
        # accept uniforms -> accepted, and the next token's law
        (0.9, 0.0): (0, (2 / 3, 1 / 3, 0)),
        (0.3, 0.9): (1, (0, 0, 1)),
        (0.3, 0.1): (2, (0, 1, 0)),
    }
    for accept, (n, law) in cases.items():
        verdict = run(
            verify.rejection,
            _proposal([[2, 0]], np.log(q)),
            _log(p),
            _uniform([accept]),
        )
        assert int(verdict.n_accepted[0]) == n
        weights = np.asarray(verdict.info["next_weights"][0])
        np.testing.assert_allclose(weights / weights.sum(), law, atol=1e-6)
        np.testing.assert_allclose(
            verdict.info["accept_prob"][0], [0.4, 1 / 6], atol=1e-6
        )


@_each(BY_Q)
def test_n_valid_ends_a_row_with_the_target_not_the_residual(run, rule):
    p = np.array([[[0.4, 0.4, 0.2], [0.1, 0.2, 0.7]]])
    proposal = _proposal([[2]], np.log([[[0.2, 0.3, 0.5]]]), n_valid=[0])
    verdict = run(rule, proposal, _log(p), _uniform([[0.9]]))
    np.testing.assert_allclose(verdict.info["next_weights"][0], p[0, 0], atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -300.0, 80.0])
def test_scores_count_up_to_a_constant_a_row(run, scale):
    for rule in RULES:
        proposal, scores, noise = _case(rule)
        a = run(rule, proposal, scores, noise)
        shift = scale * jnp.arange(5, dtype=jnp.float32)[None, :, None]
        b = run(rule, proposal, scores + shift, noise)
        np.testing.assert_array_equal(a.n_accepted, b.n_accepted)
        np.testing.assert_array_equal(a.next_token, b.next_token)


@_each(BY_Q)
def test_other_vocabulary_is_refused(run, rule):
    proposal = _proposal([[0]], np.zeros((1, 1, 4)))
    with pytest.raises(ValueError, match=r"4 entries.*5"):
        run(rule, proposal, jnp.zeros((1, 2, 5)), _uniform([[0.5]]))


def test_registry():
    assert set(verify.REGISTRY) == {
        "greedy",
        "rejection",
        "block",
        "sample_and_match",
        "coupled",
        "recursive_rejection",
        "k_seq",
        "traversal",
        "typical",
        "relaxed",
        "lenient",
    }
    for name, rule in verify.REGISTRY.items():
        assert verify.by_name(name) is rule and rule.name == name
        assert rule.noise in ("none", "uniform", "gumbel")
        assert rule.greedy_only == (name == "greedy")
        assert rule.lossless == (name not in ("typical", "relaxed", "lenient"))
        assert rule.evidence == (name in ("typical", "relaxed"))
        assert rule.judge is None and hash(rule) == hash(verify.by_name(name))
    with pytest.raises(ValueError, match=r"'block_'.*block.*coupled.*greedy.*lenient"):
        verify.by_name("block_")

"""What each rule does with one given tree, score table and noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.drafters import Proposal
from specjax.sampling import Settings, UniformNoise, warp
from specjax.testing.oracle import rule_law, target_law, total_variation
from specjax.testing.tables import constant_table, random_table
from specjax.testing.topology import SHAPES, drafts_over
from specjax.verify import Evidence

BY_Q = [verify.rejection, verify.recursive_rejection, verify.k_seq, verify.traversal]
MATCHING = [verify.sample_and_match, verify.coupled, verify.greedy]
RULES = [rule for rule in verify.REGISTRY.values() if rule.trees != "none"]

_each = functools.partial(pytest.mark.parametrize, "rule", ids=lambda rule: rule.name)
_compiled = functools.cache(jax.jit)


def _run(rule, proposal, scores, noise):
    rest = (Evidence(jax.nn.log_softmax(scores, axis=-1)),) if rule.evidence else ()
    return _compiled(rule.verify)(proposal, scores, noise, *rest)


def _log(p):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.asarray(p, np.float64)), jnp.float32)


def _proposal(tokens, parents, logprobs=None, n_valid=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    full = np.full(tokens.shape[0], tokens.shape[1])
    return Proposal(
        tokens,
        None if logprobs is None else jnp.asarray(logprobs, jnp.float32),
        jnp.asarray(full if n_valid is None else n_valid, jnp.int32),
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape),
    )


def _noise(rule, batch, n_nodes, vocab, seed=0):
    rng = np.random.default_rng(seed)
    if rule.noise == "none":
        return None
    if rule.noise == "gumbel":
        return jnp.asarray(rng.gumbel(size=(batch, n_nodes + 1, vocab)), jnp.float32)
    u = jnp.asarray(rng.random((batch, n_nodes + 1)), jnp.float32)
    return UniformNoise(u[:, 1:], u[:, 0])


def _case(rule, batch=8, n_nodes=5, vocab=4, seed=0):
    """Trees of all shapes, distinct siblings, half of them the target's choice."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(batch, n_nodes + 1, vocab)).astype(np.float32)
    logprobs = jax.nn.log_softmax(rng.normal(size=(batch, n_nodes, vocab)))
    parents = np.stack([rng.integers(-1, i, size=batch) for i in range(n_nodes)], 1)
    tokens = np.zeros((batch, n_nodes), int)
    for b in range(batch):
        for i in range(n_nodes):
            taken = {tokens[b, j] for j in range(i) if parents[b, j] == parents[b, i]}
            best = int(np.argmax(scores[b, parents[b, i] + 1]))
            left = [x for x in range(vocab) if x not in taken] or [0]
            good = best in left and rng.random() < 0.5
            tokens[b, i] = best if good else rng.choice(left)
    n_valid = rng.integers(n_nodes + 1, size=batch)
    noise = _noise(rule, batch, n_nodes, vocab, seed)
    return _proposal(tokens, parents, logprobs, n_valid), jnp.asarray(scores), noise


def _decided(verdict):
    return [
        np.asarray(x) for x in (verdict.n_accepted, verdict.next_token, verdict.path)
    ]


def _check_path(proposal, verdict):
    n, path = np.asarray(verdict.n_accepted), np.asarray(verdict.path)
    assert np.all((n >= 0) & (n <= np.asarray(proposal.n_valid)))
    for b in range(len(n)):
        kept = path[b, : n[b]]
        assert np.all(path[b, n[b] :] == -1)
        assert np.all((kept >= 0) & (kept < proposal.n_valid[b]))
        above = [-1, *kept[:-1]] if n[b] else []
        np.testing.assert_array_equal(np.asarray(proposal.parents)[b, kept], above)


@_each(RULES)
def test_what_is_kept_is_a_path(rule):
    for seed in range(4):
        proposal, scores, noise = _case(rule, seed=seed)
        verdict = _run(rule, proposal, scores, noise)
        _check_path(proposal, verdict)
        assert np.all((verdict.next_token >= 0) & (verdict.next_token < 4))
        assert verdict.info["accept_prob"].shape == proposal.tokens.shape
    point = _run(rule, proposal._replace(logprobs=None), scores, noise)
    _check_path(proposal, point)


@_each(RULES)
def test_nothing_is_promoted_by_chance(rule):
    proposal, scores, noise = _case(rule)
    rest = (Evidence(jax.nn.log_softmax(scores, axis=-1)),) if rule.evidence else ()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        verdict = jax.eval_shape(rule.verify, proposal, scores, noise, *rest)
    for x in (verdict.n_accepted, verdict.next_token, verdict.path):
        assert x is not None and x.dtype == jnp.int32
    for key, value in verdict.info.items():
        assert value.dtype == jnp.float32, key


@_each(RULES)
def test_what_lies_beyond_n_valid_changes_nothing(rule):
    proposal, scores, noise = _case(rule)
    before = _run(rule, proposal, scores, noise)
    beyond = np.arange(5)[None, :] >= np.asarray(proposal.n_valid)[:, None]
    later = np.arange(6)[None, :] > np.asarray(proposal.n_valid)[:, None]
    logprobs = jnp.asarray(proposal.logprobs)
    junk = proposal._replace(
        tokens=jnp.where(beyond, (proposal.tokens + 1) % 4, proposal.tokens),
        parents=jnp.where(beyond, np.arange(5)[None, :] - 1, proposal.parents),
        logprobs=jnp.where(later[:, :5, None], jnp.nan, logprobs),
    )
    after = _run(rule, junk, jnp.where(later[..., None], jnp.nan, scores), noise)
    for a, b in zip(_decided(before), _decided(after), strict=True):
        np.testing.assert_array_equal(a, b)
    for key, value in before.info.items():
        if key in ("accept_prob", "test_prob", "next_weights"):
            np.testing.assert_array_equal(value, after.info[key])


@_each(RULES)
def test_rows_are_independent(rule):
    proposal, scores, noise = _case(rule)
    whole = _run(rule, proposal, scores, noise)
    order = np.array([3, 0, 5, 5, 1, 2, 7, 6])
    moved = _run(rule, *jax.tree.map(lambda x: x[order], (proposal, scores, noise)))
    spoilt = _run(rule, proposal, scores.at[2].set(jnp.nan), noise)
    others = np.arange(8) != 2
    for a, b, c in zip(*map(_decided, (whole, moved, spoilt)), strict=True):
        np.testing.assert_array_equal(a[order], b)
        np.testing.assert_array_equal(a[others], c[others])
    assert 0 <= spoilt.next_token[2] < 4 and 0 <= spoilt.n_accepted[2] <= 5


@_each(RULES)
def test_no_nodes(rule):
    scores = jnp.asarray([[[0.0, 3.0, 1.0]], [[2.0, -1.0, -jnp.inf]]])
    noise = {
        "none": None,
        "uniform": UniformNoise(jnp.zeros((2, 0)), jnp.full((2,), 0.5)),
        "gumbel": jnp.zeros((2, 1, 3)),
    }[rule.noise]
    proposal = _proposal(np.zeros((2, 0)), np.zeros((2, 0)), np.zeros((2, 0, 3)))
    verdict = _run(rule, proposal, scores, noise)
    np.testing.assert_array_equal(verdict.n_accepted, [0, 0])
    np.testing.assert_array_equal(verdict.next_token, [1, 0])
    assert verdict.path.shape == (2, 0)


@_each([rule for rule in RULES if not rule.evidence])
@pytest.mark.parametrize("kind", ["drawn", "point"])
def test_temperature_zero_is_greedy(rule, kind):
    proposal, logits, noise = _case(rule, batch=64)
    proposal = proposal if kind == "drawn" else proposal._replace(logprobs=None)
    got = _run(rule, proposal, jax.jit(warp)(logits, Settings.full(64)), noise)
    expected = _run(verify.greedy, proposal, logits, None)
    for a, b in zip(_decided(got), _decided(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(np.unique(got.n_accepted)) >= {0, 1, 2, 3}


@_each(MATCHING)
def test_of_equal_siblings_the_first_is_followed(rule):
    # Nodes 1 and 2 are the token that is drawn; node 3 follows 2, node 4 follows 1.
    proposal = _proposal([[0, 2, 2, 1, 1]], [[-1, -1, -1, 2, 1]])
    scores = np.full((1, 6, 3), -9e3, np.float32)
    scores[0, 0, 2] = scores[0, 1:, 1] = 0
    noise = _noise(rule, 1, 5, 3)
    verdict = _run(rule, proposal, jnp.asarray(scores), noise)
    np.testing.assert_array_equal(verdict.path, [[1, 4, -1, -1, -1]])
    np.testing.assert_array_equal(verdict.info["accept_prob"], [[0, 1, 0, 1, 1]])
    # With node 1 alone the path through node 2 is not there.
    short = _run(rule, proposal._replace(n_valid=jnp.asarray([3])), scores, noise)
    np.testing.assert_array_equal(short.path, [[1, -1, -1, -1, -1]])


@_each([*BY_Q, verify.sample_and_match])
@pytest.mark.parametrize("drawn", [True, False])
def test_impossible_token_is_not_accepted_at_zero(rule, drawn):
    # The target allows token 0 after the pending one, which no child is; whatever
    # follows is the likeliest there is. Every uniform is exactly 0.
    target = _log([[[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]])
    draft = [[[0, 0.4, 0.6, 0], [0, 1, 0, 0], [0.1, 0.9, 0, 0]]]
    proposal = _proposal([[2, 1, 1]], [[-1, -1, 0]], _log(draft) if drawn else None)
    verdict = _run(
        rule, proposal, target, UniformNoise(jnp.zeros((1, 3)), jnp.zeros(1))
    )
    assert int(verdict.n_accepted[0]) == 0 and int(verdict.next_token[0]) == 0
    np.testing.assert_array_equal(verdict.info["accept_prob"][0, :2], [0, 0])


@_each(BY_Q)
def test_residual_of_nothing_falls_back_to_what_is_left(rule):
    # q above p everywhere, as rounding may leave it: rejected, yet no residual.
    p = np.array([0.5, 0.3, 0.2])
    logprobs = np.broadcast_to(np.log(p) + 1e-3, (1, 2, 3))
    proposal = _proposal([[0, 1]], [[-1, 0]], logprobs)
    high = UniformNoise(jnp.full((1, 2), 1 - 2.0**-24), jnp.full(1, 0.6))
    verdict = _run(rule, proposal, _log([[p, p, p]]), high)
    weights = np.asarray(verdict.info["next_weights"][0])
    np.testing.assert_allclose(weights / weights.sum(), p, atol=1e-6)
    assert int(verdict.next_token[0]) == 1


@_each([verify.recursive_rejection, verify.traversal])
def test_exhausted_draft_law(rule):
    # One token has weight: the others are drawn uniformly.
    table = constant_table((0.1, 0.2, 0.3, 0.4), (1, 0, 0, 0), depth=2)
    drafts = drafts_over(table, (-1, -1, -1), siblings="without_replacement")
    assert np.count_nonzero(drafts.probability) == 6
    law = rule_law(rule, table, (-1, -1, -1), drafts=drafts, dtype=np.float64)
    assert total_variation(law.tokens, target_law(table, 2)) < 1e-12


@_each(BY_Q)
def test_draft_equal_to_target_is_kept_whole(rule):
    table = random_table(9, vocab_size=3, depth=3)
    table = type(table)(table.target_rows, table.target_rows)
    parents = SHAPES["2 then chain"]
    drafts = drafts_over(table, parents, siblings=rule.siblings)
    law = rule_law(rule, table, parents, drafts=drafts, dtype=np.float64)
    if rule is not verify.k_seq:  # which looks at no sibling before it
        np.testing.assert_allclose(law.mean_accepted, 2, atol=1e-12)


def test_coupled_text_does_not_depend_on_the_tree():
    table = random_table(13, vocab_size=4, depth=3)
    rng = np.random.default_rng(0)
    by_depth = rng.gumbel(size=(500, 3, 4)).astype(np.float32)
    plain = []
    for noise in by_depth:
        text = []
        for d in range(3):
            text.append(int(np.argmax(np.log(table.target(text)) + noise[d])))
        plain.append(text)
    counts = []
    for parents in ((-1, 0), (-1, -1, 0, 0, 1), (-1, -1, -1, 2, 0)):
        tokens = rng.integers(4, size=(500, len(parents)))
        depths, scores = [0], [np.tile(np.log(table.target(())), (500, 1))]
        for i, parent in enumerate(parents):
            depths.append(depths[parent + 1] + 1)
            before = [] if parent < 0 else [tokens[:, parent]]
            rows = np.stack([*before, tokens[:, i]], axis=1)
            scores.append([np.log(table.target(row)) for row in rows])
        verdict = _run(
            verify.coupled,
            _proposal(tokens, parents),
            jnp.asarray(np.stack(scores, axis=1), jnp.float32),
            jnp.asarray(by_depth[:, depths]),
        )
        for b, n in enumerate(np.asarray(verdict.n_accepted)):
            kept = [int(tokens[b, j]) for j in verdict.path[b, :n]]
            assert [*kept, int(verdict.next_token[b])] == plain[b][: n + 1]
        counts.append(np.asarray(verdict.n_accepted))
    assert counts[1].mean() > counts[0].mean() > 0.2


@_each([verify.typical(), verify.relaxed(top_n=2, delta=1)])
def test_lossy_rules_keep_the_longest_path(rule):
    # Token 2 is never kept; children (2; 0), below 0 (2, 0), below 1 (1), below it (0).
    p = np.array([0.55, 0.44, 0.01])
    cases = [
        (([2, 0, 1, 0], [-1, -1, 1, 2]), [1, 2, 3, -1]),
        (([0, 1, 2, 0], [-1, -1, 0, 1]), [1, 3, -1, -1]),
        (([0, 1, 1, 0], [-1, -1, 0, 1]), [0, 2, -1, -1]),
        (([2, 2, 0, 0], [-1, -1, 0, 1]), [-1, -1, -1, -1]),
    ]
    for (tokens, parents), path in cases:
        proposal = _proposal([tokens], [parents])
        noise = UniformNoise(jnp.zeros((1, 4)), jnp.full(1, 0.6))
        verdict = _run(rule, proposal, _log([[p] * 5]), noise)
        np.testing.assert_array_equal(verdict.path[0], path)
        assert int(verdict.next_token[0]) == 1
        _check_path(proposal, verdict)


@_each([verify.block, verify.lenient(), verify.judge(lambda f, t: t * 1.0, 0.5)])
def test_rules_for_chains_refuse_trees(rule):
    proposal = _proposal([[0, 1]], [[-1, -1]])
    noise = UniformNoise(jnp.zeros((1, 2)), jnp.zeros(1))
    scores = jnp.zeros((1, 3, 3))
    rest = (Evidence(scores, jnp.zeros((1, 2))),) if rule.evidence else ()
    names = ", ".join(sorted(rule.name for rule in RULES))
    with pytest.raises(ValueError, match=f"{rule.name}.*verifies chains.*: {names}"):
        jax.eval_shape(rule.verify, proposal, scores, noise, *rest)


@_each(RULES)
def test_chains_have_no_path_and_no_loop(rule):
    proposal, scores, noise = _case(rule)
    chain = proposal._replace(parents=None)
    rest = (Evidence(scores),) if rule.evidence else ()
    assert rule.verify(chain, scores, noise, *rest).path is None
    traced = str(jax.make_jaxpr(rule.verify)(chain, scores, noise, *rest))
    assert "scan" not in traced and "while" not in traced


@_each(BY_Q)
def test_other_vocabulary_is_refused(rule):
    proposal = _proposal([[0, 1]], [[-1, -1]], np.zeros((1, 2, 4)))
    noise = UniformNoise(jnp.zeros((1, 2)), jnp.zeros(1))
    with pytest.raises(ValueError, match=r"4 entries.*5"):
        jax.eval_shape(rule.verify, proposal, jnp.zeros((1, 3, 5)), noise)

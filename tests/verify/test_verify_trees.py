"""The exact law of every rule on trees, and the numbers of one node."""

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
from specjax.testing.tables import constant_table, random_table
from specjax.testing.topology import (
    SHAPES,
    depth,
    drafts_over,
    target_scores,
    top_drafts_over,
)

BY_Q = [verify.rejection, verify.recursive_rejection, verify.k_seq, verify.traversal]
MATCHING = [verify.sample_and_match, verify.coupled, verify.greedy]
FAST = ["chain of 3", "uneven", "2 then chain"]
LARGE = ["binary", "uneven, deeper"]

A = ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
B = ((0.6, 0.25, 0.1, 0.05), (0.3, 0.3, 0.3, 0.1))
C = ((0.7, 0.3), (0.5, 0.5))


def _names(rules):
    return [rule.name for rule in rules]


def _drafts(rule, table, parents, n_most=None):
    """The proposals that a rule is exact for; of many, some with weights of their own.

    A matching rule is exact for every single proposal.
    """
    kind = "iid" if rule.siblings == "any" else rule.siblings
    drafts = drafts_over(table, parents, siblings=kind)
    if n_most is None or len(drafts.tokens) <= n_most:
        return drafts
    some = np.random.default_rng(0).choice(len(drafts.tokens), n_most, replace=False)
    tokens, n_valid = drafts.tokens[some], drafts.n_valid[some]
    weight = np.arange(1.0, n_most + 1)
    return drafts._replace(
        probability=weight / weight.sum(),
        tokens=tokens,
        logprobs=drafts.logprobs[some],
        n_valid=n_valid,
    )


@pytest.fixture
def assert_exact(record_law):
    def check(rule, table, shape, drafts, *, proposal, dtype=np.float64):
        parents = SHAPES[shape]
        law = rule_law(rule, table, parents, drafts=drafts, dtype=dtype)
        bias = total_variation(law.tokens, target_law(table, depth(parents) + 1))
        record_law(rule, proposal, law, bias, topology=shape)
        bound = 1e-12 if dtype is np.float64 else 1e-6
        assert law.dtype == dtype and law.n_impossible == 0
        assert bias < bound, (rule.name, shape, bias)
        assert abs(law.n_accepted.sum() - 1) < bound
        return law

    return check


def _table(rule, shape, *, seed=0, vocab=3, zeros=False):
    n = depth(SHAPES[shape]) + 1
    table = random_table(seed, vocab_size=vocab, depth=n, zeros=zeros)
    return table.greedy() if rule.greedy_only else table


@pytest.mark.parametrize("shape", FAST)
@pytest.mark.parametrize("rule", BY_Q, ids=_names(BY_Q))
def test_law_with_drawn_children(assert_exact, rule, shape):
    for zeros in (False, True):
        table = _table(rule, shape, zeros=zeros)
        drafts = _drafts(rule, table, SHAPES[shape])
        assert_exact(rule, table, shape, drafts, proposal=rule.siblings)


@pytest.mark.parametrize("shape", FAST[1:])
@pytest.mark.parametrize("rule", MATCHING, ids=_names(MATCHING))
def test_law_of_rules_that_match(assert_exact, rule, shape):
    for zeros in (False, True):
        table = _table(rule, shape, zeros=zeros)
        drafts = _drafts(rule, table, SHAPES[shape], n_most=25)
        assert_exact(rule, table, shape, drafts, proposal="iid")


@pytest.mark.parametrize(
    "shape", ["three children", pytest.param("uneven", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("rule", [*BY_Q, *MATCHING[:1]], ids=lambda rule: rule.name)
def test_law_with_point_masses(assert_exact, rule, shape):
    for zeros in (False, True):
        table = _table(rule, shape, zeros=zeros, vocab=4)
        drafts = top_drafts_over(table, SHAPES[shape])
        law = assert_exact(rule, table, shape, drafts, proposal="point")
        # Nobody accepts more of given distinct children than the target's mass of them,
        # and all rules accept as much.
        if shape == "three children" and not rule.greedy_only:
            mass = table.target(())[drafts.tokens[0]].sum()
            np.testing.assert_allclose(law.mean_accepted, mass, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rule", BY_Q, ids=_names(BY_Q))
def test_law_in_float32(assert_exact, rule):
    table = _table(rule, "uneven", seed=5)
    drafts = _drafts(rule, table, SHAPES["uneven"])
    assert_exact(
        rule, table, "uneven", drafts, proposal=rule.siblings, dtype=np.float32
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [*BY_Q, *MATCHING], ids=_names([*BY_Q, *MATCHING]))
def test_law_on_more_trees(assert_exact, rule, shape, vocab):
    if vocab == 4 and shape in LARGE and rule.siblings == "iid":
        vocab = 3  # 4^6 proposals
    n_most = 25 if rule in MATCHING else None
    for seed, zeros in ((1, False), (2, True)):
        table = _table(rule, shape, seed=seed, vocab=vocab, zeros=zeros)
        drafts = _drafts(rule, table, SHAPES[shape], n_most)
        assert_exact(rule, table, shape, drafts, proposal=rule.siblings)
        drafts = top_drafts_over(table, SHAPES[shape])
        assert_exact(rule, table, shape, drafts, proposal="point")


@pytest.mark.parametrize("rule", BY_Q, ids=_names(BY_Q))
def test_a_chain_given_as_a_tree_is_the_chain(rule):
    for zeros in (False, True):
        table = random_table(3, vocab_size=3, depth=4, zeros=zeros)
        as_chain = rule_law(rule, table, 3, dtype=np.float64)
        as_tree = rule_law(rule, table, (-1, 0, 1), dtype=np.float64)
        np.testing.assert_allclose(as_tree.tokens, as_chain.tokens, atol=1e-12)
        np.testing.assert_allclose(as_tree.n_accepted, as_chain.n_accepted, atol=1e-12)
    block = rule_law(verify.block, table, 3, dtype=np.float64)
    if rule is verify.traversal:
        np.testing.assert_allclose(as_tree.n_accepted, block.n_accepted, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rule", BY_Q, ids=_names(BY_Q))
def test_numbering_of_nodes_changes_nothing(rule):
    table = random_table(4, vocab_size=3, depth=3)
    means = [
        rule_law(
            rule,
            table,
            SHAPES[shape],
            drafts=_drafts(rule, table, SHAPES[shape]),
            dtype=np.float64,
        ).mean_accepted
        for shape in ("2 then chain", "2 then chain, depth first")
    ]
    np.testing.assert_allclose(means[0], means[1], atol=1e-12)


# Probability that one of k children is accepted: rejection and K-SEQ of independent
# draws, recursive rejection of draws without replacement, the sampled match of
# independent draws, and of the likeliest children; and K-SEQ's rho.
VECTORS = [
    (A, 2, (0.76, 0.791355, 0.82, 0.483, 0.5), 1.456776),
    (A, 3, (0.808, 0.858519, 1.0, 0.6161, 1.0), 1.792593),
    (B, 2, (0.79, 0.825367, 0.823810, 0.494, 0.85), 1.417891),
    (B, 3, (0.853, 0.902043, 0.938690, 0.6377, 0.95), 1.673476),
    (C, 2, (0.90, 0.931174, 1.0, 0.75, 1.0), 1.262348),
]


@pytest.mark.parametrize(("vector", "k", "expected", "rho"), VECTORS)
def test_acceptance_at_one_node(vector, k, expected, rho):
    # Tokens of no probability make one shape, and one program, of all.
    laws = np.pad(np.array(vector), ((0, 0), (0, 4 - len(vector[0]))))
    table, parents = constant_table(*laws, depth=2), (-1,) * k
    iid = drafts_over(table, parents)
    distinct = drafts_over(table, parents, siblings="without_replacement")
    top = top_drafts_over(table, parents)
    cases = [
        (verify.rejection, iid, expected[0]),
        (verify.k_seq, iid, expected[1]),
        (verify.recursive_rejection, distinct, expected[2]),
        (verify.sample_and_match, iid, expected[3]),
        (verify.rejection, top, expected[4]),
    ]
    for rule, drafts, value in cases:
        law = rule_law(rule, table, parents, drafts=drafts, dtype=np.float64)
        np.testing.assert_allclose(law.mean_accepted, value, atol=1e-6)
        assert total_variation(law.tokens, target_law(table, 2)) < 1e-12
    np.testing.assert_allclose(_rho(table, parents), rho, atol=1e-6)


def _rho(table, parents):
    """What K-SEQ discounts by at the pending token."""
    drafts, n_nodes = drafts_over(table, parents), len(parents)
    proposal = Proposal(
        tokens=drafts.tokens[:1],
        logprobs=jnp.asarray(drafts.logprobs[:1], jnp.float32),
        n_valid=drafts.n_valid[:1],
        parents=jnp.asarray([parents]),
    )
    scores = jnp.asarray(target_scores(table, drafts.tokens[:1], parents), jnp.float32)
    noise = UniformNoise(jnp.zeros((1, n_nodes)), jnp.zeros(1))
    return jax.jit(verify.k_seq.verify)(proposal, scores, noise).info["rho"][0, 0]


@pytest.mark.parametrize(
    "shape",
    [
        "2 then chain",
        "uneven",
        *(
            pytest.param(shape, marks=pytest.mark.slow)
            for shape in ("chain of 3", "binary", "uneven, deeper")
        ),
    ],
)
def test_traversal_keeps_at_least_as_many(shape):
    parents, gains, means = SHAPES[shape], [], []
    for seed in range(12):
        zeros = seed % 4 == 3
        table = random_table(seed, vocab_size=3, depth=depth(parents) + 1, zeros=zeros)
        drafts = drafts_over(table, parents, siblings="without_replacement")
        up, down = (
            rule_law(rule, table, parents, drafts=drafts, dtype=np.float64)
            for rule in (verify.traversal, verify.recursive_rejection)
        )
        gains.append(up.mean_accepted - down.mean_accepted)
        means.append((up.mean_accepted, down.mean_accepted))
    assert min(gains) > -1e-12, min(gains)
    assert np.mean(gains) > 1e-3, np.mean(means, axis=0)


# The law on real noise, with the drafts' own.


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["uneven", "2 then chain"])
@pytest.mark.parametrize(
    ("rule", "coupled_drafts"),
    [*((rule, False) for rule in (*BY_Q, *MATCHING[:2])), (verify.coupled, True)],
)
def test_law_on_real_noise(rule, coupled_drafts, shape):
    table = random_table(11, vocab_size=3, depth=depth(SHAPES[shape]) + 1)
    samples = sample_rule(
        rule,
        table,
        SHAPES[shape],
        n_samples=100_000,
        seed=1,
        coupled_drafts=coupled_drafts,
    )
    counts = count(samples, 3)
    exact = target_law(table, counts.ndim)
    assert g_test(counts, exact) > 1e-4
    for axis in range(counts.ndim):
        others = tuple(a for a in range(counts.ndim) if a != axis)
        assert g_test(counts.sum(others), exact.sum(others)) > 1e-4
    off = exact.copy()
    off[0] *= 1.1
    assert g_test(counts, off / off.sum()) < 1e-4
    if not coupled_drafts:
        drafts = _drafts(rule, table, SHAPES[shape])
        law = rule_law(rule, table, SHAPES[shape], drafts=drafts)
        spread = 4 * samples.n_accepted.std() / np.sqrt(len(samples.n_accepted))
        assert abs(samples.n_accepted.mean() - law.mean_accepted) < spread

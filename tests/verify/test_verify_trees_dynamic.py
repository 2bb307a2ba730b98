"""Which trees may take their shape from tokens, and what it costs the others."""

import numpy as np
import pytest

from specjax import verify
from specjax.testing.oracle import rule_law, target_law, total_variation
from specjax.testing.tables import Drafts, random_table
from specjax.testing.topology import SHAPES, drafts_over

BY_Q = [verify.rejection, verify.recursive_rejection, verify.k_seq, verify.traversal]
MATCHING = [verify.sample_and_match, verify.coupled, verify.greedy]

_each = lambda rules: pytest.mark.parametrize(
    "rule", rules, ids=[rule.name for rule in rules]
)


def _bias(rule, table, topology, drafts, dtype=np.float64):
    law = rule_law(rule, table, topology, drafts=drafts, dtype=dtype)
    n_tokens = law.tokens.ndim
    assert law.n_impossible == 0
    return total_variation(law.tokens, target_law(table, n_tokens))


def _any_shape(seed, n_proposals=24, n_nodes=3, vocab=3):
    """Proposals whose tokens, parents and counts have nothing to do with any law.

    Many have equal siblings.
    """
    rng = np.random.default_rng(seed)
    parents = [rng.integers(-1, i, size=n_proposals) for i in range(n_nodes)]
    weight = rng.random(n_proposals)
    return Drafts(
        probability=weight / weight.sum(),
        tokens=rng.integers(vocab, size=(n_proposals, n_nodes)).astype(np.int32),
        logprobs=None,
        n_valid=rng.integers(n_nodes + 1, size=n_proposals).astype(np.int32),
        parents=np.stack(parents, axis=1).astype(np.int32),
    )


@_each([*MATCHING, *BY_Q])
def test_point_masses_may_have_any_shape(rule):
    for zeros in (False, True):
        table = random_table(0, vocab_size=3, depth=4, zeros=zeros)
        table = table.greedy() if rule.greedy_only else table
        assert _bias(rule, table, (-1, -1, -1), _any_shape(1)) < 1e-12


def _pruned(drafts, table, least):
    """Siblings below a draft probability dropped, the others in reverse order."""
    q = table.draft(())[drafts.tokens]
    keep = q >= least
    order = np.argsort(np.where(keep, -np.arange(q.shape[1]), 1), axis=1)
    tokens = np.take_along_axis(drafts.tokens, order, axis=1)
    return drafts._replace(tokens=tokens, n_valid=keep.sum(1).astype(np.int32))


@_each(MATCHING)
def test_matching_rules_may_see_drawn_children_pruned_and_sorted(rule):
    table = random_table(1, vocab_size=4, depth=2)
    table = table.greedy() if rule.greedy_only else table
    for siblings in ("iid", "without_replacement"):
        drafts = drafts_over(table, (-1, -1), siblings=siblings)
        assert _bias(rule, table, (-1, -1), _pruned(drafts, table, 0.2)) < 1e-12


@_each(BY_Q)
def test_a_count_that_is_known_before_the_children_are_drawn(rule):
    table = random_table(2, vocab_size=3, depth=3)
    drafts = drafts_over(table, SHAPES["2 then chain"], siblings=rule.siblings)
    first, second = drafts.tokens[:, 0], drafts.tokens[:, 1]
    # Token 0 as the first child: no second one. Then as many as the two allow.
    n_valid = np.where(first == 0, 1, np.where(second == 0, 2, 3 + first % 2))
    drafts = drafts._replace(n_valid=n_valid.astype(np.int32))
    assert _bias(rule, table, SHAPES["2 then chain"], drafts) < 1e-12


def _reordered(drafts, key):
    order = np.argsort(key, axis=1, kind="stable")
    return drafts._replace(tokens=np.take_along_axis(drafts.tokens, order, axis=1))


# What is done to two of four tokens drawn without replacement, and the bias of one
# token of recursive rejection that others measured, on laws of their own.
MEDDLING = {
    "draw order": (lambda drafts, q: drafts, 0.0),
    "sorted by q": (lambda drafts, q: _reordered(drafts, -q), 0.162),
    "reversed": (
        lambda drafts, q: drafts._replace(tokens=drafts.tokens[:, ::-1].copy()),
        0.111,
    ),
    "without those below 0.2": (
        lambda drafts, q: _reordered(drafts, q < 0.2)._replace(
            n_valid=(q >= 0.2).sum(1).astype(np.int32)
        ),
        0.119,
    ),
}


@pytest.mark.parametrize("how", MEDDLING)
def test_choosing_among_drawn_children_is_biased(how, record_law):
    change, expected = MEDDLING[how]
    biases = []
    for seed in range(12):
        table = random_table(seed, vocab_size=4, depth=2)
        drafts = drafts_over(table, (-1, -1), siblings="without_replacement")
        changed = change(drafts, table.draft(())[drafts.tokens])
        law = rule_law(verify.recursive_rejection, table, (-1, -1), drafts=changed)
        biases.append(total_variation(law.tokens.sum(1), target_law(table, 1)))
    if expected:
        np.testing.assert_allclose(np.mean(biases), expected, rtol=0.5)
    else:
        assert max(biases) < 1e-6


@_each([verify.k_seq, verify.traversal, verify.rejection])
def test_other_rules_are_biased_too(rule):
    table = random_table(3, vocab_size=4, depth=2)
    drafts = drafts_over(table, (-1, -1), siblings=rule.siblings)
    assert _bias(rule, table, (-1, -1), drafts, np.float32) < 1e-6
    assert _bias(rule, table, (-1, -1), _pruned(drafts, table, 0.2), np.float32) > 1e-2


def test_siblings_of_the_other_kind_are_biased():
    table = random_table(4, vocab_size=4, depth=2)
    other = {"iid": "without_replacement", "without_replacement": "iid"}
    for rule in BY_Q:
        drafts = drafts_over(table, (-1, -1), siblings=other[rule.siblings])
        assert _bias(rule, table, (-1, -1), drafts, np.float32) > 1e-3, rule.name


# What the engine asks before it lets a rule see a drafter's trees.


@pytest.mark.parametrize("draws", ["iid", "without_replacement", None])
@pytest.mark.parametrize("dynamic", [False, True])
@_each(verify.REGISTRY.values())
def test_check_trees(rule, dynamic, draws):
    ask = lambda: verify.check_trees(rule, dynamic=dynamic, draws_siblings=draws)
    if rule.trees == "none":
        with pytest.raises(ValueError, match=r"verifies chains.*traversal"):
            ask()
    elif draws is not None and dynamic and rule.trees == "static":
        with pytest.raises(ValueError, match=r"0\.16 sorted.*0\.11 reversed"):
            ask()
    elif draws is not None and rule.siblings not in ("any", draws):
        with pytest.raises(ValueError, match="siblings drawn"):
            ask()
    else:
        ask()


def test_rules_say_which_trees_they_take():
    kinds = {
        rule.name: (rule.trees, rule.siblings) for rule in verify.REGISTRY.values()
    }
    assert kinds == {
        "greedy": ("any", "any"),
        "coupled": ("any", "any"),
        "sample_and_match": ("any", "any"),
        "typical": ("any", "any"),
        "relaxed": ("any", "any"),
        "rejection": ("static", "iid"),
        "k_seq": ("static", "iid"),
        "recursive_rejection": ("static", "without_replacement"),
        "traversal": ("static", "without_replacement"),
        "block": ("none", "any"),
        "lenient": ("none", "any"),
    }

"""Every planted mistake of a rule for trees is caught, and no right rule is."""

import numpy as np
import pytest

from specjax import verify
from specjax.testing.oracle import rule_law, target_law, total_variation
from specjax.testing.reference_trees import (
    descend_rule,
    in_turn_rule,
    k_seq_rule,
    traversal_rule,
)
from specjax.testing.tables import random_table
from specjax.testing.topology import SHAPES, drafts_over
from specjax.testing.tree_mutants import TREE_RULES, tree_fault

# What gives a mutant away.
FOUND = {
    "recursive_p": "bias",
    "recursive_unscaled": "bias",
    "recursive_q_kept": "bias",
    "recursive_q_unscaled": "bias",
    "recursive_backwards": "bias",
    "recursive_last": "bias",
    "recursive_next_p": "bias",
    "recursive_row_above": "bias",
    "recursive_exhausted": "zeros: bias",
    "recursive_not_strict": "zeros: accepts what the target excludes",
    "rejection_without": "bias",
    "rejection_p": "bias",
    "traversal_unclamped": r"outside \[0, 1\]",
    "traversal_reach_kept": "bias",
    "traversal_unscaled": "bias",
    "traversal_q_kept": "bias",
    "traversal_last": "bias",
    "traversal_next_p": "bias",
    "traversal_not_strict": "zeros: accepts what the target excludes",
    "k_seq_no_discount": "bias",
    "k_seq_residual": "bias",
    "k_seq_all_nodes": "bias",
    "k_seq_padding": "trees of unequal size: bias",
    "descend_again": "bias",
    "descend_each": "bias",
    "descend_row_above": "bias",
}
# The smallest biases and the other ways to be found; the rest takes another minute.
FAST = {"recursive_q_kept", "recursive_exhausted", "traversal_q_kept", "descend_again"}

RIGHT = [
    (in_turn_rule(), verify.recursive_rejection),
    (in_turn_rule(tried=lambda s, x: s), verify.rejection),
    (traversal_rule(), verify.traversal),
    (k_seq_rule(), verify.k_seq),
    (descend_rule(), verify.sample_and_match),
]
LOSSLESS = [
    rule for rule in verify.REGISTRY.values() if rule.lossless and rule.trees != "none"
]


def _some_slow(names, fast):
    return [
        name if name in fast else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


def test_every_mutant_is_expected():
    assert set(TREE_RULES) == set(FOUND)
    for name, mutant in TREE_RULES.items():
        assert mutant.name == name and mutant.kind == "rule" and mutant.what
        assert mutant.make() is mutant.make() and not mutant.make().lossless


@pytest.mark.parametrize("name", _some_slow(FOUND, FAST))
def test_fault_is_found(name, record_property):
    fault = tree_fault(TREE_RULES[name].make(), least=1e-3)
    record_property("mutant", [name, "enumeration on trees", fault or ""])
    with pytest.raises(AssertionError, match=FOUND[name]):
        assert not fault, fault


@pytest.mark.parametrize(
    "name", _some_slow([rule.name for rule in LOSSLESS], {"traversal"})
)
def test_right_rule_has_no_fault(name):
    assert tree_fault(verify.by_name(name)) is None


@pytest.mark.parametrize(
    ("second", "rule"),
    [
        pytest.param(*pair, marks=[] if i == 2 else [pytest.mark.slow])
        for i, pair in enumerate(RIGHT)
    ],
    ids=[rule.name for _, rule in RIGHT],
)
def test_two_implementations_have_one_law(second, rule):
    shape = SHAPES["uneven"]
    for seed in range(2):
        table = random_table(seed, vocab_size=3, depth=3, zeros=seed == 1)
        kind = "without_replacement" if "with" in rule.siblings else "iid"
        drafts = drafts_over(table, shape, siblings=kind)
        cut = drafts.n_valid - drafts.tokens[:, 0] % 2
        drafts = drafts._replace(n_valid=cut.astype(np.int32))
        one, two = (
            rule_law(r, table, shape, drafts=drafts, dtype=np.float64)
            for r in (rule, second)
        )
        assert total_variation(two.tokens, target_law(table, 3)) < 1e-12
        np.testing.assert_allclose(one.tokens, two.tokens, atol=1e-12)
        # The two find the discount of K-SEQ to different digits.
        np.testing.assert_allclose(one.n_accepted, two.n_accepted, atol=1e-6)


def test_no_rule_may_keep_what_is_no_path():
    def torn(proposal, scores, noise):
        verdict = verify.rejection.verify(proposal, scores, noise)
        return verdict._replace(path=verdict.path[:, ::-1])

    table = random_table(0, vocab_size=2, depth=3)
    with pytest.raises(ValueError, match="no path"):
        rule_law(verify.rejection._replace(verify=torn), table, (-1, -1, 0))
    bare = lambda *args: verify.rejection.verify(*args)._replace(path=None)
    with pytest.raises(ValueError, match="path"):
        rule_law(verify.rejection._replace(verify=bare), table, (-1, -1))

"""The law of sequences out of the whole loop, fifty thousand draws a case."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax import verify
from specjax.drafters import (
    BoundDrafter,
    PassCosts,
    adaptive,
    build_datastore,
    fallback,
    lookahead,
    model,
    plain,
    prompt_lookup,
    self_draft,
    successor_table,
    suffix,
    token_recycling,
    truncate,
)
from specjax.testing import planted, planted_trees
from specjax.testing.loop_checks import check_law, make_model, sampled_draft
from specjax.testing.table_target import table_model
from specjax.trees import Topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GAMMA, VOCAB, CALLS = 3, 5, 400
DRAFTS = {
    "plain": lambda: BoundDrafter(plain(), {}),
    "lookup": lambda: BoundDrafter(prompt_lookup(GAMMA, min_ngram=1, max_ngram=2), {}),
    "suffix": lambda: BoundDrafter(
        suffix(GAMMA, min_match=1), build_datastore([(0, 1, 2, 3), (2, 4, 1)], size=16)
    ),
    "sampled": sampled_draft,
    "adversarial": lambda: sampled_draft(adversarial=True),
    "constant": lambda: planted.constant(GAMMA, VOCAB, (1, 2, 0)),
    "outside": lambda: planted.outside_vocabulary(GAMMA, VOCAB),
    "silent": lambda: planted.silent(GAMMA, VOCAB, [(0, 1, 2, 0, 1, 2)]),
    "hashed": lambda: planted.hashed(GAMMA, VOCAB),
    "model": lambda: model_draft(),
    # Every self-draft is one of these: another form on the target's own cache.
    "self_draft": lambda: another_form(),
    "token_recycling": lambda: BoundDrafter(
        token_recycling(VOCAB, GAMMA), successor_table([(0, 1, 2, 3), (2, 4)], VOCAB)
    ),
    "fallback": lambda: fallback(
        prompt_lookup(GAMMA, min_ngram=1, max_ngram=2), another_form()
    ),
    "truncated": lambda: truncate(model_draft(), GAMMA - 1),
    "adaptive": lambda: adaptive(another_form(), PassCosts(0.3, (1, 1.1, 1.2, 1.5))),
    "adaptive_fallback": lambda: adaptive(
        fallback(prompt_lookup(GAMMA, min_ngram=1, max_ngram=2), model_draft()),
        PassCosts(0.3, (1, 1.1, 1.2, 1.5)),
    ),
}


def other_table():
    return table_model(1.5 * np.random.default_rng(8).normal(size=(VOCAB,) * 3))


def model_draft():
    """Another table as the draft model."""
    other = other_table()
    return BoundDrafter(model(other.target, GAMMA), other.params)


def another_form():
    """Another table on the target's own cache."""
    other = other_table()
    return BoundDrafter(self_draft(other.target, GAMMA), other.params)


RULES = ["rejection", "block", "sample_and_match", "coupled"]
SETTINGS = [(1.0, 1.0), (0.6, 0.9)]
CASES = [
    (rule, draft, *settings)
    for rule in RULES
    for draft in DRAFTS
    for settings in SETTINGS
    # What proposes nothing is one and the same for all rules.
    if rule == "rejection" or draft not in ("plain", "outside", "silent")
]


@pytest.mark.parametrize(("rule", "draft", "temperature", "top_p"), CASES)
def test_sequences_have_the_targets_law(rule, draft, temperature, top_p):
    fault = check_law(
        make_model(),
        verify.by_name(rule),
        DRAFTS[draft](),
        calls=CALLS,
        least=1e-4,
        temperature=temperature,
        top_p=top_p,
    )
    assert fault is None


TREE = Topology((-1, -1, 0, 0, 1, 2, 5))
TREES = {
    "iid": lambda: planted_trees.drawn(TREE, draft_table(), siblings="iid"),
    "without": lambda: planted_trees.drawn(
        TREE, draft_table(), siblings="without_replacement"
    ),
    # Right at random for one text of many: mostly wrong, and shaped by hash.
    "grown": lambda: planted_trees.grown(6, VOCAB, [(0, 1, 2, 0, 1, 2, 3)]),
    "recycling": lambda: BoundDrafter(token_recycling(VOCAB, TREE), None),
    "lookahead": lambda: BoundDrafter(lookahead(2, 2, 2), None),
    "model": lambda: model_tree("sample"),
    "model_apart": lambda: model_tree("without_replacement"),
    "model_best": lambda: model_tree("argmax"),
    "suffix": lambda: BoundDrafter(
        suffix(GAMMA, min_match=1, n_nodes=6),
        build_datastore([(0, 1, 2, 3), (2, 4, 1), (1, 2, 0)], size=16),
    ),
}
TREE_CASES = [
    ("iid", "rejection"),
    ("iid", "k_seq"),
    ("iid", "sample_and_match"),
    ("iid", "coupled"),
    ("without", "recursive_rejection"),
    ("without", "traversal"),
    ("grown", "sample_and_match"),
    ("grown", "rejection"),
    ("grown", "coupled"),
    ("recycling", "rejection"),
    ("suffix", "sample_and_match"),
    ("suffix", "traversal"),
    ("lookahead", "coupled"),
    ("lookahead", "sample_and_match"),
    ("model", "rejection"),
    ("model", "coupled"),
    ("model_apart", "recursive_rejection"),
    ("model_apart", "traversal"),
    ("model_best", "sample_and_match"),
]


def model_tree(draws):
    """Another table as the draft model, level by level."""
    other = other_table()
    return BoundDrafter(model(other.target, TREE, draws=draws), other.params)


def draft_table():
    return jax.nn.log_softmax(np.random.default_rng(5).normal(size=(VOCAB, VOCAB)))


@pytest.mark.parametrize(("draft", "rule"), TREE_CASES)
@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_trees_have_the_targets_law(rule, draft, temperature, top_p):
    fault = check_law(
        make_model(),
        verify.by_name(rule),
        TREES[draft](),
        calls=CALLS,
        least=1e-4,
        temperature=temperature,
        top_p=top_p,
    )
    assert fault is None


def test_children_taken_for_independent_draws_show():
    """Drawn without replacement, and verified as if they were not."""
    made = TREES["without"]()
    spec = dataclasses.replace(made.drafter.spec, draws="sample")
    wrong = BoundDrafter(made.drafter._replace(spec=spec), made.params)
    fault = check_law(make_model(), verify.rejection, wrong, calls=2 * CALLS)
    assert fault is not None and "law at" in fault


@pytest.mark.parametrize("rule", ["typical", "lenient"])
def test_a_lossy_rule_shows(rule):
    fault = check_law(make_model(), verify.by_name(rule), calls=2 * CALLS)
    assert fault is not None and "law at" in fault

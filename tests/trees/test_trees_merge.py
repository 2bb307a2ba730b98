"""Continuations merged into a trie, against dictionaries."""

from collections import defaultdict

import jax
import numpy as np
import pytest
import tree_helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.trees import check_tree, merge_continuations

R, G, N = 5, 3, 16

MERGE = tree_helpers.jitted(merge_continuations, "n")

ROWS = st.tuples(
    st.lists(st.tuples(*[st.integers(-1, 2)] * G), min_size=R, max_size=R),
    st.tuples(*[st.integers(0, G)] * R),
    st.tuples(*[st.sampled_from([1.0, 1.0, 2.0, 0.0])] * R),
)


def _trie(found, lengths, weights):
    """Weights of all prefixes, by dictionary; in the order of their appearance."""
    weight = defaultdict(float)
    for depth in range(1, G + 1):
        for tokens, length, each in zip(found, lengths, weights, strict=True):
            prefix = tokens[: min(depth, length)]
            if len(prefix) == depth and min(prefix) >= 0 and each > 0:
                weight[prefix] += each
    return weight


def _survival(weight, prefix):
    product = 1.0
    for depth in range(1, len(prefix) + 1):
        above = prefix[: depth - 1]
        total = sum(w for p, w in weight.items() if p[:-1] == above and len(p) == depth)
        product *= weight[prefix[:depth]] / total
    return product


def _rank(weight, prefix):
    rivals = [p for p in weight if p[:-1] == prefix[:-1] and len(p) == len(prefix)]
    return sorted(rivals, key=lambda p: (-weight[p], rivals.index(p))).index(prefix)


@settings(max_examples=80, deadline=None)
@given(st.lists(ROWS, min_size=2, max_size=2))
def test_all_prefixes_with_their_shares(rows):
    tokens = np.array([row[0] for row in rows])
    lengths, weights = (np.array([row[i] for row in rows]) for i in (1, 2))
    draft = MERGE(tokens, n=N, lengths=lengths, weights=weights, limit=N)
    check_tree(draft.tree, draft.tokens)
    for row, (found, length, weight) in enumerate(rows):
        trie = _trie(found, length, weight)
        paths = tree_helpers.token_paths(draft, row)
        assert paths == list(trie)
        for i, prefix in enumerate(paths):
            survival = _survival(trie, prefix)
            assert np.exp(draft.scores[row, i]) == pytest.approx(survival, rel=1e-5)
            assert draft.ranks[row, i] == _rank(trie, prefix)


def _merge(found, lengths, weights, limit=N):
    """Merges one row, in the shapes of the others: one program for all."""
    twice = lambda x: np.stack([x, x])
    draft = MERGE(
        twice(found), n=N, lengths=twice(lengths), weights=twice(weights), limit=limit
    )
    return jax.tree.map(lambda x: x[0], draft)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 5))
def test_the_likeliest_are_kept(row, n):
    draft = _merge(*row, limit=n)
    trie = _trie(*row)
    kept = tree_helpers.token_paths(draft)
    assert len(kept) == min(n, len(trie))
    survival = sorted((_survival(trie, prefix) for prefix in trie), reverse=True)
    total = sum(_survival(trie, prefix) for prefix in kept)
    assert total == pytest.approx(sum(survival[:n]), rel=1e-5)


def test_counts_make_the_first_choice():
    """As in a datastore: three of four go on with 5, two of these with 6."""
    found = [[4, 4, -1], [5, 6, -1], [5, 6, 8], [5, 7, 9], [5, 6, 8]]
    row = found, [2, 2, 2, 2, 0], [1.0] * R
    draft = _merge(*row, limit=3)
    assert tree_helpers.token_paths(draft) == [(4,), (5,), (5, 6)]
    assert draft.ranks[:3].tolist() == [1, 0, 0]
    assert np.exp(draft.scores[:3]) == pytest.approx([0.25, 0.75, 0.5])
    assert tree_helpers.token_paths(_merge(*row, limit=2)) == [(5,), (5, 6)]
    # Ties: a quarter are (4,), (4, 4) and (5, 7).
    four = tree_helpers.token_paths(_merge(*row, limit=4))
    assert four == [(4,), (5,), (4, 4), (5, 6)]


def test_weights_and_lengths_may_be_left_out():
    draft = MERGE(np.array([[4, 4, -1], [5, 6, 7]]), n=4)
    assert tree_helpers.token_paths(draft) == [(4,), (5,), (4, 4), (5, 6)]
    assert draft.tree.parents.tolist() == [-1, -1, 0, 1]


def test_nothing_found_is_no_draft():
    draft = _merge(np.full((R, G), -1), [G] * R, [1.0] * R)
    assert draft.tree.n_nodes == 0 and not np.any(draft.tokens)
    assert np.all(np.array(draft.scores) == -np.inf)

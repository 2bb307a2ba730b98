"""Shapes of proposals: what is drawn over them, and what laws come out of them."""

import numpy as np
import pytest

from specjax.testing.oracle import Outcomes, law_of, target_law, total_variation
from specjax.testing.tables import constant_table, random_table, sampled_drafts
from specjax.testing.topology import (
    chain,
    check_parents,
    depth,
    drafts_over,
    paths,
    target_scores,
)

TREES = [(-1, -1), (-1, -1, 0), (-1, 0, 0), (-1, 0, -1, 2, 2)]

A = ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
B = ((0.6, 0.25, 0.1, 0.05), (0.3, 0.3, 0.3, 0.1))
C = ((0.7, 0.3), (0.5, 0.5))


def test_paths_lead_from_the_context_to_each_position():
    assert chain(3) == (-1, 0, 1) and chain(0) == ()
    assert paths(chain(3)) == ((0,), (0, 1), (0, 1, 2))
    assert paths((-1, 0, -1, 2, 2)) == ((0,), (0, 1), (2,), (2, 3), (2, 4))
    assert [depth(p) for p in ((), (-1, -1), (-1, 0, 0, 2))] == [0, 1, 3]


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,), (-1, 2, 0)])
def test_parents_come_before_their_children(parents):
    with pytest.raises(ValueError, match="must be in"):
        check_parents(parents)


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_drafts_over_a_chain_are_the_chains(gamma):
    table = random_table(1, vocab_size=3, depth=4, zeros=True)
    got = drafts_over(table, chain(gamma))
    if gamma:
        for a, b in zip(got, sampled_drafts(table, gamma), strict=True):
            np.testing.assert_array_equal(a, b)
    else:
        assert got.logprobs is not None and got.logprobs.shape == (1, 0, 3)
        assert got.tokens.shape == (1, 0) and got.probability == 1


@pytest.mark.parametrize("parents", TREES)
def test_every_path_of_a_tree_is_drawn_as_a_chain(parents):
    table = random_table(2, vocab_size=3, depth=4, zeros=True)
    drafts = drafts_over(table, parents)
    np.testing.assert_allclose(drafts.probability.sum(), 1)
    for path in paths(parents):
        single = sampled_drafts(table, len(path))
        for tokens, probability in zip(single.tokens, single.probability, strict=True):
            here = np.all(drafts.tokens[:, list(path)] == tokens, axis=1)
            np.testing.assert_allclose(drafts.probability[here].sum(), probability)
    # Siblings are independent of each other given what they follow.
    first = drafts.tokens[:, 0]
    for i, parent in enumerate(parents):
        if i and parent == parents[0]:
            q = table.draft(())
            joint = np.zeros((3, 3))
            np.add.at(joint, (first, drafts.tokens[:, i]), drafts.probability)
            np.testing.assert_allclose(joint, np.outer(q, q))


@pytest.mark.parametrize("parents", [*TREES, chain(2)])
def test_rows_of_the_target_follow_their_path(parents):
    table = random_table(3, vocab_size=3, depth=4, zeros=True)
    drafts = drafts_over(table, parents)
    laws = np.exp(target_scores(table, drafts.tokens, parents))
    assert laws.shape == (len(drafts.tokens), len(parents) + 1, 3)
    for r, tokens in enumerate(drafts.tokens):
        np.testing.assert_allclose(laws[r, 0], table.target(()), atol=1e-15)
        for i, path in enumerate(paths(parents)):
            prefix = tuple(int(tokens[j]) for j in path)
            np.testing.assert_allclose(laws[r, i + 1], table.target(prefix), atol=1e-15)


def _walk(table, parents, drafts, *, bonus=lambda node: node + 1):
    """Sampled match down a tree: draw at each node, descend if a child is the draw."""
    vocab, n_rows = table.vocab_size, len(parents) + 1
    laws = np.exp(target_scores(table, drafts.tokens, parents))
    draft, weight, nodes, next_law = [], [], [], []
    for r, tokens in enumerate(drafts.tokens):
        for choice in np.ndindex(*(vocab,) * n_rows):
            node, w = -1, np.prod(laws[r, np.arange(n_rows), choice])
            while True:
                children = [
                    i
                    for i, parent in enumerate(parents)
                    if parent == node and tokens[i] == choice[node + 1]
                ]
                if not children:
                    break
                node = children[0]
            draft.append(r)
            weight.append(w)
            nodes.append(node)
            next_law.append(np.eye(vocab)[choice[bonus(node)]])
    return Outcomes(
        np.array(draft),
        np.array(weight),
        np.array(nodes),
        np.array(next_law),
        np.dtype(np.float64),
    )


@pytest.mark.parametrize("parents", [(-1, -1), (-1, -1, 0), (-1, 0, 0), (-1, 0, -1)])
def test_law_of_outcomes_over_a_tree(parents):
    table = random_table(4, vocab_size=3, depth=depth(parents) + 1, zeros=True)
    drafts = drafts_over(table, parents)
    law = law_of(table, parents, drafts, _walk(table, parents, drafts))
    exact = target_law(table, depth(parents) + 1)
    assert total_variation(law.tokens, exact) < 1e-12
    np.testing.assert_allclose(law.n_accepted.sum(), 1)
    # Nothing impossible was drawn where it has weight; with weight 0 it is counted.
    assert law.n_impossible > 0
    off = _walk(table, parents, drafts, bonus=lambda node: 0)
    if depth(parents) > 1:
        law = law_of(table, parents, drafts, off)
        assert total_variation(law.tokens, exact) > 1e-2


@pytest.mark.parametrize(
    ("vector", "k", "expected"),
    [(A, 2, 0.483), (A, 3, 0.6161), (B, 2, 0.494), (B, 3, 0.6377), (C, 2, 0.75)],
)
def test_sampled_match_with_several_children(vector, k, expected):
    table, parents = constant_table(*vector, depth=2), (-1,) * k
    drafts = drafts_over(table, parents)
    law = law_of(table, parents, drafts, _walk(table, parents, drafts))
    np.testing.assert_allclose(law.mean_accepted, expected, atol=1e-6)

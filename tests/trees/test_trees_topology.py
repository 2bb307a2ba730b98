"""Static trees: what is derived from the parents, builders, errors."""

import dataclasses
import doctest
import pickle

import numpy as np
import pytest
import tree_helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import trees
from specjax.testing import topology as reference
from specjax.trees import Topology, chain, from_paths, k_ary, pass_layout

TREES = st.integers(0, 9).flatmap(tree_helpers.parents_of)

# The static tree of EAGLE's first release.
EAGLE = """0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100
0000 0001 0002 00000 00001"""


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_what_is_derived_equals_plain_walks(parents):
    tree = Topology(parents)
    assert tree.n_nodes == len(parents)
    walks = [tree_helpers.path(parents, i) for i in range(len(parents))]
    assert tree.depth.tolist() == [len(walk) for walk in walks]
    assert tree.max_depth == reference.depth(parents)
    assert np.array_equal(tree.ancestors, tree_helpers.ancestors(parents))
    assert list(tree.ranks) == tree_helpers.counted_ranks(parents)
    assert not tree.has_gaps
    for row in range(len(parents) + 1):
        children = [i for i, parent in enumerate(parents) if parent == row - 1]
        assert list(tree.children[row]) == children
        assert [c for c in tree.child_table[row] if c >= 0] == children
    leaves = [walk for walk in walks if walk[-1] not in parents]
    assert tree.paths.shape == (len(leaves), tree.max_depth)
    assert [[i for i in row if i >= 0] for row in tree.paths] == leaves
    assert sorted(sum(tree.levels, ())) == list(range(len(parents)))
    for depth, level in enumerate(tree.levels, start=1):
        assert {int(tree.depth[i]) for i in level} == {depth}
    assert tree.is_chain == (parents == reference.chain(len(parents)))


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_rank_paths_make_the_tree_again(parents):
    tree = Topology(parents)
    again = from_paths(tree.rank_paths)
    assert sorted(again.rank_paths) == sorted(tree.rank_paths)
    assert again == from_paths(reversed(again.rank_paths))


def test_a_topology_is_a_key_and_its_arrays_are_safe():
    tree = Topology((-1, -1, 0))
    same = Topology(np.array([-1, -1, 0]), [0, 1, 0])
    assert tree == same and hash(tree) == hash(same)
    assert tree != Topology((-1, -1, 1))
    assert tree.ancestors is tree.ancestors
    assert pickle.loads(pickle.dumps(tree)) == tree
    with pytest.raises(ValueError, match="read-only"):
        tree.ancestors[0, 1] = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parents = ()


def test_arrays_of_a_topology():
    tree = k_ary(2, 2)
    arrays = tree.arrays((3,))
    assert arrays.parents.shape == (3, 6) and arrays.n_nodes.tolist() == [6] * 3
    for mine, static in zip(pass_layout(arrays), pass_layout(tree), strict=True):
        assert np.array_equal(mine, np.broadcast_to(static, mine.shape))


def test_chain():
    tree = chain(4)
    assert tree.parents == (-1, 0, 1, 2) and tree.is_chain
    mask, offsets = pass_layout(tree)
    assert np.array_equal(mask, np.tril(np.ones((5, 5), bool)))
    assert offsets.tolist() == [0, 1, 2, 3, 4]
    assert chain(0).n_nodes == 0 and chain(0).is_chain
    assert pass_layout(chain(0)).mask.tolist() == [[True]]


def test_k_ary():
    tree = k_ary((3, 1, 2))
    assert [len(level) for level in tree.levels] == [3, 3, 6]
    assert [len(children) for children in tree.children] == [3] + [1] * 3 + [2] * 3 + (
        [0] * 6
    )
    assert k_ary(2, 3) == k_ary((2, 2, 2), 3) and k_ary(2, 3).n_nodes == 14
    assert k_ary(1, 5) == chain(5) and k_ary(7, 0) == chain(0)


def test_paths_as_published_lists_give_them():
    tree = from_paths([[int(rank) for rank in path] for path in EAGLE.split()])
    assert tree.n_nodes == 25 and tree.max_depth == 5
    assert [len(level) for level in tree.levels] == [4, 8, 8, 3, 2]
    assert tree.rank_paths[:5] == ((0,), (1,), (2,), (3,), (0, 0))
    assert not tree.has_gaps


def test_ranks_may_be_left_out():
    tree = from_paths([(2,), (0,), (2, 1)])
    assert tree.parents == (-1, -1, 1) and tree.ranks == (0, 2, 1)
    assert tree.has_gaps and tree.rank_paths == ((0,), (2,), (2, 1))
    assert tree != Topology(tree.parents)


@settings(max_examples=40, deadline=None)
@given(TREES)
def test_a_pass_over_a_static_tree(parents):
    mask, offsets = pass_layout(Topology(parents))
    shifted = [-1, *(parent + 1 for parent in parents)]
    assert np.array_equal(mask, tree_helpers.ancestors(shifted))
    assert offsets.tolist() == (mask.sum(1) - 1).tolist()


ERRORS = [
    (lambda: Topology((-1, 5)), r"parents\[1\]=5 is not among the 2 nodes"),
    (lambda: Topology((-1, -2)), r"parents\[1\]=-2 must be a whole number >= -1"),
    (lambda: Topology((-1, 0.5)), r"parents\[1\]=0.5 must be a whole number"),
    (lambda: Topology((-1, True)), r"parents\[1\]=True must be a whole number"),
    (lambda: Topology(3), "parents=3 must be a sequence"),
    (lambda: Topology((0,)), "has the cycle 0 -> 0; .* must lead back to -1"),
    (lambda: Topology((-1, 2, 3, 1)), "has the cycle 1 -> 2 -> 3 -> 1"),
    (lambda: Topology((2, 0, -1)), r"parents\[0\]=2 comes after its child; number"),
    (lambda: Topology((-1, -1), (0,)), "1 ranks for 2 nodes; give one a node"),
    (lambda: Topology((-1, -1), (1, 1)), r"ranks\[1\]=1 is a duplicate.*distinct"),
    (lambda: Topology((-1, -1), (1, 0)), r"ranks\[1\]=0 comes after its sibling"),
    (lambda: Topology((-1, -1), (-1, 0)), r"ranks\[0\]=-1 must be .* >= 0"),
    (lambda: chain(-1), "n_nodes=-1 must be a whole number >= 0. It counts draft"),
    (lambda: k_ary(2), "branching=2 needs a depth"),
    (lambda: k_ary(0, 2), "branching=0 must be a whole number >= 1"),
    (lambda: k_ary(2, -1), "depth=-1 must be a whole number >= 0"),
    (lambda: k_ary((2, 0)), r"branching\[1\]=0 must be a whole number >= 1"),
    (lambda: k_ary((2, 2), 3), r"depth=3 but branching=\(2, 2\) has 2 levels; leave"),
    (lambda: k_ary(10, 9), "more than 16384 nodes; lower the depth"),
    (lambda: from_paths([(0,), ()]), "the empty path is the pending token"),
    (lambda: from_paths([(0,), (1,), (0,)]), r"path=\(0,\) is there twice"),
    (
        lambda: from_paths([(0,), (0, 1, 2)]),
        r"path=\(0, 1, 2\) has no parent: \(0, 1\) is missing; add it",
    ),
    (lambda: from_paths([(0,), (-1,)]), r"path\[0\]=-1 must be .* >= 0"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS)
def test_errors_name_the_value_and_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_examples_run():
    for module in (trees, trees._topology, trees._build):
        assert doctest.testmod(module).failed == 0

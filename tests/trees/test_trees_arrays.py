"""Trees on the device: masks by pointer jumping, padding, batches, checks."""

import jax.numpy as jnp
import numpy as np
import pytest
import tree_helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.trees import (
    TreeArrays,
    ancestors_mask,
    chain,
    check_tree,
    k_ary,
    pass_layout,
    tree_arrays,
)
from specjax.trees._arrays import n_rounds

N = 9
ROWS = st.lists(
    st.tuples(tree_helpers.parents_of(N), st.integers(0, N)), min_size=4, max_size=4
)

MASK = tree_helpers.jitted(ancestors_mask, "max_depth")
LAYOUT = tree_helpers.jitted(
    lambda parents, n: (tree_arrays(parents, n), pass_layout(tree_arrays(parents, n)))
)


def _naive(parents, n_nodes):
    """Mask of a row with padding: it sees itself alone."""
    return tree_helpers.ancestors([*parents[:n_nodes], *[-1] * (N - n_nodes)])


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_masks_of_a_batch_with_padding(rows):
    parents, n_nodes = (
        np.array(column, np.int32) for column in zip(*rows, strict=True)
    )
    expected = np.stack([_naive(*row) for row in rows])
    assert np.array_equal(MASK(parents, n_nodes), expected)
    full = np.stack([tree_helpers.ancestors(row[0]) for row in rows])
    assert np.array_equal(MASK(parents), full)

    tree, (mask, offsets) = LAYOUT(parents, n_nodes)
    check_tree(tree)
    for row, (_, n) in enumerate(rows):
        assert np.array_equal(mask[row, 1:, 1:], expected[row])
        assert mask[row, 0].tolist() == [True] + [False] * N
        assert mask[row, :, 0].tolist() == [True] * (n + 1) + [False] * (N - n)
        depth = expected[row, :n].sum(1).tolist()
        assert offsets[row].tolist() == [0, *depth, *[0] * (N - n)]


def test_any_leading_axes_and_none():
    tree = k_ary(2, 2)
    parents = jnp.array(tree.parents)
    assert np.array_equal(MASK(parents), tree.ancestors)
    many = MASK(jnp.broadcast_to(parents, (2, 3, 6)))
    assert many.shape == (2, 3, 6, 6) and np.array_equal(many[1, 2], tree.ancestors)
    assert tree_arrays(parents).n_nodes == 6
    assert tree_arrays(parents, jnp.array(4)).valid.tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8, 9])
def test_rounds_are_as_many_as_needed(depth):
    """With one round fewer the far ancestors of a chain are missed."""
    parents, expected = jnp.array(chain(depth).parents), chain(depth).ancestors
    assert np.array_equal(MASK(parents, max_depth=depth), expected)
    assert 2 ** n_rounds(depth) >= depth
    if depth > 1:
        fewer = 2 ** (n_rounds(depth) - 1)
        assert not np.array_equal(MASK(parents, max_depth=fewer), expected)


def test_naive_masks_differ_where_a_parent_does():
    """The comparison above can fail."""
    tree = k_ary(2, 2)
    moved = jnp.array(tree.parents).at[4].set(0)
    assert not np.array_equal(MASK(moved), tree.ancestors)


def _broken(**changes):
    tree = tree_arrays(jnp.array([[-1, 0, 0], [-1, -1, 1]]), jnp.array([3, 2]))
    return tree._replace(**{k: jnp.array(v) for k, v in changes.items()})


CHECKS = [
    (dict(n_nodes=[3, 4]), r"n_nodes=4 of row \(1,\) must be in \[0, 3\]"),
    (dict(n_nodes=[3]), "do not belong together; make trees with tree_arrays"),
    (
        dict(parents=[[-1, 0, 0], [-1, 1, -1]]),
        r"parents\[1\]=1 of row \(1,\) must be in \[-1, 1\); order nodes",
    ),
    (
        dict(parents=[[-1, 0, 0], [-1, -1, 1]]),
        r"node 2 of row \(1,\) is padding \(2 nodes count\) but has parent=1",
    ),
    (
        dict(depth=[[1, 2, 1], [1, 1, 0]]),
        r"depth\[2\]=1 of row \(0,\) must be 2, its parent's plus one",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CHECKS)
def test_checks_name_the_node(changes, message):
    check_tree(_broken())
    with pytest.raises(ValueError, match=message):
        check_tree(_broken(**changes))


def test_siblings_that_propose_one_token():
    tree = tree_arrays(jnp.array([-1, 0, 0]))
    assert isinstance(tree, TreeArrays)
    check_tree(tree, jnp.array([7, 7, 8]))
    message = "nodes 1 and 2 both propose token 7 after node 0; merge them"
    with pytest.raises(ValueError, match=message):
        check_tree(tree, jnp.array([5, 7, 7]))

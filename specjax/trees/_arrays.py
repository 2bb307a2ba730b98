"""Draft trees as arrays on the device, with any leading batch axes.

Shapes are fixed by the node budget N; how many of a row's nodes count is data. Nodes
that count come first, parents before children. What is beyond them is padding: it
attends itself alone and nothing attends it.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.typing import Array, Bool, Int

#: Parent of the children of the root, which is the pending token and no node.
ROOT = -1


class TreeArrays(NamedTuple):
    """Draft trees, one a row.

    Attributes:
      parents: node that each node follows, ``ROOT`` (-1) where that is the pending
        token, and for padding. int32 [*B, N], below the node's own number.
      depth: edges from the pending token, 1 for its children; 0 for padding. int32
        [*B, N]
      n_nodes: nodes of each row that count, the first ones. int32 [*B] in [0, N]
    """

    parents: Int[Array, "*B N"]
    depth: Int[Array, "*B N"]
    n_nodes: Int[Array, "*B"]

    @property
    def valid(self) -> Bool[Array, "*B N"]:
        """Whether a node counts."""
        return _valid(self.parents.shape[-1], self.n_nodes)


def tree_arrays(
    parents: Int[Array, "*B N"], n_nodes: Int[Array, "*B"] | None = None
) -> TreeArrays:
    """Makes trees from parents.

    Args:
      parents: below each node's own number; -1 follows the pending token. [*B, N]
      n_nodes: nodes that count, the first ones, [*B]; None is all.

    Returns:
      The trees, with what is beyond ``n_nodes`` made padding.
    """
    parents = jnp.asarray(parents, jnp.int32)
    if n_nodes is None:
        n_nodes = jnp.full(parents.shape[:-1], parents.shape[-1], jnp.int32)
    valid = _valid(parents.shape[-1], n_nodes)
    parents = jnp.where(valid, parents, ROOT)
    depth, _ = along_paths(parents)
    return TreeArrays(parents, jnp.where(valid, depth, 0), n_nodes)


def ancestors_mask(
    parents: Int[Array, "*B N"],
    n_nodes: Int[Array, "*B"] | None = None,
    *,
    max_depth: int | None = None,
) -> Bool[Array, "*B N N"]:
    """Marks what each node attends among the nodes: itself and those above it.

    By pointer jumping: after k rounds a node knows its 2^k nearest, itself included,
    and points 2^k edges up; ceil(log2(max_depth)) rounds of gathers.

    Args:
      parents: below each node's own number; -1 follows the pending token. [*B, N]
      n_nodes: nodes that count, the first ones, [*B]; None is all.
      max_depth: no node is deeper; saves rounds. None is N. Ancestors farther away
        may be missed.

    Returns:
      bool [*B, N, N], True where node i may see node j. Padding sees itself alone.
    """
    size = parents.shape[-1]
    if n_nodes is not None:
        parents = jnp.where(_valid(size, n_nodes), parents, ROOT)
    mask = jnp.broadcast_to(jnp.eye(size, dtype=bool), (*parents.shape, size))
    pointer = parents
    for _ in range(n_rounds(size if max_depth is None else max_depth)):
        above = jnp.maximum(pointer, 0)
        theirs = jnp.take_along_axis(mask, above[..., None], axis=-2)
        mask |= theirs & (pointer >= 0)[..., None]
        pointer = jump(pointer)
    return mask


def along_paths(
    parents: Int[Array, "*B N"],
    scores: Array | None = None,
    *,
    max_depth: int | None = None,
) -> tuple[Int[Array, "*B N"], Array | None]:
    """Walks from every node to the root, by pointer jumping.

    Args:
      parents: as for ``ancestors_mask``.
      scores: of each node, [*B, N], or None.
      max_depth: as for ``ancestors_mask``.

    Returns:
      Each node's depth (1 for children of the root), [*B, N] int32, and the least
      score on its path, itself included, [*B, N], None where no scores are given.
    """
    size = parents.shape[-1]
    depth = jnp.ones(parents.shape, jnp.int32)
    pointer = parents
    for _ in range(n_rounds(size if max_depth is None else max_depth)):
        inner, above = pointer >= 0, jnp.maximum(pointer, 0)
        depth += jnp.where(inner, jnp.take_along_axis(depth, above, axis=-1), 0)
        if scores is not None:
            theirs = jnp.take_along_axis(scores, above, axis=-1)
            scores = jnp.where(inner, jnp.minimum(scores, theirs), scores)
        pointer = jump(pointer)
    return depth, scores


def jump(pointer: Int[Array, "*B N"]) -> Int[Array, "*B N"]:
    """Makes every pointer reach twice as far up; beyond the root it stays -1."""
    theirs = jnp.take_along_axis(pointer, jnp.maximum(pointer, 0), axis=-1)
    return jnp.where(pointer >= 0, theirs, ROOT)


def n_rounds(max_depth: int) -> int:
    """Rounds of pointer jumping that reach ``max_depth`` nodes, oneself included."""
    return max(max_depth - 1, 0).bit_length()


def check_tree(tree: TreeArrays, tokens: Array | None = None) -> None:
    """Checks trees whose values are at hand; for tests and debugging, not under jit.

    Args:
      tree: the trees.
      tokens: of the nodes, [*B, N]; with them siblings must be distinct, as rules
        need that walk over a node's children.

    Raises:
      ValueError: shapes differ, a count is out of range, a parent is not an earlier
        node, a depth is not its parent's plus one, padding is not marked as such, or
        siblings propose one token twice.
    """
    parents, depth, counts = (np.asarray(x) for x in tree)
    size = parents.shape[-1]
    if depth.shape != parents.shape or counts.shape != parents.shape[:-1]:
        raise ValueError(
            f"shapes parents {parents.shape}, depth {depth.shape}, n_nodes "
            f"{counts.shape} do not belong together; make trees with tree_arrays."
        )
    for row in np.ndindex(counts.shape):
        count = int(counts[row])
        where = f" of row {row}" if row else ""
        if not 0 <= count <= size:
            raise ValueError(f"n_nodes={count}{where} must be in [0, {size}].")
        for i in range(size):
            _check_node(parents[row], depth[row], count, i, where)
        if tokens is not None:
            _check_siblings(parents[row][:count], np.asarray(tokens)[row], where)


def _check_node(
    parents: np.ndarray, depth: np.ndarray, count: int, i: int, where: str
) -> None:
    parent = int(parents[i])
    if i >= count:
        if parent != ROOT or depth[i]:
            raise ValueError(
                f"node {i}{where} is padding ({count} nodes count) but has "
                f"{parent=}, depth={depth[i]}; make trees with tree_arrays."
            )
        return
    if not ROOT <= parent < i:
        raise ValueError(
            f"parents[{i}]={parent}{where} must be in [-1, {i}); order nodes so that "
            "parents come first."
        )
    expected = 1 if parent == ROOT else depth[parent] + 1
    if depth[i] != expected:
        raise ValueError(
            f"depth[{i}]={depth[i]}{where} must be {expected}, its parent's plus one; "
            "make trees with tree_arrays."
        )


def _check_siblings(parents: np.ndarray, tokens: np.ndarray, where: str) -> None:
    seen: dict[tuple[int, int], int] = {}
    for i, parent in enumerate(parents):
        key = int(parent), int(tokens[i])
        if key in seen:
            raise ValueError(
                f"nodes {seen[key]} and {i}{where} both propose token {key[1]} after "
                f"node {key[0]}; merge them, as merge_continuations does."
            )
        seen[key] = i


def _valid(size: int, n_nodes: Int[Array, "*B"]) -> Bool[Array, "*B N"]:
    return jnp.arange(size) < jnp.asarray(n_nodes)[..., None]

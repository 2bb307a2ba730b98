"""Shapes of draft trees that are known before drafting."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from specjax.trees._arrays import TreeArrays
from specjax.trees._check import whole_tuple


@dataclasses.dataclass(frozen=True)
class Topology:
    """A static draft tree: which node follows which.

    A pass has one row more than the tree has nodes: row 0 is the pending token, the
    root, which is no node; row i + 1 is node i. Nodes are numbered so that parents
    come before children and siblings stand in draft order (rank 0 first). Equal
    topologies are equal as keys of a compiled program; derived arrays are NumPy,
    computed once, and read-only.

    Attributes:
      parents: the node that each node follows, -1 where it follows the pending token.
        [N]
      ranks: which of its parent's children a node is, counting from 0 in draft order:
        the rank among a deterministic top-k, or the place in the order of draws. By
        default siblings are counted; otherwise ranks may be left out (see
        ``has_gaps``). [N]

    Raises:
      ValueError: a parent is not an earlier node, or siblings are not in the order of
        distinct ranks.

    Example:
      Two children of the pending token, the first with a child of its own::

        >>> tree = Topology((-1, -1, 0))
        >>> tree.depth.tolist(), tree.paths.tolist()
        ([1, 1, 2], [[1, -1], [0, 2]])
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self):
        parents = whole_tuple("parents", self.parents, least=-1)
        _check_parents(parents)
        if len(self.ranks):
            ranks = whole_tuple("ranks", self.ranks, least=0)
            _check_ranks(parents, ranks)
        else:
            ranks = _counted_ranks(parents)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "ranks", ranks)

    @property
    def n_nodes(self) -> int:
        """Draft tokens of the tree, N; the pending token is none of them."""
        return len(self.parents)

    @functools.cached_property
    def rank_paths(self) -> tuple[tuple[int, ...], ...]:
        """Ranks from the root down to each node, as ``from_paths`` takes them."""
        found: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), rank))
        return tuple(found)

    @functools.cached_property
    def depth(self) -> NDArray[np.int32]:
        """Edges from the pending token to each node, at least 1; int32 [N]."""
        return _frozen(np.array([len(path) for path in self.rank_paths], np.int32))

    @functools.cached_property
    def max_depth(self) -> int:
        """Most draft tokens that a pass can accept; 0 for the empty tree."""
        return int(self.depth.max(initial=0))

    @functools.cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """Whether node i attends node j: j is i or above it; bool [N, N]."""
        mask = np.eye(self.n_nodes, dtype=bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                mask[i] |= mask[parent]
        return _frozen(mask)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each row of a pass in draft order: entry 0 of the pending token.

        Entry i + 1 are the children of node i; N + 1 entries.
        """
        found: list[list[int]] = [[] for _ in range(self.n_nodes + 1)]
        for i, parent in enumerate(self.parents):
            found[parent + 1].append(i)
        return tuple(map(tuple, found))

    @functools.cached_property
    def child_table(self) -> NDArray[np.int32]:
        """``children`` as an array, int32 [N + 1, W], padded with -1."""
        return _frozen(_table(self.children))

    @functools.cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each depth 1..max_depth, as a drafter makes them."""
        found: list[list[int]] = [[] for _ in range(self.max_depth)]
        for i, depth in enumerate(self.depth):
            found[depth - 1].append(i)
        return tuple(map(tuple, found))

    @functools.cached_property
    def paths(self) -> NDArray[np.int32]:
        """Nodes from the root down to each leaf, int32 [P, max_depth], -1 after it.

        Leaves are in the order of their numbers.
        """
        found: list[tuple[int, ...]] = []
        for i, parent in enumerate(self.parents):
            found.append((*(found[parent] if parent >= 0 else ()), i))
        leaves = [path for path in found if not self.children[path[-1] + 1]]
        return _frozen(_table(leaves))

    @functools.cached_property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == tuple(range(-1, self.n_nodes - 1))

    @functools.cached_property
    def has_gaps(self) -> bool:
        """Whether a node is left out whose sibling of a later rank is not."""
        return self.ranks != _counted_ranks(self.parents)

    def arrays(self, batch: tuple[int, ...] = ()) -> TreeArrays:
        """Gives the tree as arrays for what takes dynamic trees.

        Args:
          batch: leading axes to repeat it along.

        Returns:
          The same tree in every row, all of its nodes valid.
        """
        shape = (*batch, self.n_nodes)
        parents = np.asarray(self.parents, np.int32)
        return TreeArrays(
            parents=jnp.broadcast_to(jnp.asarray(parents), shape),
            depth=jnp.broadcast_to(jnp.asarray(self.depth), shape),
            n_nodes=jnp.full(batch, self.n_nodes, jnp.int32),
        )


def _check_parents(parents: tuple[int, ...]) -> None:
    n_nodes = len(parents)
    for i, parent in enumerate(parents):
        if parent >= n_nodes:
            raise ValueError(
                f"parents[{i}]={parent} is not among the {n_nodes} nodes; give the "
                "number of an earlier node, or -1 for a child of the pending token."
            )
    for i, parent in enumerate(parents):
        if parent >= i:
            _refuse_order(parents, i)


def _refuse_order(parents: tuple[int, ...], start: int) -> None:
    """Raises for a node whose parent does not come before it."""
    walk = [start]
    while walk[-1] >= 0 and len(set(walk)) == len(walk):
        walk.append(parents[walk[-1]])
    if walk[-1] >= 0:
        cycle = walk[walk.index(walk[-1]) :]
        raise ValueError(
            f"parents={parents} has the cycle {' -> '.join(map(str, cycle))}; every "
            "node must lead back to -1, the pending token."
        )
    raise ValueError(
        f"parents[{start}]={parents[start]} comes after its child; number the nodes so "
        "that parents come first, or let from_paths number them."
    )


def _check_ranks(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    if len(ranks) != len(parents):
        raise ValueError(
            f"{len(ranks)} ranks for {len(parents)} nodes; give one a node, or none to "
            "have siblings counted."
        )
    last: dict[int, int] = {}
    for i, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
        before = last.get(parent, -1)
        if rank == before:
            raise ValueError(
                f"ranks[{i}]={rank} is a duplicate: another child of {parent} has it; "
                "siblings need distinct ranks."
            )
        if rank < before:
            raise ValueError(
                f"ranks[{i}]={rank} comes after its sibling of rank {before}; list "
                "siblings in draft order, or let from_paths do it."
            )
        last[parent] = rank


def _counted_ranks(parents: tuple[int, ...]) -> tuple[int, ...]:
    n_seen: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(n_seen.get(parent, 0))
        n_seen[parent] = ranks[-1] + 1
    return tuple(ranks)


def _table(rows) -> NDArray[np.int32]:
    """Gives rows of different lengths as an array, padded with -1."""
    width = max(map(len, rows), default=0)
    table = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _frozen[T: NDArray](array: T) -> T:
    """Makes an array read-only: all holders of a topology share it."""
    array.flags.writeable = False
    return array

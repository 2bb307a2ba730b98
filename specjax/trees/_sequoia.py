"""Static trees of the most expected tokens, by dynamic programme or best first.

Positional acceptance: of a node's children, in draft order, the one of rank r is the
accepted one with probability p_r, wherever the node stands. A node is then reached
with the product of p over the ranks on its path, f(v), and a pass commits

    F = 1 + sum over nodes of f(v)

tokens, the pending token's successor included. All in float64 NumPy on the host.

Reference: Chen et al., Sequoia, 2024, arXiv:2402.12374, tree construction. Its trees
count the root; ``n_nodes`` here does not.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specjax.trees._build import from_paths
from specjax.trees._check import FloatArray, chances, whole
from specjax.trees._topology import Topology

_SIZE = "It counts draft tokens; the pending token is none."
_DEPTH = "It counts edges below the pending token; None is no limit."

# Values of F this close are equal: sums of one set are rounded by their order.
_SAME = 1e-12


class _Level(NamedTuple):
    """Best trees by rows, for one limit of depth; index m is m rows, the root one.

    Attributes:
      value: F of the best tree of m rows, -inf where none fits. [n + 1]
      cost: the lower of equals: depths of all nodes, then ranks. int64 [n + 1]
      n_children: children of its root. [n + 1]
      split: with b children, rows without the last child's subtree. [K + 1, n + 1]
    """

    value: FloatArray
    cost: NDArray[np.int64]
    n_children: NDArray[np.intp]
    split: NDArray[np.intp]


def expected_tokens(topology: Topology, acceptance_by_rank: ArrayLike) -> float:
    """Computes the tokens that a pass over a tree commits on average.

    F = 1 + the sum over nodes of the product of p over the ranks on the way there.

    Args:
      topology: the tree.
      acceptance_by_rank: p_r, the probability that the child of rank r is the accepted
        one of a node's children, in draft order; [K], of sum at most 1.

    Returns:
      Tokens a pass in [1, max_depth + 1], correction or bonus token included.

    Raises:
      ValueError: the numbers are no such probabilities, or fewer than the tree has
        ranks.

    References:
      Sequoia, arXiv:2402.12374, the objective F of its tree construction.
    """
    accept = chances(acceptance_by_rank)
    widest = max(topology.ranks, default=-1)
    if widest >= accept.size:
        raise ValueError(
            f"the tree has a child of rank {widest} but acceptance_by_rank has "
            f"{accept.size} entries; measure with as many children, or append zeros."
        )
    reach: list[float] = []
    for parent, rank in zip(topology.parents, topology.ranks, strict=True):
        reach.append((reach[parent] if parent >= 0 else 1.0) * accept[rank])
    return float(1 + np.sum(reach))


def sequoia(
    acceptance_by_rank: ArrayLike, n_nodes: int, max_depth: int | None = None
) -> Topology:
    """Finds a tree of the most expected tokens by dynamic programming.

    With T(m, l, b) the best F of m rows, the root one of them, at most l edges deep,
    its root having b children, and T(m, l) the best of any b,

        T(1, l, 0) = 1
        T(m, l, b) = max over y of T(y, l, b - 1) + p_(b-1) T(m - y, l - 1)

    and back-pointers give the tree. Any acceptances do, also ones that grow with the
    rank, of which ``best_first`` can make nothing. O(n^2 K) for each level, until
    deeper trees gain nothing.

    Args:
      acceptance_by_rank: p, as for ``expected_tokens``; no node gets more than K
        children.
      n_nodes: nodes of the tree, at least 0; all are used, also where p is 0.
      max_depth: of any node, or None.

    Returns:
      The tree; of equals within 1e-12 the one of least sum of depths, then of ranks,
      as ``best_first`` has it. (Below a child of p = 0 any shape is equal.)

    Raises:
      ValueError: an argument is out of range, or no tree of so many nodes fits.

    References:
      Sequoia, arXiv:2402.12374, tree construction.
    """
    accept, n_nodes, max_depth = _arguments(acceptance_by_rank, n_nodes, max_depth)
    levels = solve(accept, n_nodes + 1, max_depth)
    return unfold(levels, len(levels) - 1, n_nodes + 1)


def best_first(
    acceptance_by_rank: ArrayLike, n_nodes: int, max_depth: int | None = None
) -> Topology:
    """Finds the tree of the most expected tokens by taking the likeliest nodes.

    Where p never grows with the rank, no node is likelier than its parent or than its
    earlier siblings, so the n likeliest nodes of the whole tree, down to
    ``max_depth``, form a tree, and no tree has a larger sum. A heap finds them in
    O(n log n).

    Args:
      acceptance_by_rank: p, as for ``expected_tokens``, never growing.
      n_nodes: nodes of the tree, at least 0.
      max_depth: of any node, or None.

    Returns:
      The tree; of nodes equally likely to 12 digits the shallower, then the one of
      lower rank, then the one whose path has the lower ranks first.

    Raises:
      ValueError: an argument is out of range, the acceptances grow, or no tree of so
        many nodes fits.

    References:
      The greedy form of Sequoia's objective, arXiv:2402.12374; as in Medusa's choice
      of a sparse tree, arXiv:2401.10774, section 2.3.3.
    """
    accept, n_nodes, max_depth = _arguments(acceptance_by_rank, n_nodes, max_depth)
    if np.any(np.diff(accept) > 0):
        at = int(np.argmax(np.diff(accept) > 0))
        raise ValueError(
            f"acceptance_by_rank grows from {accept[at]:g} to {accept[at + 1]:g} at "
            f"rank {at + 1}; use sequoia, which does without an order."
        )
    taken: list[tuple[int, ...]] = []
    heap = [_entry(accept, (0,))]
    while len(taken) < n_nodes:
        path = heapq.heappop(heap)[-1]
        taken.append(path)
        if len(path) < max_depth:
            heapq.heappush(heap, _entry(accept, (*path, 0)))
        if path[-1] + 1 < accept.size:
            heapq.heappush(heap, _entry(accept, (*path[:-1], path[-1] + 1)))
    return from_paths(taken)


def solve(accept: FloatArray, n_rows: int, max_depth: int) -> list[_Level]:
    """Runs the dynamic programme.

    Args:
      accept: p, [K].
      n_rows: rows of the largest tree, the root one.
      max_depth: levels.

    Returns:
      Entry l for trees at most l edges deep; fewer than ``max_depth + 1`` entries
      where the last one is the best of any depth.
    """
    n_ranks = min(accept.size, n_rows - 1)
    value = np.full(n_rows + 1, -np.inf)
    value[1] = 1
    levels = [
        _Level(
            value,
            np.zeros(n_rows + 1, np.int64),
            np.zeros(n_rows + 1, np.intp),
            np.zeros((n_ranks + 1, n_rows + 1), np.intp),
        )
    ]
    while len(levels) <= max_depth:
        levels.append(_deeper(accept[:n_ranks], levels[-1]))
        same = zip(levels[-1][:2], levels[-2][:2], strict=True)
        if all(np.array_equal(new, old) for new, old in same):
            break
    return levels


def unfold(levels: list[_Level], level: int, n_rows: int) -> Topology:
    """Follows the back-pointers from a tree of a level to its nodes."""
    paths: list[tuple[int, ...]] = []
    todo: list[tuple[tuple[int, ...], int, int]] = [((), level, n_rows)]
    while todo:
        path, level, rows = todo.pop()
        for child, below in _children(levels[level], rows):
            paths.append((*path, child))
            todo.append(((*path, child), level - 1, below))
    return from_paths(paths)


def _children(level: _Level, rows: int) -> Iterator[tuple[int, int]]:
    """Yields each child of a root: its rank and the rows of its subtree."""
    for b in range(int(level.n_children[rows]), 0, -1):
        kept = int(level.split[b, rows])
        yield b - 1, rows - kept
        rows = kept


def _deeper(accept: FloatArray, below: _Level) -> _Level:
    """Makes the best trees that are one edge deeper than those below."""
    size = below.value.size
    rows, kept = np.ogrid[:size, :size]
    n_below = np.maximum(rows - kept, 0)
    fits = (n_below > 0) & np.isfinite(below.value[n_below])
    # What hanging a subtree one edge lower adds; a deeper node outweighs all ranks.
    deeper = below.cost[n_below] + n_below * (size * (accept.size + 1))
    value = np.full((accept.size + 1, size), -np.inf)
    value[0, 1] = 1
    cost = np.zeros((accept.size + 1, size), np.int64)
    split = np.zeros((accept.size + 1, size), np.intp)
    for b, chance in enumerate(accept, start=1):
        gain = np.where(fits, chance * np.where(fits, below.value[n_below], 0), -np.inf)
        total = value[b - 1] + gain
        # The last of equals: earlier children get the larger subtrees.
        last_first = _best(total[:, ::-1], (cost[b - 1] + deeper)[:, ::-1])
        split[b] = size - 1 - last_first
        value[b] = total[np.arange(size), split[b]]
        cost[b] = cost[b - 1][split[b]] + deeper[np.arange(size), split[b]] + b - 1
    n_children = _best(value.T, cost.T)
    chosen = n_children, np.arange(size)
    return _Level(value[chosen], cost[chosen], n_children, split)


def _best(value: FloatArray, cost: NDArray[np.int64]) -> NDArray[np.intp]:
    """Picks of each row the largest value, of equals the one of least cost."""
    best = value.max(axis=-1, keepdims=True)
    equal = value >= best - _SAME
    return np.where(equal, cost, np.iinfo(np.int64).max).argmin(axis=-1)


def _entry(accept: FloatArray, path: tuple[int, ...]) -> tuple:
    """Gives a node's place in the order: likely, shallow, of low rank, then path."""
    # Multiplied in one order whatever the path's, and rounded to 12 digits: products
    # of equal value are equal.
    chance = float(np.prod(accept[sorted(path)]))
    return -float(f"{chance:.11e}"), len(path), path[-1], path


def _arguments(
    acceptance_by_rank: ArrayLike, n_nodes: int, max_depth: int | None
) -> tuple[FloatArray, int, int]:
    """Checks the arguments of a builder; gives a depth that is a number."""
    accept = chances(acceptance_by_rank)
    n_nodes = whole("n_nodes", n_nodes, least=0, remedy=_SIZE)
    if max_depth is None:
        return accept, n_nodes, n_nodes
    max_depth = whole("max_depth", max_depth, least=0, remedy=_DEPTH)
    fits, level = 0, 1
    for _ in range(min(max_depth, n_nodes)):
        level *= accept.size
        fits += level
    if n_nodes > fits:
        raise ValueError(
            f"{n_nodes=} do not fit: with {accept.size} ranks and {max_depth=} a tree "
            f"has at most {fits}; lower n_nodes, raise max_depth, or append zeros to "
            "acceptance_by_rank."
        )
    return accept, n_nodes, min(max_depth, n_nodes)

"""Builders of static trees."""

from collections.abc import Iterable, Sequence

from specjax.trees._check import whole, whole_tuple
from specjax.trees._topology import Topology

# A pass over more rows than this is beyond any use, and a slip of a digit.
_MAX_NODES = 2**14


def chain(n_nodes: int) -> Topology:
    """Builds the tree in which each node follows the one before.

    Args:
      n_nodes: nodes, at least 0.

    Returns:
      The chain, of depth ``n_nodes``.

    Raises:
      ValueError: ``n_nodes`` is no whole number >= 0.
    """
    n_nodes = whole("n_nodes", n_nodes, least=0, remedy="It counts draft tokens.")
    return Topology(tuple(range(-1, n_nodes - 1)))


def k_ary(branching: int | Sequence[int], depth: int | None = None) -> Topology:
    """Builds the tree in which all nodes of a depth have equally many children.

    Args:
      branching: children of each node above the deepest ones, or those of the pending
        token, of the nodes of depth 1, and so on.
      depth: levels; may be left out where ``branching`` is a sequence.

    Returns:
      The tree, level by level.

    Raises:
      ValueError: a number is below 1, ``depth`` is missing or another than the
        sequence's length, or the tree has more than 16384 nodes.
    """
    if isinstance(branching, Sequence):
        widths = whole_tuple("branching", branching, least=1)
        if depth is not None and depth != len(widths):
            raise ValueError(
                f"{depth=} but branching={widths} has {len(widths)} levels; leave "
                "depth out."
            )
    else:
        if depth is None:
            raise ValueError(
                f"{branching=} needs a depth; or give the branching of each level."
            )
        width = whole("branching", branching, least=1, remedy="It counts children.")
        levels = whole("depth", depth, least=0, remedy="It counts levels.")
        widths = (width,) * levels
    parents: list[int] = []
    level = [-1]
    for width in widths:
        if len(parents) + width * len(level) > _MAX_NODES:
            raise ValueError(
                f"branching={branching!r} over {len(widths)} levels makes more than "
                f"{_MAX_NODES} nodes; lower the depth or the branching."
            )
        first = len(parents)
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return Topology(tuple(parents))


def from_paths(paths: Iterable[Sequence[int]]) -> Topology:
    """Builds a tree from the ranks on the way to each of its nodes.

    ``(0,)`` is the first child of the pending token and ``(0, 1)`` the second child
    of that. Ranks may be left out: the gap is kept in ``Topology.ranks``.

    Args:
      paths: one a node, in any order.

    Returns:
      The tree, level by level, and within a level in the order of the paths.

    Raises:
      ValueError: a path is empty, twice there, without its prefix, or not of whole
        numbers >= 0.

    Example:
      >>> from_paths([(0,), (0, 0), (1,)]).parents
      (-1, -1, 0)

    References:
      Cai et al., Medusa, 2024, arXiv:2401.10774, section 2.1.2, and the lists
      ``medusa_choices`` of its code; EAGLE's ``tree_choices`` are of the same form.
    """
    listed = [whole_tuple("path", path, least=0) for path in paths]
    numbers: dict[tuple[int, ...], int] = {}
    for path in sorted(listed, key=lambda path: (len(path), path)):
        if not path:
            raise ValueError(
                "the empty path is the pending token, which is no node; leave it out."
            )
        if path in numbers:
            raise ValueError(f"{path=} is there twice; leave one out.")
        prefix = path[:-1]
        if prefix and prefix not in numbers:
            raise ValueError(
                f"{path=} has no parent: {prefix} is missing; add it, or leave "
                f"{path} out."
            )
        numbers[path] = len(numbers)
    return Topology(
        tuple(numbers.get(path[:-1], -1) for path in numbers),
        tuple(path[-1] for path in numbers),
    )
